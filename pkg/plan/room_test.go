package plan

import (
	"maps"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// crowded is what node 1 has of a cluster with so many others, the last of which is on no link of its own.
func crowded(others int, policies ...Policy) map[destinations.Key]destinations.Value {
	return crowdedIn(RouteDirect, others, policies...)
}

func crowdedIn(mode RoutingMode, others int, policies ...Policy) map[destinations.Key]destinations.Value {
	nodes := []Node{node(1)}
	for i := range others {
		nodes = append(nodes, node(2+i))
	}
	nodes[others].InternalIPs = []string{"203.0.113.9"}
	in := input(nodes...)
	in.Mode, in.Facts.Tunnel = mode, tunnelIndex
	in.Facts.Policies, in.Native = policies, prefixes("10.96.0.0/12")
	return Make(in).Destinations
}

func essentials(all map[destinations.Key]destinations.Value) (keys []destinations.Key) {
	for k := range all {
		if Essential(all, k) {
			keys = append(keys, k)
		}
	}
	return keys
}

func count(all map[destinations.Key]destinations.Value, of func(destinations.Value) bool) (n int) {
	for _, v := range all {
		if of(v) {
			n++
		}
	}
	return n
}

func reachable(v destinations.Value) bool {
	return v.Kind == destinations.PodCIDR && v.Way() != destinations.None
}
func offLink(v destinations.Value) bool {
	return v.Kind == destinations.PodCIDR && v.Way() == destinations.None
}
func ofNode(v destinations.Value) bool { return v.Kind == destinations.Node }

// However little room there is, what is least needed is left first, and what is essential never.
func TestFit(t *testing.T) {
	const others = 20
	want := crowded(others)
	must := essentials(want)
	if len(must)+2*others != len(want) || len(must) == 0 {
		t.Fatalf("%d of %d are essential", len(must), len(want))
	}
	for room := range len(want) + 2 {
		fit, left := Fit(want, nil, room)
		if len(fit)+len(left) != len(want) || len(fit) != min(max(room, len(must)), len(want)) {
			t.Fatalf("room for %d: %d fit, %d are left", room, len(fit), len(left))
		}
		for _, k := range must {
			if _, there := fit[k]; !there {
				t.Errorf("room for %d: %v is left", room, k)
			}
		}
		rest := max(room-len(must), 0)
		near := min(rest, others-1)
		far := min(rest-near, 1)
		addresses := min(rest-near-far, others)
		if count(fit, reachable) != near || count(fit, offLink) != far || count(fit, ofNode) != addresses {
			t.Errorf("room for %d: %d reachable podCIDRs, %d others, %d addresses", room, count(fit, reachable), count(fit, offLink), count(fit, ofNode))
		}
	}
}

// What is behind the tunnel is needed as much as what is on a link.
func TestFitBehindTheTunnel(t *testing.T) {
	const others = 20
	want := crowdedIn(RouteVXLAN, others)
	must := essentials(want)
	if len(must)+2*others != len(want) {
		t.Fatalf("%d of %d are essential", len(must), len(want))
	}
	fit, _ := Fit(want, nil, len(must)+others)
	if count(fit, reachable) != others || count(fit, ofNode) != 0 {
		t.Errorf("%d podCIDRs, %d addresses", count(fit, reachable), count(fit, ofNode))
	}
}

// What is there stays, unless something is needed more: nothing comes and goes by turns.
func TestFitIsStable(t *testing.T) {
	want := crowded(20)
	have, _ := Fit(want, nil, len(want)-5)
	for range 5 {
		if again, _ := Fit(want, have, len(want)-5); !maps.Equal(again, have) {
			t.Fatalf("%v, then %v", have, again)
		}
	}
	fewer, _ := Fit(want, have, len(want)-7)
	for k := range fewer {
		if _, there := have[k]; !there {
			t.Errorf("%v takes the place of one like it", k)
		}
	}
}

// An entry is essential by its flags if without it packets would miss the host's policies, not if a wider one has them too.
func TestEssentialByFlags(t *testing.T) {
	const pods, all, peer, part = "10.244.1.0/24", "0.0.0.0/0", "10.244.2.0/24", "10.244.3.128/25"
	for name, tt := range map[string]struct {
		policies []Policy
		more     []string
	}{
		"a peer and a part of another": {
			[]Policy{policy("out", pods, peer), policy("out", pods, part)}, []string{peer, part},
		},
		"everything, and as much of it again": {
			[]Policy{policy("out", pods, all), policy("out", pods, peer)}, []string{all},
		},
		"everything, and what must not leave unencrypted": {
			[]Policy{policy("out", pods, all), policy("out", "172.18.0.11/32", part)}, []string{all, part},
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := essentials(crowded(5))
			for _, p := range prefixes(tt.more...) {
				want = append(want, destinations.KeyFrom(p))
			}
			got := essentials(crowded(5, tt.policies...))
			compare := func(a, b destinations.Key) int { return a.Netip().Compare(b.Netip()) }
			slices.SortFunc(got, compare)
			slices.SortFunc(want, compare)
			if !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		})
	}
}
