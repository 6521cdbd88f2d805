package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Paths that become narrower and wider again under pods that live on.

// TestMTUOutsideChanges: a router's MTU on nodes that carry packets in each way, for flows that pods open to the world, and the
// world to pods.
func TestMTUOutsideChanges(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 3, Router: true, Families: families, AgentFlags: []string{"--mtu=1500"}})
	startEach(t, l, []string{direct}, []string{byTunnel}, []string{direct, besideNetfilter})
	world := serve(t, l.Outside)
	var all streams
	var pods []*lab.Pod
	var inside []netip.AddrPort
	for i, node := range l.Nodes {
		pod := addPod(t, node, "a")
		pods, inside = append(pods, pod), append(inside, serve(t, pod.Namespace))
		for _, family := range families {
			if err := l.Outside.AddRoute(node.PodCIDROf(family), routerOutside[family], ""); err != nil {
				t.Fatal(err)
			}
			narrowWay(t, l, node, family, widest)
			all.open(t, pod.Namespace, inFamily(l.Outside, family, world))
			all.open(t, l.Outside, inFamily(pod.Namespace, family, inside[i]))
		}
	}
	for _, mtu := range []int{1400, narrowed, widest, 1350} { // the last when pods have learnt of less
		all.during(t, fmt.Sprintf("with MTU %d", mtu), func() {
			for _, node := range l.Nodes {
				for _, family := range families {
					narrowWay(t, l, node, family, mtu)
				}
			}
		})
		for i, pod := range pods {
			for _, family := range families {
				at := inFamily(l.Outside, family, world)
				assertLearns(t, pod, at, lab.GatewayAddr[family], mtu)
				assertUDP(t, pod.Namespace, at, 1400, 9000)
				assertUDP(t, l.Outside, inFamily(pod.Namespace, family, inside[i]), 1400, 9000)
			}
		}
	}
}

const (
	widest = 1500
	// narrowed is the MTU behind a router, in bytes of IP packet, where it is less than that of pods.
	narrowed = 1300
)

// routerOutside is the router's address beside the outside host.
var routerOutside = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("203.0.113.1"), wire.IPv6: netip.MustParseAddr("2001:db8:203:113::1")}

// startEach starts each node's agent with flags of its own.
func startEach(t *testing.T, l *lab.Lab, flags ...[]string) {
	t.Helper()
	for i, node := range l.Nodes {
		if err := node.StartAgent(flags[i]...); err != nil {
			t.Fatal(err)
		}
	}
	for _, node := range l.Nodes {
		if err := node.WaitReady(within(t, readyLimit)); err != nil {
			t.Fatal(err)
		}
	}
}

// restartEach ends all agents, and starts them with other flags.
func restartEach(t *testing.T, l *lab.Lab, flags ...string) {
	t.Helper()
	for _, node := range l.Nodes {
		if _, err := node.StopAgent(); err != nil {
			t.Fatal(err)
		}
	}
	startEach(t, l, slices.Repeat([][]string{flags}, len(l.Nodes))...)
}

// narrowWay gives the router an MTU between a node and the outside host, in both directions.
func narrowWay(t *testing.T, l *lab.Lab, node *lab.Node, family wire.Family, mtu int) {
	t.Helper()
	narrow(t, l.Router, single(l.Outside.AddrOf(family)), netip.Addr{}, "eth1", mtu)
	narrow(t, l.Router, single(node.AddrOf(family)), netip.Addr{}, lab.Uplink, mtu)
	narrow(t, l.Router, node.PodCIDROf(family), node.AddrOf(family), lab.Uplink, mtu)
}

