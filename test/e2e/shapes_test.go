package e2e

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/lab/shapes"
)

// What the table of shapes has our programs drop.
var shapesDropped = []drops.Reason{drops.UnknownProtocol, drops.FragNotFound, drops.TooBig}

// Packets of every shape, along every path, have the outcome that the table says.
func TestShapes(t *testing.T) {
	t.Parallel()
	forEachCluster(t, always, func(t *testing.T, opts lab.Options) {
		opts.Nodes, opts.OutsideMTU = 2, narrowOutside
		shapes.Test(t, shaped(t, startCluster(t, opts, shapesDropped...)))
	})
}

// The same beside kube-proxy's rules.
func TestShapesBesideNetfilter(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		opts := lab.Options{Nodes: 2, OutsideMTU: narrowOutside, Families: families, AgentFlags: []string{attach, "--kube-proxy=on"}}
		l := startCluster(t, opts, shapesDropped...)
		n := shaped(t, l)
		n.Style = shapes.Beside
		for _, family := range l.Options.Families {
			endpoint := netip.AddrPortFrom(n.Parties[shapes.NearPod].AddrOf(family), 8080)
			proxy(t, l, "iptables-nft", []kubeService{{name: "any", cluster: netip.AddrPortFrom(serviceAddr[family], servicePort), endpoint: endpoint}})
		}
		shapes.Test(t, n)
	})
}

// narrowOutside is the MTU of the outside host's link, which is less than any other.
const narrowOutside = 1400

// shaped is a cluster behind a router, with its parties. Its pods' interfaces take what fits the uplink, whatever the way.
func shaped(t *testing.T, l *lab.Lab) shapes.Network {
	t.Helper()
	node, other := l.Nodes[0], l.Nodes[1]
	pods := map[string]*lab.Pod{shapes.Pod: addPod(t, node, "a"), shapes.NearPod: addPod(t, node, "near"), shapes.FarPod: addPod(t, other, "far")}
	parties := map[string]*lab.Namespace{shapes.Node: node.Namespace, shapes.OtherNode: other.Namespace, shapes.Outside: l.Outside}
	for name, pod := range pods {
		parties[name] = pod.Namespace
		widen(t, pod, l.Options.FabricMTU)
	}
	n := shapes.NewNetwork(parties, l.Options.Families)
	n.Drops = func() (map[drops.Reason]uint64, error) { return allDrops(l) }
	n.Broadcast = inNetwork(lab.FabricPrefix[wire.IPv4], 255)
	n.ByTunnel = func(kind shapes.Kind, family wire.Family) bool { return takesTunnel(l, kind, family) }
	n.Width = func(kind shapes.Kind, family wire.Family) shapes.Width {
		switch {
		case kind == shapes.ToWorld:
			return shapes.Width{MTU: narrowOutside, Says: shapes.Router}
		case kind == shapes.FromWorld:
			return shapes.Width{MTU: narrowOutside}
		case takesTunnel(l, kind, family):
			return shapes.Width{MTU: fitsTunnel(l), Says: shapes.Node}
		}
		return shapes.Width{MTU: l.Options.FabricMTU}
	}
	n.Hops[shapes.ToWorld] = []string{shapes.Node, shapes.Router}
	n.Hops[shapes.Answer] = n.Hops[shapes.ToWorld]
	n.Hops[shapes.FromWorld] = []string{shapes.Router, shapes.Node}
	n.Hops[shapes.Reply] = n.Hops[shapes.FromWorld]
	for _, family := range families {
		n.Names[lab.GatewayAddr[family]], n.Names[lab.RouterOutside[family]] = shapes.Router, shapes.Router
	}
	for _, family := range l.Options.Families {
		if err := l.RouteToPods(node, family); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// widen has both ends of a pod's link take larger packets, as a pod's root and a plugin may.
func widen(t *testing.T, pod *lab.Pod, mtu int) {
	t.Helper()
	if err := pod.Node.SetMTU(pod.Result.Interfaces[0].Name, mtu); err != nil {
		t.Fatal(err)
	}
	if err := pod.SetMTU(pod.IfName, mtu); err != nil {
		t.Fatal(err)
	}
}

// takesTunnel says whether a pod's packets take the tunnel on a path: to a node itself only in the family of its far end.
func takesTunnel(l *lab.Lab, kind shapes.Kind, family wire.Family) bool {
	tunnelled := l.Options.Links == 2 || slices.Contains(l.Options.AgentFlags, "--routing-mode=vxlan")
	return tunnelled && (kind == shapes.Across || kind == shapes.ToOtherNode && family == l.Options.Underlay[0])
}

// fitsTunnel is what VXLAN and its outer headers leave of the fabric's MTU.
func fitsTunnel(l *lab.Lab) int {
	return l.Options.FabricMTU - [wire.Families]int{wire.IPv4: 50, wire.IPv6: 70}[l.Options.Underlay[0]]
}

// allDrops are what all nodes have dropped.
func allDrops(l *lab.Lab) (map[drops.Reason]uint64, error) {
	all := map[drops.Reason]uint64{}
	for _, node := range l.Nodes {
		counters, err := node.Drops()
		if err != nil {
			return nil, err
		}
		for _, c := range counters {
			all[c.Slot] += c.Packets
		}
	}
	return all, nil
}
