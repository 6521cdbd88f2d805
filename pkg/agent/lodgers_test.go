package agent

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// A container has left its address when its port is gone, or when another port has it; not while it is silent.
func TestLodgersLeave(t *testing.T) {
	const bridge = 3
	address, other := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("10.244.1.3")
	mac, otherMAC := net.HardwareAddr{2, 0x42, 10, 244, 1, 2}, net.HardwareAddr{2, 0x42, 10, 244, 1, 3}
	neighbours := []device.Neighbour{{Index: bridge, Addr: address, MAC: mac}, {Index: bridge, Addr: other, MAC: otherMAC}}
	learnt := func(port int) []device.BridgeEntry {
		return []device.BridgeEntry{{Bridge: bridge, Port: port, MAC: mac}}
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
		known      []device.BridgeEntry
		links      map[int]device.Link
		left       []netip.Addr
	}
	leaves := []netip.Addr{address}
	for name, looks := range map[string][]look{
		"the port goes": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"silent", neighbours, nil, links(7), nil},
			{"no neighbour either", nil, nil, links(7), nil},
			{"gone", neighbours, nil, links(), leaves},
			{"still gone", neighbours, nil, links(), nil},
			{"the next one", neighbours, learnt(8), links(8), nil},
			{"and gone", nil, nil, links(), leaves},
		},
		"another port has it": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"the next one", neighbours, learnt(8), links(8), leaves},
			{"moved", neighbours, learnt(9), links(8, 9), leaves},
		},
		"seen between two looks at links": {
			{"first", neighbours, learnt(7), nil, nil},
			{"gone, perhaps", nil, nil, nil, nil},
			{"gone", nil, nil, links(), leaves},
		},
		"the bridge goes": {
			{"first", neighbours, learnt(7), links(7), nil},
			{"gone", nil, nil, map[int]device.Link{}, []netip.Addr{address, other}},
		},
		"silent before the agent": {
			{"first", neighbours, nil, links(7), nil},
			{"speaks", neighbours, learnt(7), links(7), nil},
			{"gone", neighbours, nil, links(), leaves},
		},
		"between two looks": {
			{"first", nil, nil, links(), nil},
			{"came and went", neighbours[:1], nil, links(), leaves},
			{"known to be gone", neighbours[:1], nil, links(), nil},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var l lodgers
			for _, look := range looks {
				var left []netip.Addr
				for _, d := range l.look(look.neighbours, look.known, look.links) {
					if left = append(left, d.address); d.bridge != bridge {
						t.Errorf("%s: %v was behind bridge %d", look.what, d.address, d.bridge)
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
