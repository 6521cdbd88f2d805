package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/perf"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Some devices compute the sum of each packet that they receive (CHECKSUM_COMPLETE). Whoever changes such a packet has to change
// the sum as well. The kernel is such a device where it verifies the checksum of an outer packet: what was in it keeps the sum.

// summed is a packet as it came to a pod. The sum is of all behind the Ethernet header.
type summed struct {
	gopacket.Packet
	sum uint16
	has bool
}

// sums collects what comes to a pod.
type sums struct {
	reader *perf.Reader
	done   chan struct{}

	mu   sync.Mutex
	seen []summed
	lost uint64
}

const (
	sumBytes    = 16 // of what stands before each packet: the sum or an error, and the packet's length
	largestSeen = 4096
)

// readSums begins to collect what comes to an interface of a host or pod.
func readSums(t *testing.T, ns *lab.Namespace, link string) *sums {
	t.Helper()
	events, err := ebpf.NewMap(&ebpf.MapSpec{Name: "sums", Type: ebpf.PerfEventArray})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { events.Close() })
	s := &sums{done: make(chan struct{})}
	if s.reader, err = perf.NewReader(events, 1<<20); err != nil {
		t.Fatal(err)
	}
	go s.collect()
	t.Cleanup(func() { s.reader.Close(); <-s.done })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "sums", Type: ebpf.SchedCLS, License: "GPL", Instructions: sumReader(events)})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { program.Close() })
	device, err := ns.Netlink().LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	err = errors.Join(ns.Netlink().QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: "clsact"}), ns.Netlink().FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: device.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1,
		},
		Fd: program.FD(), Name: "sums", DirectAction: true,
	}))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// sumReader hands on every packet of at most largestSeen bytes. Adding nothing to the sum is how a program asks for it.
func sumReader(events *ebpf.Map) asm.Instructions {
	const pass, thisCPU = -1, 0xffffffff // TC_ACT_UNSPEC, BPF_F_CURRENT_CPU
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R7, asm.R6, 0, asm.Word), // the packet's length
		asm.JGT.Imm(asm.R7, largestSeen, "pass"),
		asm.Mov.Imm(asm.R2, 0),
		asm.FnCsumUpdate.Call(),
		asm.StoreMem(asm.RFP, -sumBytes, asm.R0, asm.DWord),
		asm.StoreMem(asm.RFP, -sumBytes+8, asm.R7, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, events.FD()),
		asm.LSh.Imm(asm.R7, 32), // how much of the packet is wanted
		asm.LoadImm(asm.R3, thisCPU, asm.DWord),
		asm.Or.Reg(asm.R3, asm.R7),
		asm.Mov.Reg(asm.R4, asm.RFP),
		asm.Add.Imm(asm.R4, -sumBytes),
		asm.Mov.Imm(asm.R5, sumBytes),
		asm.FnPerfEventOutput.Call(),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"),
		asm.Return(),
	}
}

func (s *sums) collect() {
	defer close(s.done)
	for {
		record, err := s.reader.Read()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		s.mu.Lock()
		s.lost += record.LostSamples
		if raw := record.RawSample; err == nil && len(raw) > sumBytes {
			sum, length := int64(binary.NativeEndian.Uint64(raw)), binary.NativeEndian.Uint64(raw[8:])
			packet := gopacket.NewPacket(raw[sumBytes:sumBytes+length], layers.LayerTypeEthernet, gopacket.Default)
			s.seen = append(s.seen, summed{packet, foldedSum(uint32(sum)), sum >= 0})
		}
		s.mu.Unlock()
	}
}

// foldedSum is the kernel's sum of a packet as onesSum has it.
func foldedSum(sum uint32) uint16 {
	sum = sum&0xffff + sum>>16
	folded := binary.NativeEndian.AppendUint16(nil, uint16(sum&0xffff+sum>>16))
	return binary.BigEndian.Uint16(folded)
}