func single(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// dontFragment is a socket whose packets nobody may fragment, whatever has been learnt of the path.
func dontFragment(t *testing.T, from *lab.Namespace, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	conn, set := dialUDP(t, from, 0, to), socketOptions[wire.FamilyOf(to.Addr())]
	set.on(t, conn, set.mtuDiscover, unix.IP_PMTUDISC_PROBE)
	if err := conn.SetDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	return conn
}

// assertLearns sends what the pod's interface can just carry, and may not be fragmented: if the path can't carry it, the very first
// packet of a ping and of a socket is answered, by whom it is too big for.
func assertLearns(t *testing.T, pod *lab.Pod, to netip.AddrPort, from netip.Addr, mtu int) {
	t.Helper()
	family, fits := wire.FamilyOf(to.Addr()), mtuOf(t, pod.Namespace, pod.IfName)
	size := fits - headers[family]
	conn := dontFragment(t, pod.Namespace, to)
	defer conn.Close()
	if _, err := conn.Write(make([]byte, size)); err != nil {
		t.Errorf("UDP of %d bytes from %s: %v", size, pod.Netns(), err)
	}
	_, err := conn.Read(make([]byte, size))
	if tooBig := mtu < fits; errors.Is(err, unix.EMSGSIZE) != tooBig || !tooBig && err != nil {
		t.Errorf("UDP of %d bytes from %s to %s where %d fit: error %v", fits, pod.Netns(), to, mtu, err)
	}
	_, err = pod.Ping(t.Context(), to.Addr(), lab.PingOptions{Size: size, DontFragment: true})
	if mtu < fits {
		assertComplaint(t, "ping from "+pod.Netns(), err, lab.ICMPError{
			From: from, ICMPKind: lab.TooBig[family], MTU: mtu, InnerSource: pod.AddrOf(family), InnerDestination: to.Addr(),
		})
	} else if err != nil {
		t.Error(err)
	}
}

// inFamily is where a server answers in a family.
func inFamily(on *lab.Namespace, family wire.Family, at netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(on.AddrOf(family), at.Port())
}

// assertUDP exchanges datagrams, some larger than the path's MTU. The first of a size, and the first echo, may be lost to path MTU
// discovery; what is learnt from them must help the next.
func assertUDP(t *testing.T, from *lab.Namespace, to netip.AddrPort, sizes ...int) (seen netip.AddrPort) {
	t.Helper()
	for _, size := range sizes {
		var lost []error
		for try := range 3 {
			limit := 100 * time.Millisecond
			if try == 2 {
				limit = answerLimit
			}
			var err error
			if seen, err = from.UDP(within(t, limit), to, size); err == nil {
				break
			}
			lost = append(lost, err)
		}
		if len(lost) > 2 {
			t.Errorf("UDP of %d bytes from %s: %v", size, from.Netns(), errors.Join(lost...))
		}
	}
	return seen
}

// narrow has a router refuse what is larger on its way to a prefix, through a gateway or straight out of a link. What it receives may be as large as before.
func narrow(t *testing.T, router *lab.Namespace, to netip.Prefix, via netip.Addr, name string, mtu int) {
	t.Helper()
	link, err := router.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	route := &netlink.Route{
		Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())}, LinkIndex: link.Attrs().Index, MTU: mtu, MTULock: true,
	}
	if via.IsValid() {
		route.Gw = via.AsSlice()
	}
	if err := router.Netlink().RouteReplace(route); err != nil {
		t.Fatal(err)
	}
}

// mtuOf is a link's.
func mtuOf(t *testing.T, ns *lab.Namespace, name string) int {
	t.Helper()
	link, err := ns.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().MTU
}

// stream is a TCP connection that lives through changes of the path.
type stream struct {
	from *lab.Namespace
	to   netip.AddrPort
	*lab.TCPConn
}

// streams are connections that live through changes of the path.
type streams []stream

