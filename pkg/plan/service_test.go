package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A service CIDR that covers the pods of a cluster at work is a mistake: the pods talk on, no new node is believed, and the
// node says why it is not ready. On a new node it keeps the network away.
func TestServiceCIDRCoversThePods(t *testing.T) {
	before := Make(input(node(1), node(2))).Standing
	in := input(node(1), node(2), node(3))
	in.Service = prefixes("10.244.0.0/16")

	in.Before = before
	r := Make(in)
	got := dump(r)
	for p, v := range dump(Make(input(node(1), node(2)))) {
		if got[p] != v {
			t.Errorf("what stood was hurt: %s is %q, want %q", p, got[p], v)
		}
	}
	if v, there := got["10.244.3.0/24"]; there {
		t.Errorf("a new node is believed: 10.244.3.0/24 is %q", v)
	}
	if r.NotReady == "" || !strings.Contains(r.NotReady, "podCIDR 10.244.1.0/24 overlaps the service CIDR 10.244.0.0/16") || !strings.Contains(r.NotReady, "--service-cidr") {
		t.Errorf("ready %v, because %q", r.NotReady == "", r.NotReady)
	}
	if diff := cmp.Diff([]string{"n1 refused", "n2 podcidr_conflict", "n3 refused"}, problems(r)); diff != "" {
		t.Errorf("problems (-want +got):\n%s\n%v", diff, r.Problems)
	}
	again := in
	again.Before = r.Standing
	if diff := cmp.Diff(got, dump(Make(again))); diff != "" {
		t.Errorf("the next plan is another one (-first +second):\n%s", diff)
	}

	in.Before = Standing{}
	if r := Make(in); r.NotReady == "" || len(r.Routes) > 0 {
		t.Errorf("a new node: ready %v, %d routes", r.NotReady == "", len(r.Routes))
	}
}

// Another node that claims what is in force gains nothing by a service CIDR that covers it.
func TestServiceCIDRAndAnotherClaim(t *testing.T) {
	in := input(node(1), node(9).with(func(n *Node) { n.PodCIDRs = []string{"10.244.2.0/24"} }))
	in.Service = prefixes("10.244.2.0/24")
	in.Before = Standing{Claims: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.244.2.0/24"): netip.MustParseAddr("172.18.0.12")}}
	r := Make(in)
	if v, there := dump(r)["10.244.2.0/24"]; there {
		t.Errorf("10.244.2.0/24 is %q", v)
	}
	if r.NotReady != "" {
		t.Errorf("not ready: %s", r.NotReady)
	}
}
