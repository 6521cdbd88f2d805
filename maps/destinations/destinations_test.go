package destinations

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestKeyFrom(t *testing.T) {
	for _, c := range []struct {
		in     string
		bits   uint32
		prefix string
		text   string
	}{
		{"10.244.2.0/24", 120, "10.244.2.0", "10.244.2.0/24"},
		{"10.244.2.77/24", 120, "10.244.2.0", "10.244.2.0/24"},
		{"172.18.0.3/32", 128, "172.18.0.3", "172.18.0.3/32"},
		{"0.0.0.0/0", 96, "0.0.0.0", "0.0.0.0/0"},
		{"2001:db8:1::/64", 64, "2001:db8:1::", "2001:db8:1::/64"},
		{"2001:db8:1::5/128", 128, "2001:db8:1::5", "2001:db8:1::5/128"},
		{"::/0", 0, "::", "::/0"},
		// Notations of IPv4 prefixes as IPv6.
		{"::ffff:10.244.2.0/120", 120, "10.244.2.0", "10.244.2.0/24"},
		{"::ffff:0:0/96", 96, "0.0.0.0", "0.0.0.0/0"},
		{"::ffff:0:0/90", 90, "::ffc0:0:0", "::ffc0:0:0/90"},
	} {
		got := KeyFrom(netip.MustParsePrefix(c.in))
		if want := (Key{c.bits, wire.Addr(netip.MustParseAddr(c.prefix).As16())}); got != want {
			t.Errorf("KeyFrom(%s) = %v, want %v", c.in, got, want)
		}
		if text := got.Netip().String(); text != c.text {
			t.Errorf("%s comes back as %s, want %s", c.in, text, c.text)
		}
	}
}

func TestSame(t *testing.T) {
	base := Value{Kind: PodCIDR, Ifindex: 2, Node: wire.Addr{15: 1}, MTU: 1500}
	checked := base
	checked.NeighbourChecked = 77
	if !Same(checked, base) || !Same(base, checked) {
		t.Error("what the programs write must not count as a difference")
	}
	for name, change := range map[string]func(*Value){
		"kind":    func(v *Value) { v.Kind = Native },
		"ifindex": func(v *Value) { v.Ifindex = 0 },
		"node":    func(v *Value) { v.Node[15]++ },
		"mtu":     func(v *Value) { v.MTU-- },
		"flags":   func(v *Value) { v.Flags = ToStack },
		"uplinks": func(v *Value) { v.Uplinks++ },
		"mac":     func(v *Value) { v.MAC[5]++ },
		"alias":   func(v *Value) { v.Alias[15]++ },
	} {
		other := base
		change(&other)
		if Same(base, other) {
			t.Errorf("another %s must count as a difference", name)
		}
	}
}

func TestKindText(t *testing.T) {
	if got := PodCIDR.String() + Kind(17).String(); got != "pod_cidr17" {
		t.Errorf("%q", got)
	}
}