func (s *streams) open(t *testing.T, from *lab.Namespace, to netip.AddrPort) {
	t.Helper()
	conn, err := from.DialTCP(t.Context(), to, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	*s = append(*s, stream{from, to, conn})
}

// stallLimit is how long a connection may take for a moment's data while the path changes: some times that TCP repeats what was lost.
const stallLimit = 3 * time.Second

// during has all connections carry data in both directions while something changes, and once more after that.
func (s streams) during(t *testing.T, what string, change func()) {
	t.Helper()
	var all sync.WaitGroup
	var changed atomic.Bool
	for _, one := range s {
		all.Go(func() {
			for last := false; !last; {
				last = changed.Load()
				if err := one.Echo(within(t, stallLimit), 100_000); err != nil {
					t.Errorf("%s: from %s: %v", what, one.from.Netns(), err)
					return
				}
				time.Sleep(50 * time.Millisecond) // others have something to do as well
			}
		})
	}
	change()
	changed.Store(true)
	if all.Wait(); t.Failed() {
		t.FailNow() // all that follows would wait for as long
	}
}

// tooBigs are what the answers of a capture quote that a node has sent about packets that are too big.
func tooBigs(packets []gopacket.Packet, from netip.Addr) (quotes []gopacket.Packet) {
	for _, packet := range packets {
		kind, quote, ok := icmpErrorIn(packet)
		if ip, is := ipHeaderOf(packet.NetworkLayer()); ok && is && ip.source == from && kind == lab.TooBig[wire.FamilyOf(from)] {
			quotes = append(quotes, quote)
		}
	}
	return quotes
}

const (
	// quoted is how much of a packet an answer quotes, in bytes.
	quoted = 128
	// answers is how many a pod gets at once, and then in a second.
	answers = 100
)

// assertTold floods a path with what is too big for it: the pod is told by its node, so often and not more, of its own packets, and a
// neighbour is told all the same.
func assertTold(t *testing.T, pod, neighbour *lab.Pod, to netip.AddrPort) {
	t.Helper()
	family := wire.FamilyOf(to.Addr())
	node, size := pod.Node.AddrOf(family), widest-headers[family]
	conn := dontFragment(t, pod.Namespace, to)
	capture, err := pod.Capture(pod.IfName)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second) // all that it may be told at once
	before, began := dropped(t, pod.Node, drops.TooBig), time.Now()
	const flood = 10 * answers
	payload, sent := make([]byte, size), 0
	for sent < flood {
		if _, err := conn.Write(payload); err == nil {
			sent++
		} else if !errors.Is(err, unix.EMSGSIZE) {
			t.Fatal(err)
		}
	}
	defer time.Sleep(time.Second) // until it may be told again
	if _, err := neighbour.Ping(t.Context(), to.Addr(), lab.PingOptions{Size: size, DontFragment: true}); err == nil {
		t.Error("a neighbour's ping arrives, which is too big")
	} else if complaint, ok := errors.AsType[*lab.ICMPError](err); !ok || complaint.From != node {
		t.Errorf("a neighbour is told nothing: %v", err)
	}
	took := time.Since(began)
	if lost := dropped(t, pod.Node, drops.TooBig) - before; lost != flood+1 {
		t.Errorf("%d packets are counted as too big, of %d", lost, flood+1)
	}
	quotes := tooBigs(capture.Close(), node)
	if most := answers + int(answers*took.Seconds()) + 2; len(quotes) < answers || len(quotes) > most {
		t.Errorf("%d answers to %d packets in %v, want %d to %d", len(quotes), flood, took, answers, most)
	}
	for _, quote := range quotes {
		ip, _ := ipHeaderOf(quote.NetworkLayer())
		if len(quote.Data()) != quoted || ip.source != pod.AddrOf(family) || ip.destination != to.Addr() {
			t.Fatalf("a quote of %d bytes, from %s to %s", len(quote.Data()), ip.source, ip.destination)
		}
	}
}

// assertSegmentsTold sends one large packet, to be cut into segments that are too big.
func assertSegmentsTold(t *testing.T, pod *lab.Pod, to netip.AddrPort) {
	t.Helper()
	size := widest - headers[wire.FamilyOf(to.Addr())]
	conn := dontFragment(t, pod.Namespace, to)
	setOption(t, conn, unix.SOL_UDP, unix.UDP_SEGMENT, size)
	before := dropped(t, pod.Node, drops.TooBig)
	if _, err := conn.Write(make([]byte, 10*size)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, size)); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("a packet of 10 segments that are too big: error %v", err)
	}
	if lost := dropped(t, pod.Node, drops.TooBig) - before; lost != 1 {
		t.Errorf("%d packets are counted as too big, want the one", lost)
	}
}
