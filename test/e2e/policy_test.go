package e2e

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// esp is what a policy demands: a tunnel between the two.
func esp(from, to netip.Addr) []netlink.XfrmPolicyTmpl {
	return []netlink.XfrmPolicyTmpl{{
		Src: from.AsSlice(), Dst: to.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 1,
	}}
}

// demand has a host protect what goes from one prefix to another, between two hosts, and waits until its agent has seen it.
func demand(t *testing.T, node *lab.Node, dir netlink.Dir, src, dst string, from, to netip.Addr) {
	t.Helper()
	policy := &netlink.XfrmPolicy{Src: prefix(src), Dst: prefix(dst), Dir: dir, Tmpls: esp(from, to)}
	if err := node.Do(func() error { return netlink.XfrmPolicyAdd(policy) }); err != nil {
		t.Fatal(err)
	}
}

// stackDecides waits until the agent has given an entry to the stack, or taken it back.
func stackDecides(t *testing.T, node *lab.Node, entry string, want bool) {
	t.Helper()
	eventually(t, answerLimit, "the stack decides on "+entry, func() bool {
		for _, row := range dump(t, node, "destinations") {
			if row["prefix"] == entry && row["flags"] != "" {
				return want
			}
		}
		return !want
	})
	time.Sleep(50 * time.Millisecond) // what the programs have kept
}

func forgetPolicies(t *testing.T, node *lab.Node) {
	t.Helper()
	if err := node.Do(netlink.XfrmPolicyFlush); err != nil {
		t.Fatal(err)
	}
}

// secured is two nodes with a pod each, and the outside host, that knows the way to the pods; and where each of them answers, in one family.
type secured struct {
	*lab.Lab
	node    *lab.Node
	pod     *lab.Pod
	far     *lab.Pod
	family  wire.Family
	outside netip.AddrPort
	own     netip.AddrPort
	remote  netip.AddrPort
}

func startSecured(t *testing.T, opts lab.Options, expected ...drops.Reason) *secured {
	t.Helper()
	opts.Nodes = 2
	s := &secured{Lab: startCluster(t, opts, expected...)}
	s.node = s.Nodes[0]
	s.pod, s.far = addPod(t, s.node, "a"), addPod(t, s.Nodes[1], "far")
	return s
}

// in has them talk in one family.
func (s *secured) in(t *testing.T, family wire.Family) *secured {
	t.Helper()
	if err := s.Outside.AddRoute(s.node.PodCIDROf(family), s.node.AddrOf(family), ""); err != nil {
		t.Fatal(err)
	}
	in := *s
	in.family = family
	in.outside = netip.AddrPortFrom(lab.GatewayAddr[family], serveOver(t, s.Outside, family).Port())
	in.own, in.remote = serveOver(t, s.pod.Namespace, family), serveOver(t, s.far.Namespace, family)
	return &in
}

// assertOpen: everything is reached, as without any policy.
func (s *secured) assertOpen(t *testing.T) {
	t.Helper()
	for _, c := range []struct {
		from *lab.Namespace
		to   netip.AddrPort
		seen netip.Addr
	}{
		{s.pod.Namespace, s.outside, s.node.AddrOf(s.family)}, {s.Outside, s.own, s.outside.Addr()},
		{s.pod.Namespace, s.remote, s.own.Addr()}, {s.far.Namespace, s.own, s.remote.Addr()},
	} {
		seen, err := c.from.TCP(t.Context(), c.to)
		assertSeen(t, "TCP to "+c.to.String(), seen, err, c.seen)
	}
}

// assertSilence has two parties fail to talk while nothing of it arrives: no packet of the sender's, nor of its node's.
func (s *secured) assertSilence(t *testing.T, what string, from *lab.Namespace, to netip.AddrPort, on *lab.Namespace, link string) {
	t.Helper()
	capture, err := on.Capture(link)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := from.TCP(ctx, to); err == nil {
		t.Errorf("%s: TCP passes", what)
	}
	if _, err := from.UDP(ctx, to, 100); err == nil {
		t.Errorf("%s: UDP passes", what)
	}
	for _, packet := range capture.Close() {
		ip := packet.NetworkLayer()
		if ip == nil || ip.NetworkFlow().Dst().String() != to.Addr().String() {
			continue
		}
		// The outside host may still be ending the connections of before.
		if from == s.Outside || ip.NetworkFlow().Src().String() != s.outside.Addr().String() {
			t.Errorf("%s: in clear:\n%s", what, packet)
		}
	}
}

