package plan

import (
	"net/netip"
	"testing"
)

// network is a node with its other nodes on eth0 (1500), the world behind eth1 (1450), and a bridge of its own (1280).
func network() Input {
	in := input(node(1), node(2))
	in.Facts.Uplinks[0].MTU = 1500
	in.Facts.Uplinks = append(in.Facts.Uplinks,
		Link{Index: 3, Name: "eth1", MTU: 1450, Bit: 1}, Link{Index: 4, Name: "docker0", MTU: 1280, Bit: 2})
	in.Facts.Routes = []KernelRoute{
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 3, Via: netip.MustParseAddr("192.0.2.1")},
		{Dst: netip.MustParsePrefix("172.18.0.0/24"), Index: 2, OnLink: true},
		{Dst: netip.MustParsePrefix("192.0.2.0/24"), Index: 3, OnLink: true},
		{Dst: netip.MustParsePrefix("172.17.0.0/16"), Index: 4, OnLink: true},
	}
	return in
}

func TestMTU(t *testing.T) {
	routes := func(keep ...int) func(*Input) {
		return func(in *Input) {
			var left []KernelRoute
			for _, i := range keep {
				left = append(left, in.Facts.Routes[i])
			}
			in.Facts.Routes = left
		}
	}
	for name, tt := range map[string]struct {
		change func(*Input)
		want   int
	}{
		"nodes and world; the bridge does not count": {func(*Input) {}, 1450},
		"the way to the nodes is narrower":           {func(in *Input) { in.Facts.Uplinks[0].MTU = 1400 }, 1400},
		"no default route":                           {routes(1, 2, 3), 1500},
		"room for a tunnel that nobody needs yet":    {func(in *Input) { in.Tunnelled = true }, 1400},
		"no other node":                              {func(in *Input) { in.Nodes, in.Facts.Uplinks[0].MTU = in.Nodes[:1], 1400 }, 1450},
		"no other node and no default route":         {func(in *Input) { in.Nodes = in.Nodes[:1]; routes(1, 2, 3)(in) }, 1280},
		"no uplink":                                  {func(in *Input) { in.Facts.Uplinks = nil }, 1500},
		"another address of a node, on the bridge": {func(in *Input) {
			in.Nodes[1].InternalIPs = append(in.Nodes[1].InternalIPs, "172.17.0.9")
		}, 1450},
		"nodes behind a gateway": {func(in *Input) {
			in.Nodes[1].InternalIPs = []string{"198.51.100.7"}
			in.Facts.Uplinks[0].MTU = 1300
		}, 1450},
		"two default routes": {func(in *Input) {
			in.Facts.Routes = append(in.Facts.Routes, KernelRoute{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 4})
		}, 1280},
		"several next hops to the world": {func(in *Input) { in.Facts.Routes[0].Index, in.Facts.Routes[0].Hops = 0, []uint32{2, 4} }, 1280},
		"a default route in a rule's table": {func(in *Input) {
			in.Facts.Others = []KernelRoute{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 4, Table: 7}}
		}, 1280},
		"the nodes stand, without a list": {func(in *Input) {
			in.Known, in.Facts.Uplinks[0].MTU = false, 1400
			in.Before.Claims = map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.244.2.0/24"): netip.MustParseAddr("172.18.0.12")}
		}, 1400},
	} {
		t.Run(name, func(t *testing.T) {
			in := network()
			tt.change(&in)
			if got := Make(in).MTU; got != tt.want {
				t.Errorf("MTU %d, want %d", got, tt.want)
			}
		})
	}
}

// What goes and comes again within the grace period must not change the MTU of pods that start meanwhile.
func TestMTUDoesNotFollowAMoment(t *testing.T) {
	then := func(before Result, change func(*Input)) Result {
		in := network()
		in.Before = before.Standing
		change(&in)
		return Make(in)
	}
	usual := Make(network())
	away := func(in *Input, index uint32) {
		var left []KernelRoute
		for _, r := range in.Facts.Routes {
			if r.Index != index {
				left = append(left, r)
			}
		}
		in.Facts.Routes = left
		for i := range in.Facts.Uplinks {
			in.Facts.Uplinks[i].Away = in.Facts.Uplinks[i].Index == index
		}
	}
	noDefault := func(in *Input) { in.Facts.Routes = in.Facts.Routes[1:] }
	for name, change := range map[string]func(*Input){
		"the default route":        noDefault,
		"the uplink to the world":  func(in *Input) { away(in, 3) },
		"a bridge that leads home": func(in *Input) { away(in, 4) },
	} {
		if got := then(usual, change).MTU; got != usual.MTU {
			t.Errorf("while %s is away: MTU %d instead of %d", name, got, usual.MTU)
		}
		if got := then(then(usual, change), change).MTU; got != usual.MTU {
			t.Errorf("while %s is still away: MTU %d instead of %d", name, got, usual.MTU)
		}
	}
	gone := then(usual, func(in *Input) { away(in, 3); in.Facts.Uplinks = append(in.Facts.Uplinks[:1], in.Facts.Uplinks[2]) })
	if gone.MTU != 1500 {
		t.Errorf("once the uplink to the world is none any more: MTU %d, want that of the way to the nodes", gone.MTU)
	}
	moved := then(usual, func(in *Input) { in.Facts.Routes[0].Index = 2 })
	if moved.MTU != 1500 {
		t.Errorf("the default route over the nodes' link: MTU %d", moved.MTU)
	}
	if started := then(Result{}, func(in *Input) { away(in, 3) }); started.MTU != 1450 {
		t.Errorf("an agent that starts while the uplink is away: MTU %d, want what fits it", started.MTU)
	}
	if v := usual.Uplinks; len(v) != 3 {
		t.Errorf("uplinks %v: the bridge is still one", v)
	}
}
