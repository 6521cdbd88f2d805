package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// assertConflicts: a port that somebody has is not given away, and who has it is named.
func (h *hosted) assertConflicts(t *testing.T) {
	before := dump(t, h.node, "hostports")
	own := h.node.AddrOf(wire.IPv4)
	for what, asked := range map[string][]lab.HostPort{
		"the same":                       ports(anyPort, tcp),
		"at one address, of all":         ports(anyPort, udp, own),
		"at loopback, of all":            ports(anyPort, tcp, loopback[wire.IPv4]),
		"at all addresses, of one":       ports(ownPort, tcp),
		"at the same address":            ports(ownPort, udp, h.node.AddrOf(wire.IPv6)),
		"the last of several":            append(ports(7001, both), ports(ownPort, tcp, own)...),
		"at all of IPv6, of one address": ports(loopPort, tcp, netip.IPv6Unspecified()),
	} {
		_, err := h.node.AddPod(t.Context(), "conflict", lab.PodOptions{HostPorts: asked})
		if err == nil || !strings.Contains(err.Error(), "lab/web") {
			t.Errorf("a port, %s, is another pod's: %v, want an error that names it", what, err)
		}
	}
	if diff := cmp.Diff(before, dump(t, h.node, "hostports")); diff != "" {
		t.Errorf("what was refused has changed host ports:\n%s", diff)
	}
	for what, asked := range map[string][]lab.HostPort{
		"another protocol": {{Port: anyPort, PodPort: anyPort, Protocol: "sctp"}}, "another address": ports(ownPort, both, loopback[wire.IPv4]),
	} {
		pod, err := h.node.AddPod(t.Context(), "other-one", lab.PodOptions{HostPorts: asked})
		if err == nil {
			err = h.node.DelPod(t.Context(), pod)
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// assertLoopbackIsClosed to whoever has a link to the node, even where its kernel routes to loopback what comes by it. A frame to the
// node's own address, made in the same way, arrives.
func (h *hosted) assertLoopbackIsClosed(t *testing.T) {
	if err := h.node.WriteSysctl("net/ipv4/conf/all/route_localnet", "1"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.node.WriteSysctl("net/ipv4/conf/all/route_localnet", "0"); err != nil {
			t.Error(err)
		}
	}()
	far, link := h.Nodes[2], &layers.Ethernet{SrcMAC: uplinkOf(t, h.Nodes[2]), DstMAC: uplinkOf(t, h.node)}
	for _, family := range families {
		capture, err := h.web.Capture(h.web.IfName)
		if err != nil {
			t.Fatal(err)
		}
		own := netip.AddrPortFrom(h.node.AddrOf(family), anyPort)
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(loopback[family], loopPort), netip.AddrPortFrom(loopback[family], anyPort), own} {
			text, port := fmt.Append(nil, to), layers.UDPPort(to.Port())
			byLink := frameFrom(t, link, far.AddrOf(family), to.Addr(), &layers.UDP{SrcPort: 9, DstPort: port}, text)
			byPod := frameOf(t, h.old, to.Addr(), &layers.UDP{SrcPort: 10, DstPort: port}, text)
			if err := errors.Join(far.SendFrame(lab.Uplink, byLink), h.old.SendFrame(h.old.IfName, byPod)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond)
		var arrived []string
		for _, packet := range capture.Close() {
			if udp, ok := packet.TransportLayer().(*layers.UDP); ok && udp.DstPort == webPort {
				arrived = append(arrived, fmt.Sprintf("%s from %d", udp.Payload, udp.SrcPort))
			}
		}
		slices.Sort(arrived)
		if want := []string{fmt.Sprintf("%s from 10", own), fmt.Sprintf("%s from 9", own)}; !slices.Equal(arrived, want) {
			t.Errorf("%v: of what came by links the pod got %q, want %q", family, arrived, want)
		}
	}
}

// uplinkOf is the Ethernet address of a node's uplink.
func uplinkOf(t *testing.T, node *lab.Node) net.HardwareAddr {
	t.Helper()
	link, err := node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().HardwareAddr
}

// assertNotMasqueradedTo: web has the port that a pod's flow to the world would keep.
func (h *hosted) assertNotMasqueradedTo(t *testing.T) {
	for _, family := range families {
		at := serveOver(t, h.Outside, family)
		for port, kept := range map[uint16]bool{inRange: false, inRange + 1: true} {
			stream, err := h.old.DialTCP(within(t, answerLimit), at, port)
			if err != nil {
				t.Fatal(err)
			}
			stream.Close()
			packets, err := h.old.DialUDP(at, port)
			if err != nil {
				t.Fatal(err)
			}
			seen, err := packets.Echo(within(t, answerLimit), 64)
			packets.Close()
			if err != nil || (stream.Seen.Port() == port) != kept || (seen.Port() == port) != kept {
				t.Errorf("flows from port %d are seen from %s and %s, with the same port: want %v; %v", port, stream.Seen, seen, kept, err)
			}
		}
	}
}

// outliveTheAgent: while it is dead and starts again nobody is refused, and pods with host ports come and go. What has gone from the map
// meanwhile, as CHECK notices, is there again when it is ready.
func (h *hosted) outliveTheAgent(t *testing.T) {
	const rate, enough = 150, 1000
	if err := h.node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	var probers []*lab.Prober
	var all []netip.AddrPort
	for _, family := range families {
		all = append(all, netip.AddrPortFrom(h.node.AddrOf(family), anyPort))
		probers = append(probers, h.Outside.ProbeTCP(all[family], rate, answerLimit))
	}
	streams, datagrams := connect(t, h.beyond.Namespace, all[0], 1, 3), startSteadyFlows(t, h.Outside, all...)
	started := time.Now()
	h.succeedEachOther(t)
	m, err := hostports.Open(bpffs.Dir(h.node.BPFFS()).Map(hostports.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Delete(hostports.KeyFrom(netip.IPv4Unspecified(), protoPort, wire.UDP)); err != nil {
		t.Fatal(err)
	}
	if err := h.other.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "host port") {
		t.Errorf("CHECK without the entry of a host port: %v", err)
	}
	for range 2 { // the second is killed in the middle of its work
		startAfterKill(t, h.node)
	}
	if err := h.other.Check(t.Context()); err != nil {
		t.Error(err)
	}
	time.Sleep(enough*time.Second/time.Duration(rate*len(families)) - time.Since(started))
	for i, prober := range probers {
		assertAllAnswered(t, families[i], prober.Stop(), 1)
	}
	datagrams.end(t)
	streams.assertAlive(t, "with another agent")
	streams.close()
}

// succession is who asks by a port that goes from one pod to another, in a family.
type succession struct {
	to     netip.AddrPort
	stream *lab.TCPConn
	flow   *lab.Prober // from one port
	loose  looseSocket // of a process of the node's
}

// succeedEachOther has two pods have a port one right after the other, and a client's flow of datagrams go over.
func (h *hosted) succeedEachOther(t *testing.T) {
	t.Helper()
	const port = 8090
	former := addHosted(t, h.node, "former", ports(port, both)...)
	if err := former.Check(t.Context()); err != nil {
		t.Error(err)
	}
	var all []succession
	for _, family := range families {
		all = append(all, h.startSuccession(t, netip.AddrPortFrom(h.node.AddrOf(family), port)))
		h.assertAnsweredBy(t, former, all[family])
	}
	time.Sleep(100 * time.Millisecond)
	ending := time.Now()
	time.Sleep(50 * time.Millisecond) // for the last answer
	if err := h.node.DelPod(t.Context(), former); err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		// The kernel's refusals of the flow are all that it has for who sends it.
		assertRefusedTo(t, h.direct.Namespace, s.to)
		if err := s.stream.Echo(within(t, answerLimit), 100); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: a connection to a pod that is gone: %v, want it reset", s.to, err)
		}
	}
	latter := addHosted(t, h.node, "latter", ports(port, both)...)
	begun := time.Now()
	for _, s := range all {
		h.assertAnsweredBy(t, latter, s)
		time.Sleep(100 * time.Millisecond)
		probes := s.flow.Stop()
		for from, span := range map[*lab.Pod]lab.Probes{former: probes.Between(time.Time{}, ending), latter: probes.Between(begun, time.Now())} {
			at := from.Endpoint(wire.FamilyOf(s.to.Addr()), webPort).At
			if span.Lost()+span.Refused() > 0 || len(span) == 0 || span.By()[at] != len(span) {
				t.Errorf("of a flow of datagrams, while the port is that of pod %s at %s: %v", from.Name, at, span)
			}
		}
	}
	if err := h.node.DelPod(t.Context(), latter); err != nil {
		t.Fatal(err)
	}
}

func (h *hosted) startSuccession(t *testing.T, to netip.AddrPort) succession {
	t.Helper()
	s := succession{to: to, loose: openLoose(t, startProcess(t, h.node, h.node.Namespace), to.Addr())}
	var err error
	if s.stream, err = h.Outside.DialTCP(within(t, answerLimit), to, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.stream.Close() })
	if s.flow, err = h.Outside.ProbeUDP(to, 7000, 200); err != nil {
		t.Fatal(err)
	}
	return s
}

// assertAnsweredBy asks from outside, and by the socket that may have asked another pod before.
func (h *hosted) assertAnsweredBy(t *testing.T, pod *lab.Pod, s succession) {
	t.Helper()
	family := wire.FamilyOf(s.to.Addr())
	answering{s.to.Port(): {pod, pod}}.assertFrom(t, h.Outside, s.to.Addr(), h.Outside.AddrOf(family))
	if by := s.loose.ask(t, s.to); by.Addr() != pod.AddrOf(family) {
		t.Errorf("a datagram of a process to %s is answered by %s, want pod %s", s.to, by, pod.Name)
	}
}

// loseAPod: what a pod has left that nobody has ended is in nobody's way, and GC takes it away. A process that waits for it is freed.
func (h *hosted) loseAPod(t *testing.T) {
	const port = 8091
	lost := addHosted(t, h.node, "lost", append(ports(port, both), ports(port+1, both)...)...)
	to := netip.AddrPortFrom(h.node.AddrOf(wire.IPv4), port)
	waits, err := startProcess(t, h.node, h.node.Namespace).Dial(unix.SOCK_DGRAM, to)
	if err != nil {
		t.Fatal(err)
	}
	defer waits.Close()
	ask(t, waits, to)
	if err := h.node.LosePod(lost); err != nil {
		t.Fatal(err)
	}
	eventually(t, answerLimit, "its link is gone", func() bool {
		links, err := h.node.Links()
		return err == nil && !slices.Contains(links, lost.Result.Interfaces[0].Name)
	})
	next := addHosted(t, h.node, "next", ports(port, both)...)
	if err := h.node.GC(t.Context(), h.node.Pods()...); err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		answering{port: {next, next}}.assertFrom(t, h.Outside, h.node.AddrOf(family), h.Outside.AddrOf(family))
	}
	if err := waits.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	if _, err := waits.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("who waits for the pod that is gone is told: %v", err)
	}
	for _, row := range dump(t, h.node, "hostports") {
		if row["port"] == float64(port+1) {
			t.Errorf("GC has left %v", row)
		}
	}
	if err := h.node.DelPod(t.Context(), next); err != nil {
		t.Fatal(err)
	}
}