// A policy of the host's without a state to fulfil it lets nothing pass, in neither direction; without it all flows again.
func TestPolicyOfTheHost(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		s := startSecured(t, lab.Options{Families: families, AgentFlags: []string{flag}}, drops.IPsecPolicy)
		overEachFamily(t, s.Lab, func(t *testing.T, family wire.Family) { s.in(t, family).assertPolicies(t) })
	})
}

func (s *secured) assertPolicies(t *testing.T) {
	t.Helper()
	node, far := s.node.AddrOf(s.family), s.Nodes[1].AddrOf(s.family)
	pods, farPods := s.node.PodCIDROf(s.family).String(), s.Nodes[1].PodCIDROf(s.family).String()
	world, all := only(s.outside.Addr()).String(), everywhere[s.family].String()
	s.assertOpen(t)
	t.Run("outside", func(t *testing.T) {
		old, err := s.pod.DialTCP(t.Context(), s.outside, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer old.Close()
		demand(t, s.node, netlink.XFRM_DIR_OUT, all, world, node, s.outside.Addr())
		demand(t, s.node, netlink.XFRM_DIR_FWD, world, all, s.outside.Addr(), node)
		stackDecides(t, s.node, world, true)
		echoed := make(chan error, 1)
		go func() { echoed <- old.Echo(within(t, 20*time.Second), 100) }() // repeated by TCP until it gets through
		s.assertSilence(t, "pod to the outside", s.pod.Namespace, s.outside, s.Outside, lab.Uplink)
		select {
		case err := <-echoed:
			t.Fatalf("the connection of before goes on, error %v", err)
		default:
		}
		s.assertSilence(t, "outside to the pod", s.Outside, s.own, s.pod.Namespace, s.pod.IfName)
		s.assertFlows(t, world)
		if err := <-echoed; err != nil {
			t.Errorf("the connection of before: %v", err)
		}
	})
	t.Run("another node's pods", func(t *testing.T) {
		demand(t, s.node, netlink.XFRM_DIR_OUT, pods, farPods, node, far)
		demand(t, s.node, netlink.XFRM_DIR_FWD, farPods, pods, far, node)
		stackDecides(t, s.node, farPods, true)
		s.assertSilence(t, "pod to another node's", s.pod.Namespace, s.remote, s.Nodes[1].Namespace, lab.Uplink)
		s.assertSilence(t, "another node's to the pod", s.far.Namespace, s.own, s.pod.Namespace, s.pod.IfName)
		s.assertFlows(t, farPods)
	})
	t.Run("for the node's own address", func(t *testing.T) {
		before := dropped(t, s.node, drops.IPsecPolicy)
		demand(t, s.node, netlink.XFRM_DIR_OUT, only(node).String(), world, node, s.outside.Addr())
		stackDecides(t, s.node, world, true)
		s.assertSilence(t, "masqueraded", s.pod.Namespace, s.outside, s.Outside, lab.Uplink)
		if dropped(t, s.node, drops.IPsecPolicy) == before {
			t.Error("nothing is counted")
		}
		s.assertFlows(t, world)
	})
	t.Run("the default", func(t *testing.T) {
		setDefault(t, s.node, "block")
		stackDecides(t, s.node, all, true)
		s.assertSilence(t, "pod to the outside", s.pod.Namespace, s.outside, s.Outside, lab.Uplink)
		s.assertSilence(t, "outside to the pod", s.Outside, s.own, s.pod.Namespace, s.pod.IfName)
		s.assertSilence(t, "pod to another node's", s.pod.Namespace, s.remote, s.Nodes[1].Namespace, lab.Uplink)
		s.assertSilence(t, "another node's to the pod", s.far.Namespace, s.own, s.pod.Namespace, s.pod.IfName)
		setDefault(t, s.node, "accept")
		s.assertFlows(t, all)
	})
}

// assertFlows takes every policy away, after which nothing is the stack's any more.
func (s *secured) assertFlows(t *testing.T, entry string) {
	t.Helper()
	forgetPolicies(t, s.node)
	stackDecides(t, s.node, entry, false)
	s.assertOpen(t)
}

// setDefault says what becomes of packets that a host has no policy for.
func setDefault(t *testing.T, node *lab.Node, action string) {
	t.Helper()
	if out, err := node.Exec(t.Context(), "ip", "xfrm", "policy", "setdefault", "out", action, "fwd", action); err != nil {
		t.Fatalf("set the default policy: %v\n%s", err, out)
	}
}

// keys are the states of an ESP tunnel, one a direction, for both ends alike.
func keys(a, b netip.Addr) (states []*netlink.XfrmState) {
	for spi, way := range [][2]netip.Addr{{a, b}, {b, a}} {
		states = append(states, &netlink.XfrmState{
			Src: way[0].AsSlice(), Dst: way[1].AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Spi: 0x100 + spi, Reqid: 1,
			Aead: &netlink.XfrmStateAlgo{Name: "rfc4106(gcm(aes))", Key: []byte("twenty bytes of key!"), ICVLen: 128},
		})
	}
	return states
}

// secure puts keys and policies for the pods of two nodes onto both. It skips where the kernel has no ESP.
func (s *secured) secure(t *testing.T) {
	t.Helper()
	a, b := s.Nodes[0], s.Nodes[1]
	for _, node := range s.Nodes {
		for _, state := range keys(a.AddrOf(s.family), b.AddrOf(s.family)) {
			if err := node.Do(func() error { return netlink.XfrmStateAdd(state) }); err != nil {
				t.Skipf("this kernel has no ESP: %v", err)
			}
		}
	}
	for _, ends := range [][2]*lab.Node{{a, b}, {b, a}} {
		here, there := ends[0].AddrOf(s.family), ends[1].AddrOf(s.family)
		own, others := ends[0].PodCIDROf(s.family).String(), ends[1].PodCIDROf(s.family).String()
		demand(t, ends[0], netlink.XFRM_DIR_OUT, own, others, here, there)
		for _, dir := range []netlink.Dir{netlink.XFRM_DIR_IN, netlink.XFRM_DIR_FWD} {
			demand(t, ends[0], dir, others, own, there, here)
		}
		stackDecides(t, ends[0], others, true)
	}
}

// With keys the pods of two nodes talk as ever, and not a packet of theirs is on the wire in clear.
func TestPodsTalkThroughIPsec(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, flag string) {
		all := startSecured(t, lab.Options{Families: families, AgentFlags: []string{flag}})
		overEachFamily(t, all.Lab, func(t *testing.T, family wire.Family) {
			s := all.in(t, family)
			s.secure(t)
			s.assertProtected(t)
		})
	})
}