// packets returns what has come so far.
func (s *sums) packets() []summed {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// assertRight: each sum is that of the packet.
func (s *sums) assertRight(t *testing.T) {
	t.Helper()
	for _, packet := range s.packets() {
		if want := onesSum(packet.Data()[ethernetEnd:]); packet.has && packet.sum%0xffff != want%0xffff {
			t.Errorf("the kernel has the sum %#x of a packet whose sum is %#x:\n%s", packet.sum, want, packet)
		}
	}
}

// kinds are what packets were that the kernel has had a sum of, each with its sender.
func (s *sums) kinds() map[string]bool {
	all := map[string]bool{}
	for _, packet := range s.packets() {
		if ip, ok := ipHeaderOf(packet.NetworkLayer()); ok && packet.has {
			all[sumKind(kindOf(packet), ip.source)] = true
		}
	}
	return all
}

func sumKind(what string, from netip.Addr) string { return what + " from " + from.String() }

// kindOf is what a packet is that goes through the programs in a way of its own.
func kindOf(packet gopacket.Packet) string {
	if kind, _, ok := icmpErrorIn(packet); ok && slices.Contains(lab.PortUnreachable[:], kind) {
		return "ICMP error"
	}
	switch layer := packet.Layers()[2].(type) {
	case *layers.TCP:
		return "TCP"
	case *layers.UDP:
		if layer.Checksum == 0 {
			return "UDP without a checksum"
		}
		return "UDP"
	case *gopacket.Fragment, *layers.IPv6Fragment:
		return "fragment"
	}
	return "ICMP"
}

// Whatever a packet goes through on its way into a pod, the sum that its device had of it is that of the packet that arrives.
func TestSumsFollowWhatChanges(t *testing.T) {
	t.Parallel()
	for _, network := range []struct {
		name    string
		mode    string
		prepare func(*testing.T, *lab.Lab)
		world   bool // whether there are sums of what the world sends
	}{
		{"out of the tunnel", "vxlan", sumInSoftware, false},
		{"on the uplink", "direct", moveOntoVXLAN, true},
	} {
		t.Run(network.name, func(t *testing.T) {
			l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{"--routing-mode=" + network.mode, "--kube-proxy=off"}})
			network.prepare(t, l)
			startAgents(t, l)
			pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
			sums := readSums(t, pod.Namespace, pod.IfName)
			overEachFamily(t, l, func(t *testing.T, family wire.Family) {
				from, world := far.AddrOf(family), lab.OutsideAddr[family]
				assertReaches(t, far.Namespace, serveOver(t, pod.Namespace, family), from)
				talkToTheWorld(t, l, pod, family)
				want := []string{sumKind("TCP", from), sumKind("UDP", from), sumKind("fragment", from), sumKind("ICMP", from)}
				if network.world {
					for _, what := range []string{"TCP", "UDP", "UDP without a checksum", "fragment", "ICMP", "ICMP error"} {
						want = append(want, sumKind(what, world))
					}
				}
				for _, kind := range want {
					eventually(t, answerLimit, "there is a sum of "+kind, func() bool { return sums.kinds()[kind] })
				}
			})
			sums.assertRight(t)
		})
	}
}

// talkToTheWorld has a pod receive what is translated, also its port: those of the pod are not in the range.
func talkToTheWorld(t *testing.T, l *lab.Lab, pod *lab.Pod, family wire.Family) {
	t.Helper()
	at, node := serveOver(t, l.Outside, family), pod.Node.AddrOf(family)
	// Once the neighbour is known nothing has to wait for it in the stack, which forgets sums.
	if _, err := pod.Node.Ping(t.Context(), at.Addr(), lab.PingOptions{}); err != nil {
		t.Fatal(err)
	}
	stream, err := pod.DialTCP(t.Context(), at, 5000)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if err := stream.Echo(t.Context(), 1001); err != nil {
		t.Error(err)
	}
	for _, size := range []int{101, 9000} {
		conn, err := pod.DialUDP(at, 5000)
		if err != nil {
			t.Fatal(err)
		}
		seen, err := conn.Echo(t.Context(), size)
		assertSeen(t, "UDP to the world", seen, err, node)
		conn.Close()
	}
	if _, err := pod.Ping(t.Context(), at.Addr(), lab.PingOptions{Size: 57}); err != nil {
		t.Error(err)
	}
	if _, err := pod.UDP(t.Context(), netip.AddrPortFrom(at.Addr(), 9), 64); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a closed port: %v, want connection refused", err)
	}

	world := netip.AddrPortFrom(at.Addr(), 7000)
	outside, inside := listenUDP(t, l.Outside, world), dialUDP(t, pod.Namespace, 5001, world)
	for _, socket := range []*net.UDPConn{outside, inside} {
		for _, option := range noChecksum[family] {
			setOption(t, socket, option[0], option[1], option[2])
		}
	}
	send(t, inside, "hello")
	if _, err := outside.WriteToUDPAddrPort([]byte("answer"), receive(t, outside, "hello")); err != nil {
		t.Fatal(err)
	}
	receive(t, inside, "answer")
}

