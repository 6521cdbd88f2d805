package e2e

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const (
	tunnelDevice = "ec-vxlan"
	tunnelPort   = 4789
	tunnelVNI    = 4096
	tunnelMTU    = 1450 // over IPv4, where uplinks carry 1500
)

// outer are the tunnel's packets of a capture, with what is inside.
type outer struct {
	ip    ipHeader
	udp   *layers.UDP
	vxlan *layers.VXLAN
	inner ipHeader
}

// outers reads the tunnel's packets. What is not in them must not have a pod's address.
func outers(t *testing.T, l *lab.Lab, packets []gopacket.Packet) (all []outer) {
	t.Helper()
	for _, packet := range packets {
		var o outer
		for _, layer := range packet.Layers() {
			if ip, ok := ipHeaderOf(layer); ok && o.vxlan == nil {
				o.ip = ip
			} else if ok && !o.inner.source.IsValid() {
				o.inner = ip
			}
			switch l := layer.(type) {
			case *layers.UDP:
				if o.udp == nil {
					o.udp = l
				}
			case *layers.VXLAN:
				o.vxlan = l
			}
		}
		if isPodAddress(l, o.ip.source) {
			t.Errorf("a pod's packet is not encapsulated:\n%s", packet)
		}
		if o.vxlan != nil && o.inner.source.IsValid() {
			all = append(all, o)
		}
	}
	return all
}

// TestWhatIsOnTheWire looks at the outer packets between two nodes, with and without a checksum, in each family outside and inside.
func TestWhatIsOnTheWire(t *testing.T) {
	t.Parallel()
	for i, outside := range families {
		hosts := append([]wire.Family{outside}, slices.Delete(slices.Clone(families), i, i+1)...)
		for _, checksum := range []bool{true, false} {
			flag := "--vxlan-udp-checksum=" + strconv.FormatBool(checksum)
			t.Run("over "+outside.String()+", "+flag, func(t *testing.T) {
				l := startCluster(t, lab.Options{Nodes: 2, Families: families, Underlay: hosts, AgentFlags: []string{"--routing-mode=vxlan", flag}})
				pod, other := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")
				overEachFamily(t, l, func(t *testing.T, family wire.Family) { assertOnTheWire(t, l, pod, other, outside, family, checksum) })
			})
		}
	}
}

// assertOnTheWire sends packets of one family between two nodes, and looks at the outer ones, of another or the same. Those
// to a node's address of the other family go by routes: the tunnel leads to its own far end only. Over IPv6 there always is a checksum.
func assertOnTheWire(t *testing.T, l *lab.Lab, pod, other *lab.Pod, outside, inside wire.Family, checksum bool) {
	t.Helper()
	near, far := l.Nodes[0], l.Nodes[1]
	at, host := serveOver(t, other.Namespace, inside), serveOver(t, far.Namespace, inside)
	capture, err := far.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	const flows = 64
	for range flows {
		if _, err := pod.UDP(t.Context(), at, 100); err != nil {
			t.Error(err)
		}
	}
	pairs := [][2]*lab.Namespace{{pod.Namespace, other.Namespace}}
	if inside == outside {
		if _, err := pod.UDP(t.Context(), host, 100); err != nil {
			t.Error(err)
		}
		if _, err := near.UDP(t.Context(), at, 100); err != nil {
			t.Error(err)
		}
		pairs = append(pairs, [2]*lab.Namespace{pod.Namespace, far.Namespace}, [2]*lab.Namespace{near.Namespace, other.Namespace})
	}
	ports, kinds := map[layers.UDPPort]bool{}, map[[2]netip.Addr]bool{}
	for _, o := range outers(t, l, capture.Close()) {
		from, to := near, far
		if o.ip.source == far.AddrOf(outside) {
			from, to = far, near
		} else {
			ports[o.udp.SrcPort] = true
		}
		kinds[[2]netip.Addr{o.inner.source, o.inner.destination}] = true
		if o.ip.source != from.AddrOf(outside) || o.ip.destination != to.AddrOf(outside) || o.udp.DstPort != tunnelPort ||
			o.vxlan.VNI != tunnelVNI || o.ip.hops != 64 || o.ip.dontFragment != (outside == wire.IPv6) {
			t.Errorf("outer packet %+v, %+v, VNI %d", o.ip, o.udp, o.vxlan.VNI)
		}
		if (o.udp.Checksum != 0) != (checksum || outside == wire.IPv6) {
			t.Errorf("the outer UDP checksum is %#x", o.udp.Checksum)
		}
	}
	if len(ports) < flows/2 {
		t.Errorf("%d flows have %d source ports", flows, len(ports))
	}
	for _, pair := range pairs {
		a, b := pair[0].AddrOf(inside), pair[1].AddrOf(inside)
		if !kinds[[2]netip.Addr{a, b}] || !kinds[[2]netip.Addr{b, a}] {
			t.Errorf("nothing from %s to %s, or back, went through the tunnel", a, b)
		}
	}
}

// TestTooBigForTheTunnel: a pod whose MTU is that of the link learns of the tunnel's from its own node, and TCP goes on.
func TestTooBigForTheTunnel(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{"--routing-mode=vxlan", "--mtu=1500"}}, drops.TooBig)
	answerEveryProbe(t, l)
	pod, neighbour, other := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "neighbour"), addPod(t, l.Nodes[1], "b")
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		at, near := serveOver(t, other.Namespace, family), l.Nodes[0].AddrOf(family)
		assertTraced(t, pod, at, traced{[]netip.Addr{near, l.Nodes[1].AddrOf(family), at.Addr()}, tunnelMTU, near})
		assertTooBig(t, pod, other, family)
		assertSegmentsTold(t, pod, at)
		assertTold(t, pod, neighbour, at)
	})
}

