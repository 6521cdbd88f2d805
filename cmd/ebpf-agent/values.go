package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// optional also takes the empty value, which sets nothing.
func optional(v cli.Value) cli.Value {
	set := v.Set
	v.Takes += ", or nothing"
	v.Set = func(s string) error {
		if s == "" {
			return nil
		}
		return set(s)
	}
	return v
}

// portmap also takes auto, for off, with a warning later.
func (o *options) portmap() cli.Value {
	v := cli.OnOff(&o.config.Portmap)
	set := v.Set
	v.Set = func(s string) error {
		if o.portmapAuto = s == "auto"; o.portmapAuto {
			s = "off"
		}
		return set(s)
	}
	return v
}

func existingDirectory(into *string) cli.Value {
	return cli.Value{Arg: "DIR", Takes: "a directory that exists", Set: func(s string) error {
		info, err := os.Stat(s)
		if err != nil {
			return errors.Unwrap(err)
		}
		if !info.IsDir() {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}

// existingFile refuses a file that is not there; what is in it may still change.
func existingFile(into *string, takes string) cli.Value {
	return cli.Value{Arg: "FILE", Takes: takes, Set: func(s string) error {
		if s == "" {
			return cli.ErrTakes
		}
		info, err := os.Stat(s)
		if err != nil {
			return errors.Unwrap(err)
		}
		if info.IsDir() {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}

// chain reads the plugins that the administrator chains after ours.
func chain(into *[]json.RawMessage) cli.Value {
	return cli.Value{Arg: "FILE", Takes: `a file with a JSON list such as [{"type": "tuning"}]`, Set: func(s string) (err error) {
		*into, err = agent.LoadChain(s)
		return err
	}}
}

// prefixes is a list of prefixes. Bits beyond a prefix's length are dropped, as in
// podCIDRs, with a warning later.
func (o *options) prefixes(into *[]netip.Prefix) cli.Value {
	v := o.ranges(into)
	v.Takes += ", but not 0.0.0.0/0 or ::/0"
	set := v.Set
	v.Set = func(s string) error {
		if err := set(s); err != nil {
			return err
		}
		if i := slices.IndexFunc(*into, func(p netip.Prefix) bool { return p.Bits() == 0 }); i >= 0 {
			return fmt.Errorf("%s is refused", (*into)[i])
		}
		return nil
	}
	return v
}

// ranges is a list of prefixes, of any length.
func (o *options) ranges(into *[]netip.Prefix) cli.Value {
	return cli.Value{Arg: "CIDR,...", Takes: "prefixes such as 10.0.0.0/8, comma-separated", Set: func(s string) error {
		for _, one := range list(s) {
			p, err := netip.ParsePrefix(one)
			if err != nil {
				return fmt.Errorf("%q is not a prefix", one)
			}
			if p.Addr().Is4In6() {
				return fmt.Errorf("%s is refused", one)
			}
			if p != p.Masked() {
				o.masked = append(o.masked, p)
			}
			*into = append(*into, p.Masked())
		}
		return nil
	}}
}

// apiServers are addresses of API servers, each once.
func apiServers(into *[]string) cli.Value {
	return cli.Value{Arg: "URL,...", Takes: "URLs such as https://10.0.0.1:6443, comma-separated", Set: func(s string) error {
		for _, one := range list(s) {
			at, err := agent.ParseAPIServer(one)
			if err != nil {
				return err
			}
			if !slices.Contains(*into, at) {
				*into = append(*into, at)
			}
		}
		if len(*into) == 0 {
			return cli.ErrTakes
		}
		return nil
	}}
}

// list splits at commas and skips what is empty.
func list(s string) []string {
	var out []string
	for one := range strings.SplitSeq(s, ",") {
		if one = strings.TrimSpace(one); one != "" {
			out = append(out, one)
		}
	}
	return out
}

func listener(into *string) cli.Value {
	return optional(cli.Value{Arg: "HOST:PORT", Takes: "HOST:PORT, where HOST may be an address, localhost or nothing for every address", Set: func(s string) error {
		host, port, err := net.SplitHostPort(s)
		if err != nil {
			return cli.ErrTakes
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return cli.ErrTakes
		}
		if host != "" && host != "localhost" {
			if _, err := netip.ParseAddr(host); err != nil {
				return cli.ErrTakes
			}
		}
		*into = s
		return nil
	}})
}

func nodeName(into *string) cli.Value {
	return cli.Value{Arg: "NAME", Takes: "the name of a Node", Set: func(s string) error {
		if s == "" || len(s) > 253 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == '/' || r == 0x7f }) {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}

func uplinks(into *[]string) cli.Value {
	return cli.Value{Arg: "IFACE,...", Takes: "names of interfaces that exist, comma-separated", Set: func(s string) error {
		*into = list(s)
		for _, name := range *into {
			if err := agent.CheckUplink(name); err != nil {
				return err
			}
		}
		if len(*into) == 0 {
			return cli.ErrTakes
		}
		return nil
	}}
}

// bridges takes those that do not exist yet, too: somebody else makes them.
func bridges(into *[]string) cli.Value {
	return cli.Value{Arg: "IFACE,...", Takes: "names of bridges, comma-separated", Set: func(s string) error {
		*into = list(s)
		for _, name := range *into {
			if err := agent.CheckBridge(name); err != nil {
				return err
			}
		}
		if len(*into) == 0 {
			return cli.ErrTakes
		}
		return nil
	}}
}

func port(into *uint16) cli.Value {
	var n uint32
	v := cli.Number(&n, "PORT", 1, 1<<16-1)
	set := v.Set
	v.Set = func(s string) error {
		err := set(s)
		*into = uint16(n)
		return err
	}
	return v
}

func snatPorts(into *[]agent.PortRange) cli.Value {
	return cli.Value{Arg: "LOW-HIGH,...", Takes: "auto, or up to four ranges LOW-HIGH, each from 1 to 65535, comma-separated", Set: func(s string) (err error) {
		if *into = nil; s != "auto" {
			*into, err = agent.ParsePortRanges(s)
		}
		return err
	}}
}

// snatAddresses refuses what the node does not have: an administrator's mistake would leave pods without the world.
func snatAddresses(into *[]agent.SnatAddress) cli.Value {
	return cli.Value{Arg: "[IFACE=]ADDR,...", Takes: "addresses of this node, each after the name of an uplink and = if it is for that uplink alone, comma-separated", Set: func(s string) error {
		held, err := net.InterfaceAddrs()
		if err != nil {
			return fmt.Errorf("list the addresses of this node: %w", err)
		}
		*into = nil
		for _, one := range list(s) {
			a, err := snatAddress(one, held)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(*into, func(b agent.SnatAddress) bool { return a.Uplink == b.Uplink && a.Addr.Is4() == b.Addr.Is4() }) {
				return fmt.Errorf("%q is a second address of its family for the same uplinks", one)
			}
			*into = append(*into, a)
		}
		if len(*into) == 0 {
			return cli.ErrTakes
		}
		return nil
	}}
}

func snatAddress(text string, held []net.Addr) (a agent.SnatAddress, err error) {
	name, addr, named := strings.Cut(text, "=")
	if !named {
		name, addr = "", text
	} else if _, err := net.InterfaceByName(name); err != nil {
		return a, fmt.Errorf("there is no interface %q", name)
	}
	a.Uplink = name
	if a.Addr, err = netip.ParseAddr(addr); err != nil || a.Addr.Zone() != "" || a.Addr.Is4In6() {
		return a, fmt.Errorf("%q is not an address", addr)
	}
	if !a.Addr.IsGlobalUnicast() {
		return a, fmt.Errorf("the world can't answer to %s", a.Addr)
	}
	if !slices.ContainsFunc(held, func(h net.Addr) bool {
		p, err := netip.ParsePrefix(h.String())
		return err == nil && p.Addr() == a.Addr
	}) {
		return a, fmt.Errorf("no interface of this node has the address %s", a.Addr)
	}
	return a, nil
}

func mtu(into *int) cli.Value {
	return cli.Value{Arg: "BYTES", Takes: "0, or a number from 576 to 65535", Set: func(s string) error {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || n != 0 && n < 576 {
			return cli.ErrTakes
		}
		*into = int(n)
		return nil
	}}
}

func mark(into *uint32) cli.Value {
	return cli.Value{Arg: "BIT", Takes: "a number with one bit set, but 0x4000 and 0x8000, which are kube-proxy's", Set: func(s string) error {
		n, err := strconv.ParseUint(s, 0, 32)
		if err != nil || bits.OnesCount64(n) != 1 || n == 0x4000 || n == 0x8000 {
			return cli.ErrTakes
		}
		*into = uint32(n)
		return nil
	}}
}
