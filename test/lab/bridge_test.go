package lab

import (
	"net/netip"
	"testing"
)

// Containers behind a node's bridge reach each other, their node, and where it forwards to.
func TestContainersBehindABridge(t *testing.T) {
	l := ForTest(t, Options{Nodes: 2, Families: dual["IPv4, IPv6"]})
	node, other := l.Nodes[0], l.Nodes[1]
	b, err := node.AddBridge("docker0", 1400, netip.MustParsePrefix("10.244.0.1/24"), netip.MustParsePrefix("fd00:10:244::1/64"))
	if err != nil {
		t.Fatal(err)
	}
	one, err := b.AddContainer("one", netip.MustParseAddr("10.244.0.2"), netip.MustParseAddr("fd00:10:244::2"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := b.AddContainer("two", netip.MustParseAddr("10.244.0.3"), netip.MustParseAddr("fd00:10:244::3"))
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range l.Options.Families {
		if err := other.AddRoute(node.PodCIDROf(family), node.AddrOf(family), ""); err != nil {
			t.Fatal(err)
		}
		for _, to := range []*Namespace{two, node.Namespace, other.Namespace} {
			if _, err := one.Ping(t.Context(), to.AddrOf(family), PingOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := b.AddContainer("three", netip.MustParseAddr("10.244.1.3")); err == nil {
		t.Error("a container has an address that is in none of the bridge's networks")
	}
}