// noChecksum are the options, with level and value, by which a socket sends datagrams without a checksum, and takes them.
var noChecksum = [wire.Families][][3]int{
	wire.IPv4: {{unix.SOL_SOCKET, unix.SO_NO_CHECK, 1}},
	wire.IPv6: {{unix.SOL_UDP, unix.UDP_NO_CHECK6_TX, 1}, {unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1}},
}

// sumInSoftware has every packet summed before it is on the wire, so that who receives it looks at its checksum.
func sumInSoftware(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, host := range fabricHosts(l) {
		if err := host.SetOffloads(lab.Uplink, false); err != nil {
			t.Fatal(err)
		}
	}
}

func fabricHosts(l *lab.Lab) []*lab.Namespace {
	hosts := []*lab.Namespace{l.Outside}
	for _, node := range l.Nodes {
		hosts = append(hosts, node.Namespace)
	}
	return hosts
}

// moveOntoVXLAN puts the hosts' addresses and routes onto a VXLAN between them, which becomes the nodes' uplink.
func moveOntoVXLAN(t *testing.T, l *lab.Lab) {
	t.Helper()
	sumInSoftware(t, l)
	for i, host := range fabricHosts(l) {
		if err := moveHostOntoVXLAN(host, net.IPv4(198, 18, 0, byte(1+i)).To4()); err != nil {
			t.Fatal(fmt.Errorf("move %s: %w", host.Netns(), err))
		}
	}
}

func moveHostOntoVXLAN(host *lab.Namespace, outer net.IP) error {
	nl := host.Netlink()
	uplink, err := nl.LinkByName(lab.Uplink)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "wide0"
	wide := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 7, Port: 8472, UDPCSum: true, Learning: true,
		SrcAddr: outer, Group: net.IPv4(239, 1, 1, 7).To4(), VtepDevIndex: uplink.Attrs().Index,
	}
	err = errors.Join(nl.AddrAdd(uplink, &netlink.Addr{IPNet: &net.IPNet{IP: outer, Mask: net.CIDRMask(24, 32)}}), nl.LinkAdd(wide),
		host.WriteSysctl("net/ipv6/conf/wide0/accept_dad", "0"), nl.LinkSetUp(wide))
	if err != nil {
		return err
	}
	routes, err := lab.RetryInterrupted(func() ([]netlink.Route, error) { return nl.RouteList(uplink, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	addrs, err := lab.RetryInterrupted(func() ([]netlink.Addr, error) { return nl.AddrList(uplink, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, addr := range addrs {
		if addr.IP.IsGlobalUnicast() && !addr.IP.Equal(outer) {
			moved := &netlink.Addr{IPNet: addr.IPNet, Flags: unix.IFA_F_NODAD}
			err = errors.Join(err, nl.AddrDel(uplink, &addr), nl.AddrAdd(wide, moved))
		}
	}
	for _, route := range routes {
		if route.Gw != nil {
			err = errors.Join(err, nl.RouteReplace(&netlink.Route{Dst: route.Dst, Gw: route.Gw, LinkIndex: wide.Attrs().Index}))
		}
	}
	return err
}