func assertTooBig(t *testing.T, pod, other *lab.Pod, family wire.Family) {
	t.Helper()
	near, at := pod.Node, serveOver(t, other.Namespace, family)
	fits := tunnelMTU - 8 - [wire.Families]int{wire.IPv4: 20, wire.IPv6: 40}[family] // into one packet, behind UDP's header or that of a ping
	_, err := pod.Ping(t.Context(), at.Addr(), lab.PingOptions{Size: fits + 1, DontFragment: true})
	assertComplaint(t, "a ping too big", err, lab.ICMPError{
		From: near.AddrOf(family), ICMPKind: lab.TooBig[family], MTU: tunnelMTU, InnerSource: pod.AddrOf(family), InnerDestination: at.Addr(),
	})
	if _, err := pod.Ping(t.Context(), at.Addr(), lab.PingOptions{Size: fits, DontFragment: true}); err != nil {
		t.Errorf("what just fits: %v", err)
	}
	if _, err := pod.Transfer(within(t, 20*time.Second), at, 10<<20); err != nil {
		t.Error(err)
	}
	for _, from := range []*lab.Namespace{pod.Namespace, near.Namespace} {
		assertUDP(t, from, at, fits+1, 9000)
	}
	if _, err := near.Transfer(within(t, 20*time.Second), at, 10<<20); err != nil {
		t.Errorf("from the host: %v", err)
	}
}

// liveFlows is how many connections live through changes of the routing mode.
func liveFlows() int {
	if priv.Long() {
		return 1000
	}
	return 100
}

// mixedLimit is how long a node may take to follow another routing mode: a start of its agent.
const mixedLimit = readyLimit

// startInMode starts all agents in a routing mode.
func startInMode(t *testing.T, l *lab.Lab, mode string) {
	t.Helper()
	if err := l.StartAgents(within(t, readyLimit), "--routing-mode="+mode); err != nil {
		t.Fatal(err)
	}
}

// setMode restarts a node's agent in another routing mode.
func setMode(t *testing.T, node *lab.Node, mode string, flags ...string) {
	t.Helper()
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent(append(flags, "--routing-mode="+mode)...); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, mixedLimit)); err != nil {
		t.Fatal(err)
	}
}

// Nodes in different modes talk to each other, by both ways at once, also where the uplinks' reverse path filter is strict.
func TestNodesInDifferentModes(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2}, drops.TooBig) // pods keep the MTU of the mode in which they came
	for _, node := range l.Nodes {
		if err := node.WriteSysctl("net/ipv4/conf/"+lab.Uplink+"/rp_filter", "1"); err != nil {
			t.Fatal(err)
		}
	}
	startInMode(t, l, "auto")
	var all []*lab.Namespace
	for _, node := range l.Nodes {
		all = append(all, node.Namespace, addPod(t, node, "a").Namespace)
	}
	for _, modes := range [][2]string{{"vxlan", "direct"}, {"direct", "vxlan"}, {"vxlan", "vxlan"}, {"auto", "direct"}} {
		for i, mode := range modes {
			setMode(t, l.Nodes[i], mode)
		}
		for _, family := range l.Options.Families {
			assertAllReach(t, all, family)
		}
		for i, mode := range modes {
			want := "1"
			if mode == "vxlan" && slices.Contains(l.Options.Families, wire.IPv4) { // IPv6 has no such filter
				want = "2"
			}
			if have, err := l.Nodes[i].ReadSysctl("net/ipv4/conf/" + lab.Uplink + "/rp_filter"); have != want || err != nil {
				t.Errorf("%v: the uplink of %s has rp_filter %q (%v), want %s", modes, l.Nodes[i].Name, have, err, want)
			}
		}
	}
}

// assertAllReach has each reach all others. The pods' MTU is that of the mode in which they came: the first datagram may be lost to
// path MTU discovery.
func assertAllReach(t *testing.T, all []*lab.Namespace, family wire.Family) {
	t.Helper()
	for _, to := range all {
		at := serveOver(t, to, family)
		for _, from := range all {
			if from != to {
				_, _ = from.UDP(within(t, 300*time.Millisecond), at, 1472)
				assertReaches(t, from, at, from.AddrOf(family))
			}
		}
	}
}

// Every flow lives on while nodes change their mode, one after the other and back, and no datagram of a steady flow is lost.
func TestFlowsOutliveAChangeOfMode(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2}, drops.TooBig) // pods keep the MTU of the mode in which they came
	startInMode(t, l, "direct")
	near, far := l.Nodes[0], l.Nodes[1]
	pod, other := addPod(t, near, "a"), addPod(t, far, "b")
	at, host := serve(t, other.Namespace), serve(t, far.Namespace)
	tcp := []*connections{
		connect(t, pod.Namespace, at, liveFlows()/10, liveFlows()), connect(t, pod.Namespace, host, 2, liveFlows()/10),
		connect(t, near.Namespace, at, 2, liveFlows()/10),
	}
	udp := []*steadyFlows{startSteadyFlows(t, pod.Namespace, at, at, host), startSteadyFlows(t, near.Namespace, at)}
	for _, mode := range []string{"vxlan", "direct"} {
		for _, node := range l.Nodes {
			setMode(t, node, mode)
			for _, c := range tcp {
				c.assertAlive(t, node.Name+" is in mode "+mode)
			}
		}
	}
	if err := near.KillAgent(); err != nil {
		t.Fatal(err)
	}
	startAgain(t, near)
	setMode(t, far, "vxlan")
	for _, c := range tcp {
		c.assertAlive(t, "after the death of an agent")
	}
	for _, f := range udp {
		f.end(t)
	}
}
