package agent

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// A container has left its address when its port is gone; not while it is silent, nor when another port claims the address.
func TestLodgersLeave(t *testing.T) {
	const bridge = 3
	address, other := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("10.244.1.3")
	mac, otherMAC := net.HardwareAddr{2, 0x42, 10, 244, 1, 2}, net.HardwareAddr{2, 0x42, 10, 244, 1, 3}
	neighbours := []device.Neighbour{{Index: bridge, Addr: address, MAC: mac}, {Index: bridge, Addr: other, MAC: otherMAC}}
	learnt := func(port int) map[station]int {
		return map[station]int{{bridge, string(mac)}: port, {bridge, string(otherMAC)}: nowhere}
	}
	links := func(ports ...int) map[int]device.Link {
		all := map[int]device.Link{bridge: {Index: bridge, Kind: device.KindBridge}}
		for _, p := range ports {
			all[p] = device.Link{Index: p, Master: bridge}
		}
		return all
	}
	type look struct {
		what       string
		neighbours []device.Neighbour
		where      map[station]int
		links      map[int]device.Link
		left       []netip.Addr
	}
	leaves := []netip.Addr{address}
	for name, looks := range map[string][]look{
		"the port goes": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"silent", neighbours, learnt(nowhere), links(7), nil},
			{"no neighbour either", neighbours[1:], learnt(nowhere), links(7), nil},
			{"gone", neighbours, learnt(nowhere), links(), leaves},
			{"still gone", neighbours, learnt(nowhere), links(), nil},
			{"the next one", neighbours, learnt(8), links(8), nil},
			{"and gone", nil, nil, links(), leaves},
		},
		"another port has it": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"the next one", neighbours, learnt(8), links(8), leaves},
			{"moved", neighbours, learnt(9), links(8, 9), nil},
			{"from where it was", neighbours, learnt(9), links(9), leaves},
			{"and gone", neighbours, learnt(nowhere), links(), leaves},
		},
		"another port claims it": {
			{"first", neighbours, learnt(7), links(7, 8), nil},
			{"claimed", neighbours, learnt(8), links(7, 8), nil},
			{"and claimed back", neighbours, learnt(7), links(7, 8), nil},
			{"the other port goes", neighbours, learnt(7), links(7), nil},
			{"it goes itself", neighbours, learnt(nowhere), links(), leaves},
		},
		"seen between two looks at links": {
			{"first", neighbours, learnt(7), nil, nil},
			{"gone, perhaps", nil, nil, nil, nil},
			{"gone", nil, nil, links(), leaves},
		},
		"the bridge goes": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"gone", nil, nil, map[int]device.Link{}, leaves}, // what the other one has ends with the bridge
		},
		"silent before the agent": {
			{"first", neighbours, learnt(nowhere), links(7), nil},
			{"speaks", neighbours, learnt(7), links(7), nil},
			{"gone", neighbours, learnt(nowhere), links(), leaves},
		},
		"between two looks": {
			{"first", nil, nil, links(7), nil},
			{"came and went", neighbours[:1], learnt(nowhere), links(7), leaves},
			{"known to be gone", neighbours[:1], learnt(nowhere), links(7), nil},
			{"not asked for", neighbours[:1], nil, links(7), nil},
			{"still known", neighbours[:1], learnt(nowhere), links(7), nil},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var l lodgers
			for _, look := range looks {
				var left []netip.Addr
				for who := range l.look(look.neighbours, look.where, look.links).addresses {
					if left = append(left, who.address); who.bridge != bridge {
						t.Errorf("%s: %v was behind bridge %d", look.what, who.address, who.bridge)
					}
				}
				slices.SortFunc(left, netip.Addr.Compare)
				if !slices.Equal(left, look.left) {
					t.Errorf("%s: %v have left, want %v", look.what, left, look.left)
				}
			}
		})
	}
}

// A container that takes one address after another is remembered with a few. When it goes, so does what nobody is known to have.
func TestLodgersAreBounded(t *testing.T) {
	const bridge = 3
	links := map[int]device.Link{bridge: {Index: bridge}, 7: {Index: 7, Master: bridge}, 8: {Index: 8, Master: bridge}}
	greedy, modest := net.HardwareAddr{2, 0x42, 0, 0, 0, 7}, net.HardwareAddr{2, 0x42, 0, 0, 0, 8}
	where := map[station]int{{bridge, string(greedy)}: 7, {bridge, string(modest)}: 8}
	own := device.Neighbour{Index: bridge, Addr: netip.MustParseAddr("fd00::8"), MAC: modest}
	next := netip.MustParseAddr("fd00::1:0")
	var l lodgers
	for range 10 {
		found := []device.Neighbour{own}
		for range mostAddresses {
			found = append(found, device.Neighbour{Index: bridge, Addr: next, MAC: greedy})
			next = next.Next()
		}
		if left := l.look(found, where, links); !left.empty() {
			t.Fatalf("%v have left", left)
		}
	}
	if len(l.ports) != mostAddresses+1 || len(l.unplaced) != 0 {
		t.Errorf("%d lodgers are remembered, %d elsewhere", len(l.ports), len(l.unplaced))
	}
	delete(links, 7)
	left := departures{}.and(l.look(nil, nil, links)).and(l.look(nil, nil, links))
	if len(left.addresses) != mostAddresses || len(l.ports) != 1 || len(l.crowded) != 0 {
		t.Errorf("%d have left, %d are remembered", len(left.addresses), len(l.ports))
	}
	for address, want := range map[string]bool{"fd00::1:0": true, "fd00::1:200": true, "fd00::9": true, "fd00::8": false} {
		if left.include(bridge, wire.AddrFrom(netip.MustParseAddr(address))) != want {
			t.Errorf("%s has left: %t, want %t", address, !want, want)
		}
	}
	if left.include(bridge+1, wire.AddrFrom(netip.MustParseAddr("fd00::1:0"))) {
		t.Error("another bridge's has left")
	}
}
