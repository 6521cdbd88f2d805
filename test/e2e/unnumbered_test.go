package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	events "github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Nodes whose uplinks have no IPv4 address: the InternalIP is on lo, and IPv4 routes have IPv6 next hops (RFC 5549), as BGP
// unnumbered leaves them.

// ofUnnumbered is what may be dropped while such routes replace the usual ones.
var ofUnnumbered = []drops.Reason{drops.NoSnatAddress, drops.NodeOffLink, drops.NoMapping, drops.WrongUplink, drops.TooBig}

// unnumber takes the IPv4 addresses off the uplinks of nodes, and routes everything by link-local addresses of IPv6. The outside host
// talks to nodes from the source.
func unnumber(t *testing.T, l *lab.Lab, source netip.Addr) {
	t.Helper()
	near := func(i int) string { return fmt.Sprintf("fe80::1%d", i) }
	const outside = "fe80::fe"
	run(t, l.Outside, "ip", "addr", "add", outside+"/64", "dev", lab.Uplink, "nodad")
	for i, node := range l.Nodes {
		bare := netip.PrefixFrom(node.Addr(), lab.FabricPrefix[wire.IPv4].Bits()).String()
		runOn(t, node, "ip", "addr", "add", near(i)+"/64", "dev", lab.Uplink, "nodad")
		runOn(t, node, "ip", "addr", "add", single(node.Addr()).String(), "dev", "lo")
		runOn(t, node, "ip", "addr", "del", bare, "dev", lab.Uplink)
		runOn(t, node, "ip", "route", "replace", everywhere[wire.IPv4].String(), "via", "inet6", outside, "dev", lab.Uplink)
		run(t, l.Outside, "ip", "route", "add", single(node.Addr()).String(), "src", source.String(), "via", "inet6", near(i), "dev", lab.Uplink)
		for j, other := range l.Nodes {
			if i != j {
				runOn(t, node, "ip", "route", "add", single(other.Addr()).String(), "via", "inet6", near(j), "dev", lab.Uplink)
			}
		}
	}
}

// waitUntilReached waits until two pods of different nodes reach each other.
func waitUntilReached(t *testing.T, a, b *lab.Pod) {
	t.Helper()
	at := [2]netip.AddrPort{serve(t, a.Namespace), serve(t, b.Namespace)}
	eventually(t, changeLimit, "the nodes reach each other", func() bool {
		_, there := a.UDP(within(t, time.Second), at[1], 100)
		_, back := b.UDP(within(t, time.Second), at[0], 100)
		return there == nil && back == nil
	})
}

// Pods reach the world, nodes and each other, past the stack. NodePorts and host ports answer clients outside.
func TestUnnumbered(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: []wire.Family{wire.IPv4}, AgentFlags: []string{"--services=on", "--service-cidr=" + lab.ServiceCIDR[wire.IPv4].String()}}, ofUnnumbered...)
	s := newServed(l)
	node, other := l.Nodes[0], l.Nodes[1]
	s.near, s.far = addPod(t, node, "near"), addPod(t, other, "far")
	web := addHosted(t, node, "web", ports(anyPort, both)...)
	for _, on := range []*lab.Namespace{s.near.Namespace, s.far.Namespace, l.Outside} {
		serveBackend(t, on)
	}
	var specs []lab.ServiceSpec
	for i, backend := range []backer{s.near, s.far} {
		spec := s.spec(fmt.Sprintf("s%d", i), backend)
		spec.NodePort = nodePorts + uint16(i)
		specs = append(specs, spec)
	}
	s.set(t, specs...)
	unnumber(t, l, l.Outside.Addr())
	waitUntilReached(t, s.near, s.far)

	at := serve(t, l.Outside)
	assertReaches(t, s.near.Namespace, at, node.Addr())
	stack := passed(t, node, wire.FromPod, events.Stack)
	if moved, err := s.near.Transfer(within(t, answerLimit), at, 4<<20); err != nil || moved.Seen.Addr() != node.Addr() {
		t.Errorf("a transfer to the world is seen as from %s: %v", moved.Seen, err)
	}
	if after := passed(t, node, wire.FromPod, events.Stack); after != stack {
		t.Errorf("%d bytes of a pod to the world went through the stack", after-stack)
	}
	for _, pair := range [][2]*lab.Namespace{
		{s.near.Namespace, other.Namespace}, {s.near.Namespace, s.far.Namespace}, {node.Namespace, s.far.Namespace}, {other.Namespace, s.near.Namespace},
	} {
		to := serve(t, pair[1])
		assertSeen(t, "UDP to "+to.String(), assertUDP(t, pair[0], to, 64, 1472, 9000), nil, pair[0].Addr())
		seen, err := pair[0].TCP(within(t, answerLimit), to)
		assertSeen(t, "TCP to "+to.String(), seen, err, pair[0].Addr())
	}

	assertServedTo(t, l.Outside, netip.AddrPortFrom(node.Addr(), nodePorts), s.near.Endpoint(wire.IPv4, backendPort).At, l.Outside.Addr())
	assertServedTo(t, l.Outside, netip.AddrPortFrom(node.Addr(), nodePorts+1), s.far.Endpoint(wire.IPv4, backendPort).At, node.Addr())
	assertServedTo(t, l.Outside, netip.AddrPortFrom(node.Addr(), anyPort), web.Endpoint(wire.IPv4, webPort).At, l.Outside.Addr())
	for _, node := range l.Nodes {
		if text, err := node.Ebpfctl(t.Context(), "status"); err != nil {
			t.Errorf("status of %s: %v\n%s", node.Name, err, text)
		}
	}
}

// Beside kube-proxy's rules all of that goes through the stack, and the same packets arrive.
func TestUnnumberedBesideNetfilter(t *testing.T) {
	t.Parallel()
	p := startProxied(t, lab.Options{Families: []wire.Family{wire.IPv4}}, ofUnnumbered...)
	unnumber(t, p.Lab, lab.GatewayAddr[wire.IPv4])
	p.tunnelled = true
	waitUntilReached(t, p.client, p.remote)
	proxy(t, p.Lab, "iptables-nft", p.services)
	p.waitBeside(t, true)
	p.assertVisits(t)
	assertReaches(t, p.client.Namespace, serve(t, p.Outside), p.Nodes[0].Addr())
}
