package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// TestUplinksOfLivePods: pods that came with the uplinks' MTU live on while their nodes send directly and through the tunnel, past
// netfilter and beside it, and the uplinks' MTU changes; and a pod whose own is less than its peers'.
func TestUplinksOfLivePods(t *testing.T) {
	for _, c := range []struct {
		underlay []wire.Family
		forms    [][]string
	}{
		{families, [][]string{{byTunnel}, {direct, besideNetfilter}}},
		{ipv6First, [][]string{{direct}, {byTunnel}, {byTunnel, besideNetfilter}}},
	} {
		t.Run("over "+c.underlay[0].String(), func(t *testing.T) {
			l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families, Underlay: c.underlay, AgentFlags: []string{"--mtu=1500"}}, drops.TooBig)
			startEach(t, l, c.forms[0], c.forms[0])
			live := newLivePods(t, l)
			for i, flags := range c.forms {
				if i > 0 {
					live.during(t, fmt.Sprintf("to %v", flags), func() { restartEach(t, l, flags...) })
				}
				for _, mtu := range []int{widest, 1400} {
					what := fmt.Sprintf("%v with MTU %d", flags, mtu)
					live.during(t, what, func() {
						setUplinks(t, l, mtu)
						live.assertKnown(t, live.between(flags, mtu))
					})
					live.assertUDP(t, what)
					live.assertLearns(t, what, flags, mtu)
				}
			}
		})
	}
}

// Flags of agents.
const (
	direct          = "--routing-mode=direct"
	byTunnel        = "--routing-mode=vxlan"
	besideNetfilter = "--kube-proxy=on"
)

// livePods are pods on two nodes, a small one among them, with connections between them and with all others.
type livePods struct {
	streams
	*lab.Lab
	a, small, far *lab.Pod
}

func newLivePods(t *testing.T, l *lab.Lab) *livePods {
	t.Helper()
	p := &livePods{Lab: l, a: addPod(t, l.Nodes[0], "a"), small: addPod(t, l.Nodes[0], "small"), far: addPod(t, l.Nodes[1], "far")}
	for _, end := range []error{
		p.small.SetMTU(p.small.IfName, narrowed), p.small.Node.SetMTU(p.small.Result.Interfaces[0].Name, narrowed),
	} {
		if end != nil {
			t.Fatal(end)
		}
	}
	near, other := l.Nodes[0].Namespace, l.Nodes[1].Namespace
	for _, to := range []struct {
		*lab.Namespace
		from []*lab.Namespace
	}{
		{p.far.Namespace, []*lab.Namespace{p.a.Namespace, p.small.Namespace, near}},
		{p.small.Namespace, []*lab.Namespace{p.a.Namespace, p.far.Namespace, other}},
		{other, []*lab.Namespace{p.a.Namespace}},
		{l.Outside, []*lab.Namespace{p.a.Namespace}},
	} {
		at := serve(t, to.Namespace)
		for _, from := range to.from {
			for _, family := range families {
				p.open(t, from, inFamily(to.Namespace, family, at))
			}
		}
	}
	return p
}

// assertUDP exchanges datagrams beside each connection.
func (s streams) assertUDP(t *testing.T, what string) {
	t.Helper()
	for _, way := range s {
		if assertUDP(t, way.from, way.to, 1472, 9000); t.Failed() {
			t.Fatal(what)
		}
	}
}

// between is what fits between the nodes' pods.
func (p *livePods) between(flags []string, mtu int) int {
	if slices.Contains(flags, byTunnel) {
		return mtu - tunnelOverhead[wire.FamilyOf(p.Nodes[0].Addr())]
	}
	return mtu
}

// assertKnown waits until all agents know what fits between the nodes' pods.
func (p *livePods) assertKnown(t *testing.T, inner int) {
	t.Helper()
	for _, node := range p.Nodes {
		eventually(t, changeLimit, node.Name+" knows the MTU", func() bool {
			return !slices.ContainsFunc(dump(t, node, "destinations"), func(row map[string]any) bool {
				return row["kind"] == "pod_cidr" && row["mtu"] != float64(inner)
			})
		})
	}
}

// assertLearns has a pod learn of each path's MTU, where nodes with these flags have uplinks of an MTU.
func (p *livePods) assertLearns(t *testing.T, what string, flags []string, mtu int) {
	t.Helper()
	inner := p.between(flags, mtu)
	toNode := inner
	if slices.Contains(flags, besideNetfilter) && mtu < widest {
		toNode = mtu // what does not even fit the uplink is the stack's to refuse
	}
	for _, way := range p.streams {
		if way.from != p.a.Namespace {
			continue
		}
		family, fits := wire.FamilyOf(way.to.Addr()), mtu
		by := p.a.Node.AddrOf(family)
		switch way.to.Addr() {
		case p.small.AddrOf(family):
			continue // it takes what is too big for it to send
		case p.far.AddrOf(family):
			fits = inner
		case p.Nodes[1].Addr(): // the tunnel leads to no other of its addresses
			fits = toNode
			if fits < mtu && slices.Contains(flags, besideNetfilter) {
				by = way.to.Addr() // netfilter hands on what the way carries as if that had told it
			}
		}
		assertLearns(t, p.a, way.to, by, fits)
	}
	if t.Failed() {
		t.Fatal(what)
	}
}

// TestNarrowUnderlay: a router between the nodes carries less than their uplinks. Nobody fragments what the tunnel sends over
// IPv6, so pods and hosts are told, also of what netfilter has translated.
func TestNarrowUnderlay(t *testing.T) {
	for _, underlay := range [][]wire.Family{families, ipv6First} {
		t.Run("over "+underlay[0].String(), func(t *testing.T) {
			l := lab.ForTest(t, lab.Options{Nodes: 2, Links: 2, Families: families, Underlay: underlay}, drops.TooBig)
			startEach(t, l, nil, []string{besideNetfilter})
			live := newLivePods(t, l)
			live.openServices(t)
			for _, mtu := range []int{1400, 1360, widest} {
				what := fmt.Sprintf("with MTU %d between", mtu)
				live.during(t, what, func() {
					for i, link := range []string{lab.Uplink, "eth2"} {
						narrow(t, l.Router, single(l.Nodes[i].Addr()), netip.Addr{}, link, mtu)
					}
				})
				live.assertUDP(t, what)
			}
		})
	}
}

// openServices has a pod on the second node, which is beside netfilter, talk to one on the first through a Service.
func (p *livePods) openServices(t *testing.T) {
	t.Helper()
	node, at := p.Nodes[1], serve(t, p.a.Namespace)
	for _, family := range families {
		services := []kubeService{{
			name: "a", cluster: netip.AddrPortFrom(serviceAddr[family], 80), endpoint: inFamily(p.a.Namespace, family, at),
		}}
		applyRules(t, node, kubeProxy["iptables-nft"].rules(node, services), kubeProxy["iptables-nft"].program(services[0].names())...)
		p.open(t, p.far.Namespace, services[0].cluster)
	}
}

// setUplinks gives all hosts' links to the fabric another MTU.
func setUplinks(t *testing.T, l *lab.Lab, mtu int) {
	t.Helper()
	for _, host := range []*lab.Namespace{l.Nodes[0].Namespace, l.Nodes[1].Namespace, l.Outside} {
		if err := host.SetMTU(lab.Uplink, mtu); err != nil {
			t.Fatal(err)
		}
	}
}

// tunnelOverhead is what the tunnel takes of the underlay's MTU, by the underlay's family.
var tunnelOverhead = [wire.Families]int{wire.IPv4: 50, wire.IPv6: 70}
