package plan

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// docker0 is a bridge with these addresses.
func docker0(addresses ...string) Bridge {
	b := Bridge{Index: 9, Name: "docker0"}
	for _, a := range addresses {
		b.Addresses = append(b.Addresses, netip.MustParsePrefix(a))
	}
	return b
}

// What is behind a bridge is in this node's podCIDR, and the host's own addresses there are not behind it.
func TestBridges(t *testing.T) {
	own := netip.MustParsePrefix("10.244.1.0/24")
	for name, c := range map[string]struct {
		bridge Bridge
		local  []string
		want   map[string]uint32
		route  bool // the podCIDR has an unreachable route of ours
	}{
		"the whole podCIDR": {docker0("10.244.1.1/24"), []string{"10.244.1.1/32"}, map[string]uint32{"10.244.1.0/24": 9, "10.244.1.1/32": 0, "10.244.1.255/32": 0}, false},
		"a part of it":      {docker0("10.244.1.129/25"), []string{"10.244.1.129/32"}, map[string]uint32{"10.244.1.128/25": 9, "10.244.1.129/32": 0, "10.244.1.255/32": 0}, true},
		"elsewhere":         {docker0("172.17.0.1/16"), []string{"172.17.0.1/32"}, map[string]uint32{}, true},
		"wider":             {docker0("10.244.1.1/16"), nil, map[string]uint32{}, true},
		"no address":        {docker0(), nil, map[string]uint32{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			in := input(node(1), node(2))
			in.Facts.Bridges = []Bridge{c.bridge}
			in.Facts.Local = slices.Concat(in.Facts.Local, prefixes(c.local...))
			in.Facts.Broadcast = prefixes("10.244.1.255/32")
			r := Make(in)
			if r.NotReady != "" || len(r.Problems) != 0 {
				t.Errorf("not ready: %q, problems %v", r.NotReady, r.Problems)
			}
			got := map[string]uint32{}
			for k, v := range r.Bridges {
				got[k.String()] = v.Ifindex
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("bridges (-want +got):\n%s", diff)
			}
			if has := slices.ContainsFunc(r.Routes, func(r Route) bool { return r.Dst == own }); has != c.route {
				t.Errorf("a route to the podCIDR: %t, want %t", has, c.route)
			}
			if kind := dump(r)["10.244.1.0/24"]; kind != "local" {
				t.Errorf("the podCIDR is %q", kind)
			}
		})
	}
}

// An address of the podCIDR that no such bridge has still refuses it.
func TestPodCIDRWithAForeignAddress(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Bridges = []Bridge{docker0("10.244.1.1/24")}
	in.Facts.Local = slices.Concat(in.Facts.Local, prefixes("10.244.1.1/32", "10.244.1.7/32"))
	if r := Make(in); r.NotReady == "" {
		t.Errorf("ready, with %v", slices.Collect(maps.Keys(r.Bridges)))
	}
}
