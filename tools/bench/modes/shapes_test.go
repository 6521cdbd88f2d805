package modes

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/lab/shapes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// The classical networks make of packets of every shape what the table says: what it says of ours differs only where that was decided.
func TestShapesOfClassicalNetworks(t *testing.T) {
	for _, mode := range []string{result.IPTables, result.PTP, result.IPTablesVXLAN, result.IPTablesIPv6} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			n := built(t, mode)
			if err := n.lab.RouteToPods(n.lab.Nodes[0], n.setup.family); err != nil {
				t.Fatal(err)
			}
			shapes.Test(t, shaped(t, n))
		})
	}
}

// shaped is a classical network with its parties.
func shaped(t *testing.T, n *Network) shapes.Network {
	t.Helper()
	node, other := n.lab.Nodes[0].Namespace, n.lab.Nodes[1].Namespace
	s := shapes.NewNetwork(map[string]*lab.Namespace{
		shapes.Pod: n.hosts[client], shapes.NearPod: n.hosts[server], shapes.FarPod: n.hosts[remote],
		shapes.Node: node, shapes.OtherNode: other, shapes.Outside: n.lab.Outside,
	}, []wire.Family{n.setup.family})
	s.Style, s.Broadcast = shapes.Classical, netip.MustParseAddr("172.18.255.255")
	s.Masqueraded = append(s.Masqueraded, shapes.ToOtherNode)
	s.Width = func(kind shapes.Kind, _ wire.Family) shapes.Width {
		if kind == shapes.FromWorld && n.setup.tunnel != "" {
			return shapes.Width{MTU: n.podMTU(), Says: shapes.Node}
		}
		return shapes.Width{MTU: n.podMTU()}
	}
	if n.setup.bridged() {
		s.Hops[shapes.SameNode] = nil
		s.Bridged = true
	}
	for name, ns := range map[string]*lab.Namespace{shapes.Node: node, shapes.OtherNode: other, shapes.Outside: n.lab.Outside} {
		addresses, err := ns.Netlink().AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addresses {
			addr, _ := netip.AddrFromSlice(a.IP)
			s.Names[addr.Unmap()] = name
		}
	}
	return s
}