func (s *secured) assertProtected(t *testing.T) {
	t.Helper()
	capture, err := s.node.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	for from, to := range map[*lab.Pod]netip.AddrPort{s.pod: s.remote, s.far: s.own} {
		seen, err := from.TCP(t.Context(), to)
		assertSeen(t, "TCP through the tunnel", seen, err, from.AddrOf(s.family))
		seen, err = from.UDP(t.Context(), to, 64)
		assertSeen(t, "UDP through the tunnel", seen, err, from.AddrOf(s.family))
	}
	// Others are not touched.
	seen, err := s.pod.TCP(t.Context(), s.outside)
	assertSeen(t, "TCP to the outside", seen, err, s.node.AddrOf(s.family))
	protected := 0
	for _, packet := range capture.Close() {
		ip, ok := ipHeaderOf(packet.NetworkLayer())
		if !ok {
			continue
		}
		if ip.source == s.node.AddrOf(s.family) && ip.destination == s.Nodes[1].AddrOf(s.family) {
			protected++
		}
		// What came through the tunnel is shown once more, behind its end; what leaves is shown as it leaves.
		if ip.source == s.own.Addr() && ip.destination == s.remote.Addr() {
			t.Errorf("in clear:\n%s", packet)
		}
	}
	if protected == 0 {
		t.Error("nothing went through the tunnel")
	}
}