// meetNodePorts: a NodePort that is there is no pod's; one that comes later waits until the pods that have it have gone.
func (h *hosted) meetNodePorts(t *testing.T) {
	const taken = 30099
	eventually(t, changeLimit, "host ports are reserved", func() bool { return isReserved(t, h.node, anyPort) && isReserved(t, h.node, boundPort) })
	streams := connect(t, h.Outside, netip.AddrPortFrom(h.node.AddrOf(wire.IPv4), anyPort), 1, 3)
	if _, err := h.node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	startAgain(t, h.node, "--services=on")
	serveBackend(t, h.beside.Namespace)
	s := newServed(h.Lab)
	earlier, later := s.spec("earlier", h.beside), s.spec("later", h.beside)
	earlier.NodePort, later.NodePort = taken, anyPort
	s.stage(t, earlier, later)()
	eventually(t, changeLimit, "the Services are there", func() bool { return hasFrontends(t, h.node, s.specs) })
	if _, err := h.node.AddPod(t.Context(), "refused", lab.PodOptions{HostPorts: ports(taken, tcp)}); err == nil || !strings.Contains(err.Error(), "default/earlier") {
		t.Errorf("a port, a Service's: %v, want an error that names it", err)
	}
	told := func(want bool) {
		t.Helper()
		eventually(t, changeLimit, fmt.Sprintf("the status tells of the NodePort that a pod has: %v", want), func() bool {
			out, _ := h.node.Ebpfctl(t.Context(), "status")
			return strings.Contains(string(out), "default/later") == want
		})
	}
	told(true)
	for _, family := range families {
		answering{anyPort: {h.web, h.web}}.assertFrom(t, h.Outside, h.node.AddrOf(family), h.Outside.AddrOf(family))
	}
	streams.assertAlive(t, "with Services")
	streams.close()
	if err := h.node.DelPod(t.Context(), h.web); err != nil {
		t.Fatal(err)
	}
	told(false)
	for _, family := range families {
		assertServedTo(t, h.Outside, netip.AddrPortFrom(h.node.AddrOf(family), anyPort), h.beside.Endpoint(family, backendPort).At, h.Outside.AddrOf(family))
		assertRefusedTo(t, h.Outside, netip.AddrPortFrom(h.node.AddrOf(family), ownPort))
	}
}

// isReserved says whether the kernel keeps a port from sockets that ask for any.
func isReserved(t *testing.T, node *lab.Node, port int) bool {
	t.Helper()
	list, err := node.ReadSysctl("net/ipv4/ip_local_reserved_ports")
	if err != nil {
		t.Fatal(err)
	}
	for span := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(span, "-")
		if !isRange {
			last = first
		}
		from, _ := strconv.Atoi(first)
		to, _ := strconv.Atoi(last)
		if from <= port && port <= to {
			return true
		}
	}
	return false
}
