package plan

import (
	"net/netip"
	"strings"
	"testing"
)

func TestNextHops(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	for _, tt := range []struct {
		name    string
		route   KernelRoute
		before  Standing
		refused bool
	}{
		{"the way to elsewhere", KernelRoute{Dst: prefix("192.0.2.0/24"), Index: 2, Via: addr("10.244.2.1")}, Standing{}, true},
		{"the way to everywhere", KernelRoute{Dst: prefix("0.0.0.0/0"), Index: 2, Via: addr("10.244.2.1")}, Standing{}, true},
		{"the way to more than the podCIDR", KernelRoute{Dst: prefix("10.244.0.0/16"), Index: 2, Via: addr("10.244.2.1")}, Standing{}, true},
		// As another pod network leaves them behind.
		{"the way to the podCIDR", KernelRoute{Dst: prefix("10.244.2.0/24"), Index: 2, Via: addr("10.244.2.0")}, Standing{}, false},
		{"the way to a part of it", KernelRoute{Dst: prefix("10.244.2.128/25"), Index: 2, Via: addr("10.244.2.0")}, Standing{}, false},
		{"no uplink", KernelRoute{Dst: prefix("192.0.2.0/24"), Index: 7, Via: addr("10.244.2.1")}, Standing{}, false},
		{"beside it", KernelRoute{Dst: prefix("192.0.2.0/24"), Index: 2, Via: addr("10.244.3.1")}, Standing{}, false},
		{"a pod of ours", KernelRoute{Dst: prefix("192.0.2.0/24"), Index: 2, Via: addr("10.244.1.1")}, Standing{Own: prefixes("10.244.1.0/24")}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := input(node(1), node(2))
			in.Before = tt.before
			in.Facts.Routes = append(in.Facts.Routes, tt.route)
			r := Make(in)
			if _, there := dump(r)["10.244.2.0/24"]; there == tt.refused || (len(r.Problems) > 0) != tt.refused || r.NotReady != "" {
				t.Errorf("entry %v, ready %v, problems %v; want it refused: %v", there, r.NotReady == "", r.Problems, tt.refused)
			}
		})
	}
}

// What is not meant by what is written is said.
func TestHostBits(t *testing.T) {
	r := Make(input(
		node(1).with(func(n *Node) { n.PodCIDRs = []string{"10.244.1.7/24"} }),
		node(2).with(func(n *Node) { n.PodCIDRs = []string{"10.244.2.9/24"} }), node(3)))
	for _, p := range []string{"10.244.1.0/24", "10.244.2.0/24"} {
		if _, there := dump(r)[p]; !there {
			t.Errorf("%s has no entry", p)
		}
	}
	notes := strings.Join(r.Notes, "\n")
	if len(r.Notes) != 2 || !strings.Contains(notes, "10.244.1.7/24 of node n1") || !strings.Contains(notes, "10.244.2.9/24 of node n2") {
		t.Errorf("notes: %s", notes)
	}
}

func TestSharedAddresses(t *testing.T) {
	for _, tt := range []struct {
		addr, link string
		want       bool
	}{
		{"172.18.0.255", "172.18.0.0/24", true},
		{"172.18.0.0", "172.18.0.0/24", false}, // the kernel takes it as a gateway
		{"172.18.0.254", "172.18.0.0/24", false},
		{"172.18.0.255", "172.18.0.0/23", false},
		{"172.18.1.255", "172.18.0.0/24", false},
		{"172.18.0.1", "172.18.0.0/31", false},
		{"172.18.0.1", "172.18.0.1/32", false},
		{"255.255.255.255", "128.0.0.0/1", true},
		{"fd00::ffff", "fd00::/112", false},
		{"fd00::", "fd00::/112", true},
		{"fd00::1", "fd00::/112", false},
		{"fd00::", "fd00::/127", false},
		{"fd00::", "fd00::/128", false},
	} {
		if got := isShared(netip.MustParseAddr(tt.addr), netip.MustParsePrefix(tt.link)); got != tt.want {
			t.Errorf("%s on %s: %v, want %v", tt.addr, tt.link, got, tt.want)
		}
	}
}
