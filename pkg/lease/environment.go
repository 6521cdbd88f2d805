package lease

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

// Environment is what a container engine is told of the network, in a file of settings as flanneld writes it.
type Environment struct {
	Networks, Subnets [wire.Families]netip.Prefix
	// MTU of containers, in bytes of IP packet.
	MTU int
	// Masquerade says that the network masquerades what containers send to the world, so that the engine need not.
	Masquerade bool
}

// The names that a family's settings begin with.
var environmentNames = [wire.Families]string{wire.IPv4: "FLANNEL_", wire.IPv6: "FLANNEL_IPV6_"}

// String is the content of the file. A subnet is written with its first address, which is the bridge's.
func (e Environment) String() string {
	var b strings.Builder
	for f, names := range environmentNames {
		if s := e.Subnets[f]; s.IsValid() && e.Networks[f].IsValid() {
			fmt.Fprintf(&b, "%sNETWORK=%s\n%[1]sSUBNET=%[3]s\n", names, e.Networks[f], netip.PrefixFrom(s.Addr().Next(), s.Bits()))
		}
	}
	fmt.Fprintf(&b, "FLANNEL_MTU=%d\nFLANNEL_IPMASQ=%v\n", e.MTU, e.Masquerade)
	return b.String()
}

// Write puts the file in its place, whole, and reports whether it was another one.
func (e Environment) Write(path string) (changed bool, err error) {
	content := []byte(e.String())
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return false, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return false, fmt.Errorf("make the directory of the subnet file: %w", err)
	}
	if err := install.Replace(path, 0o644, bytes.NewReader(content)); err != nil {
		return false, fmt.Errorf("write the subnet file: %w", err)
	}
	return true, nil
}

// readSubnet returns the subnet that such a file names; of one that is not there, or that is unreadable, none.
func readSubnet(path string) (s Subnet, err error) {
	content, err := os.ReadFile(path) //nolint:gosec // the path is the administrator's
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	for line := range strings.Lines(string(content)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		for f, names := range environmentNames {
			if name != names+"SUBNET" {
				continue
			}
			p, err := netip.ParsePrefix(value)
			if err != nil {
				return Subnet{}, fmt.Errorf("%s in %s: %w", name, path, err)
			}
			s[f] = p.Masked()
		}
	}
	return s, nil
}
