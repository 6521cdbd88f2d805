package lab

import "testing"

// Containers behind a node's bridge reach each other, their node, and where it forwards to.
func TestContainersBehindABridge(t *testing.T) {
	l := ForTest(t, Options{Nodes: 2, Families: dual["IPv4, IPv6"]})
	node, other := l.Nodes[0], l.Nodes[1]
	if err := node.AddBridge("docker0", 1400); err != nil {
		t.Fatal(err)
	}
	one, err := node.AddContainer("docker0", "one", 2)
	if err != nil {
		t.Fatal(err)
	}
	two, err := node.AddContainer("docker0", "two", 3)
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
}
