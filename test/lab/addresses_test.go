package lab

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What each host is known by, and that it has no other address but those that the kernel gives every link.
func TestAddressesOfFamilies(t *testing.T) {
	for name, families := range dual {
		t.Run(name, func(t *testing.T) {
			l := ForTest(t, Options{Nodes: 1, Families: families})
			node := l.Nodes[0]
			want := addresses("172.18.0.11", "fd00:172:18::11")
			if have := node.Addrs(); !slices.Equal(have, selected(want, families)) {
				t.Errorf("the node's addresses are %v", have)
			}
			pods := prefixes("10.244.0.0/24", "fd00:10:244::/64")
			for _, family := range families {
				if node.AddrOf(family) != want[family] || node.PodCIDROf(family) != pods[family] {
					t.Errorf("%v: the node is %s, its pods are in %s", family, node.AddrOf(family), node.PodCIDROf(family))
				}
			}
			if node.Addr() != want[families[0]] || node.PodCIDR() != pods[families[0]] {
				t.Errorf("first are %s and %s", node.Addr(), node.PodCIDR())
			}
			lines, err := node.Namespace.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			others := lines.Only("address").Without("127.0.0.1/8", "::1/128", " fe80:", want[0].String(), want[1].String())
			if len(others) > 0 {
				t.Errorf("the node has other addresses: %q", others)
			}
		})
	}
	l := ForTest(t, Options{Nodes: 1})
	if node := l.Nodes[0]; node.AddrOf(wire.IPv6).IsValid() || node.PodCIDROf(wire.IPv6).IsValid() {
		t.Errorf("without IPv6 a node has %s and %s", node.AddrOf(wire.IPv6), node.PodCIDROf(wire.IPv6))
	}
}

// An address that can't be used yet would cost a test its first packets.
func TestAddressesAreUsableAtOnce(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1, Router: true, Families: dual["IPv4, IPv6"]})
	for _, ns := range l.Namespaces() {
		if tentative, err := ns.tentative(); err != nil || len(tentative) > 0 {
			t.Errorf("%s has addresses that can't be used yet: %v; error %v", ns.Netns(), tentative, err)
		}
	}
	if value, err := l.Nodes[0].ReadSysctl("net/ipv6/conf/" + Uplink + "/accept_dad"); value != "0" || err != nil {
		t.Errorf("the node looks for somebody else with its addresses: accept_dad is %s; error %v", value, err)
	}
}

func TestFamiliesAreSaidOnce(t *testing.T) {
	for _, opts := range []Options{
		{Families: []wire.Family{wire.IPv6, wire.IPv6}}, {Underlay: []wire.Family{wire.IPv4, wire.IPv4}}, {Families: []wire.Family{wire.Families}},
	} {
		if _, err := opts.withDefaults(); err == nil || !strings.Contains(err.Error(), "at most once") {
			t.Errorf("%v over %v: %v", opts.Families, opts.Underlay, err)
		}
	}
}

// Who lacks a family has no address in it, which nobody reaches.
func TestNoAddressIsReached(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1})
	node := l.Nodes[0]
	server, err := node.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(node.AddrOf(wire.IPv6), server.Port)
	_, ping := node.Ping(t.Context(), at.Addr(), PingOptions{})
	_, tcp := node.TCP(t.Context(), at)
	_, udp := node.UDP(t.Context(), at, 64)
	for what, err := range map[string]error{"ping": ping, "TCP": tcp, "UDP": udp} {
		if !errors.Is(err, errNoAddress) {
			t.Errorf("%s: %v, want that there is no address", what, err)
		}
	}
}
