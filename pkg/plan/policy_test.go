package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// policy is one that leaves, or is forwarded, as `ip xfrm policy` names them.
func policy(dir, src, dst string) Policy {
	return Policy{Src: netip.MustParsePrefix(src), Dst: netip.MustParsePrefix(dst), Out: dir == "out", Required: true}
}

// flagged writes the entries with flags, and the node's flags, as text.
func flagged(r Result) map[string]string {
	out := map[string]string{}
	if r.Config.Flags != 0 {
		out["node"] = r.Config.Flags.String()
	}
	for k, v := range r.Destinations {
		if v.Flags != 0 {
			out[k.Netip().String()] = v.Kind.String() + " " + v.Flags.String()
		}
	}
	return out
}

func TestPolicies(t *testing.T) {
	const pods, everything = "10.244.1.0/24", "0.0.0.0/0"
	for name, c := range map[string]struct {
		policies []Policy
		want     map[string]string
	}{
		"none": {},
		"to the world": {
			[]Policy{policy("out", everything, "192.0.2.0/24")},
			map[string]string{"node": "policies", "192.0.2.0/24": "world to_stack|part"},
		},
		"from the world": {
			[]Policy{policy("fwd", "192.0.2.0/24", pods)},
			map[string]string{"node": "policies", "192.0.2.0/24": "world to_stack|part"},
		},
		"both ends of a tunnel": {
			[]Policy{policy("out", pods, "192.0.2.0/24"), policy("fwd", "192.0.2.0/24", pods)},
			map[string]string{"node": "policies", "192.0.2.0/24": "world to_stack|part"},
		},
		"another node's podCIDR": {
			[]Policy{policy("out", pods, "10.244.2.0/24")},
			map[string]string{"node": "policies", "10.244.2.0/24": "pod_cidr to_stack"},
		},
		"a part of it, and a part of that": {
			[]Policy{policy("out", pods, "10.244.2.64/26"), policy("out", "10.244.1.7/32", "10.244.2.70/32")},
			map[string]string{
				"node": "policies", "10.244.2.64/26": "pod_cidr to_stack|part", "10.244.2.70/32": "pod_cidr to_stack|part",
			},
		},
		"what holds entries": {
			[]Policy{policy("out", pods, "172.18.0.0/24")},
			map[string]string{
				"node": "policies", "172.18.0.0/24": "world to_stack|part", "172.18.0.11/32": "host to_stack", "172.18.0.12/32": "node to_stack",
			},
		},
		"pods of the whole cluster": {
			[]Policy{policy("out", "10.244.0.0/16", "10.244.0.0/16")},
			map[string]string{
				"node": "pod_cidr_to_stack|policies", "10.244.0.0/16": "native to_stack",
				pods: "local to_stack", "10.244.2.0/24": "pod_cidr to_stack",
			},
		},
		"one pod of this node": {
			[]Policy{policy("out", pods, "10.244.1.7/32")},
			map[string]string{"node": "pod_cidr_to_stack|policies", pods: "local to_stack"},
		},
		"a pod outside the podCIDR": {
			[]Policy{policy("out", "10.9.9.9/32", "192.0.2.1/32"), policy("out", "10.8.0.0/16", "192.0.2.2/32")},
			map[string]string{"node": "policies", "192.0.2.1/32": "world to_stack|part"},
		},
		"the node alone": {
			[]Policy{
				policy("out", "172.18.0.11/32", "192.0.2.1/32"), policy("fwd", "172.18.0.11/32", "192.0.2.2/32"),
				{Src: netip.MustParsePrefix("172.18.0.11/32"), Dst: netip.MustParsePrefix("192.0.2.3/32"), Out: true},
			},
			map[string]string{"node": "policies", "192.0.2.1/32": "world to_stack|protected|part"},
		},
		"others": {[]Policy{policy("out", "10.77.0.0/16", "192.0.2.0/24"), policy("fwd", "10.77.0.0/16", "10.78.0.0/16")}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			in := input(node(1), node(2))
			in.Native = prefixes("10.244.0.0/16")
			in.Facts.Endpoints = []netip.Addr{netip.MustParseAddr("10.9.9.9")}
			in.Facts.Policies = c.policies
			r := Make(in)
			if c.want == nil {
				c.want = map[string]string{}
			}
			if diff := cmp.Diff(c.want, flagged(r)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			bare := in
			bare.Facts.Policies = nil
			// But for the flags and the parts everything is as without.
			have := r.Destinations
			maps.DeleteFunc(have, func(_ destinations.Key, v destinations.Value) bool { return v.Flags&destinations.Part != 0 })
			for k, v := range have {
				v.Flags = 0
				have[k] = v
			}
			if diff := cmp.Diff(fmt.Sprint(Make(bare).Destinations), fmt.Sprint(have)); diff != "" {
				t.Errorf("other entries (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEverythingUnderAPolicy(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Policies = []Policy{policy("out", "10.244.1.0/24", "0.0.0.0/0")}
	r := Make(in)
	if v, ok := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("0.0.0.0/0"))]; !ok || v.Kind != destinations.World {
		t.Errorf("the world: %+v, %v", v, ok)
	}
	for k, v := range r.Destinations {
		if v.Flags&destinations.ToStack == 0 {
			t.Errorf("%s: flags %s", k.Netip(), v.Flags)
		}
	}
	if got := r.Config.Flags.String(); got != "pod_cidr_to_stack|policies" {
		t.Errorf("the node: %s", got)
	}
}

// A part of a podCIDR leads where the whole does.
func TestPartOfAPodCIDR(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Policies = []Policy{policy("out", "10.244.1.0/24", "10.244.2.64/26")}
	r := Make(in)
	whole := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.2.0/24"))]
	part := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.2.64/26"))]
	whole.Flags = part.Flags
	if part != whole || part.Ifindex != 2 {
		t.Errorf("the part is %+v, the whole %+v", part, whole)
	}
}

// A policy for what is masqueraded to an address of the node's holds on while that is away for a moment.
func TestPolicyOfAnAddressThatIsAway(t *testing.T) {
	in := input(node(1), node(2))
	in.Facts.Policies = []Policy{
		{Src: netip.MustParsePrefix("172.18.0.11/32"), Dst: netip.MustParsePrefix("192.0.2.1/32"), Out: true, Required: true},
	}
	key := destinations.KeyFrom(netip.MustParsePrefix("192.0.2.1/32"))
	there := Make(in).Destinations[key]
	in.Facts.Local, in.Facts.Addresses, in.Facts.Recent = nil, nil, []Recent{{netip.MustParseAddr("172.18.0.11"), 2}}
	if away := Make(in).Destinations[key]; away != there || away.Flags&destinations.Protected == 0 {
		t.Errorf("%+v, while the address was there %+v", away, there)
	}
}
