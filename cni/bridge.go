package cni

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// readBridge reads the fields that the plugin flannel adds to a configuration that it delegates, or its users do, as for the
// plugin bridge. Beside the default routes, what they ask for is what every pod has anyway, or the agent's to decide; where
// they ask for something else they are unknown.
func (c *conf) readBridge() error {
	// Flannel always sets ipMasq, and names a route to its network, which would be a pod's only one.
	_, c.defaultRoutes = c.fields["ipMasq"]
	masquerade, gateway, hairpin := false, true, true
	for _, f := range []struct {
		name string
		into *bool
	}{
		{"isDefaultGateway", &c.defaultRoutes}, {"ipMasq", &masquerade}, {"isGateway", &gateway}, {"hairpinMode", &hairpin},
	} {
		if err := c.fields.decode(f.name, "true or false", f.into); err != nil {
			return err
		}
	}
	for name, other := range map[string]bool{"ipMasq": masquerade, "isGateway": !gateway, "hairpinMode": !hairpin} {
		if other {
			c.unknown = append(c.unknown, name)
		}
	}
	return nil
}

// tellIgnored says which fields of the configuration have no meaning here: once for a network while the node is up, since
// every pod's has them.
func (a *addition) tellIgnored(fields []string) {
	if len(fields) == 0 {
		return
	}
	line := a.network + ": " + strings.Join(fields, " ") + "\n"
	path := filepath.Join(a.stateDir, endpoint.IgnoredFile)
	if told, err := os.ReadFile(path); err == nil && strings.Contains("\n"+string(told), "\n"+line) {
		return
	}
	a.log.Warn("fields of the network configuration ignored", "fields", fields)
	// Where it can't be noted, the next ADD says so once more.
	if f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|unix.O_CLOEXEC, 0o600); err == nil {
		_, _ = fmt.Fprint(f, line)
		_ = f.Close()
	}
}
