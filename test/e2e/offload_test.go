package e2e

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What a pod leaves to others to write into its packets: checksums and segments.

// Where things stand in a frame, and a payload that is told from any other.
const (
	ethernetEnd  = 14
	headerSum    = ethernetEnd + 10
	sourceLow    = ethernetEnd + 14 // the second half of the source address
	transport    = ethernetEnd + 20
	udpSum       = 6
	forgedWord   = 0x4d4d // 77.77
	forgedMarker = "written by whom?"
)

// frameOf is a pod's frame with a transport header, all of its checksums right.
func frameOf(t *testing.T, pod *lab.Pod, to netip.Addr, header gopacket.SerializableLayer, payload []byte) []byte {
	t.Helper()
	neighbours, err := pod.Netlink().NeighList(0, unix.AF_INET)
	if err != nil || len(neighbours) == 0 {
		t.Fatalf("the gateway's address in the pod: %v, error %v", neighbours, err)
	}
	ethernet := &layers.Ethernet{SrcMAC: pod.MAC, DstMAC: neighbours[0].HardwareAddr, EthernetType: layers.EthernetTypeIPv4}
	ip := &layers.IPv4{Version: 4, TTL: 64, SrcIP: pod.Addr().AsSlice(), DstIP: to.AsSlice()}
	switch h := header.(type) {
	case *layers.UDP:
		ip.Protocol, err = layers.IPProtocolUDP, h.SetNetworkLayerForChecksum(ip)
	case *layers.TCP:
		ip.Protocol, err = layers.IPProtocolTCP, h.SetNetworkLayerForChecksum(ip)
	case *layers.ICMPv4:
		ip.Protocol = layers.IPProtocolICMPv4
	}
	if err != nil {
		t.Fatal(err)
	}
	buffer := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buffer, options, ethernet, ip, header, gopacket.Payload(payload)); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// onesSum is the ones' complement sum of a piece of a packet.
func onesSum(words []byte) uint16 {
	var sum uint32
	for ; len(words) > 1; words = words[2:] {
		sum += uint32(binary.BigEndian.Uint16(words))
	}
	if len(words) == 1 {
		sum += uint32(words[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// forge has a pod send a datagram of which one word is to become another after the programs have read it: the word is
// where a checksum is to be written, the payload makes that checksum the word wanted, and the header's checksum is
// right only with it. Until then the carrier changes the frame as carried says.
func forge(t *testing.T, pod *lab.Pod, to netip.AddrPort, sport uint16, at int, carried func(frame []byte)) {
	t.Helper()
	payload := append([]byte(forgedMarker), 0, 0)
	udp := &layers.UDP{SrcPort: layers.UDPPort(sport), DstPort: layers.UDPPort(to.Port())}
	frame := frameOf(t, pod, to.Addr(), udp, payload)
	copy(frame[transport+udpSum:], []byte{0, 0})
	seen := bytes.Clone(frame)
	carried(seen)
	want := uint16(forgedWord)
	if at < transport {
		sum := uint32(^binary.BigEndian.Uint16(frame[headerSum:])) + uint32(^binary.BigEndian.Uint16(seen[at:])) + uint32(want)
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(frame[headerSum:], ^uint16(sum&0xffff+sum>>16))
	}
	filler := binary.BigEndian.AppendUint16(nil, ^want)
	filler = binary.BigEndian.AppendUint16(filler, ^onesSum(seen[at:]))
	binary.BigEndian.PutUint16(frame[len(frame)-2:], onesSum(filler))
	if err := pod.SendOffloaded(pod.IfName, frame, lab.Offload{SumStart: at}); err != nil {
		t.Fatal(err)
	}
}

// A pod has others write over its source or its port, where the programs have already looked.
func TestOffloadForgesNothing(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}}, drops.BadOffload, drops.Invalid)
		pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
		at := serve(t, l.Outside)
		for _, to := range []netip.Addr{far.Addr(), at.Addr()} { // whose neighbours are to be known
			if _, err := pod.Ping(t.Context(), to, lab.PingOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Nodes[0].SetOffloads(lab.Uplink, false); err != nil { // so that checksums are written here
			t.Fatal(err)
		}
		inside, err := far.Capture(far.IfName)
		if err != nil {
			t.Fatal(err)
		}
		outside, err := l.Outside.Capture(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		masqueraded := func(frame []byte) { copy(frame[ethernetEnd+12:], l.Nodes[0].Addr().AsSlice()) }
		forge(t, pod, netip.AddrPortFrom(far.Addr(), 9), 40000, sourceLow, func([]byte) {})
		forge(t, pod, at, inRange, sourceLow, masqueraded)
		// Where the address changes, the header's checksum gives it away too.
		forge(t, pod, at, inRange, transport, masqueraded)
		counted := func() bool {
			return dropped(t, l.Nodes[0], drops.Invalid) == 2 && dropped(t, l.Nodes[0], drops.BadOffload) == 1
		}
		eventually(t, answerLimit, "each forged datagram is counted as a drop", counted)
		for _, packet := range append(inside.Close(), outside.Close()...) {
			if bytes.Contains(packet.Data(), []byte(forgedMarker)) {
				t.Errorf("a forged datagram arrived:\n%s", packet)
			}
		}
	})
}

// No place in a header that is read may be written later: all are tried.
func TestOffloadWritesNoHeader(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 1}, drops.BadOffload)
	pod, near := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near")
	payload := make([]byte, 64)
	for _, kind := range []struct {
		name        string
		header      gopacket.SerializableLayer
		length, sum int // of the header, and where its checksum stands
	}{
		{"UDP", &layers.UDP{SrcPort: 40000, DstPort: 9}, 8, udpSum},
		{"TCP", &layers.TCP{SrcPort: 40000, DstPort: 9, RST: true}, 20, 16},
		// Its payload may be a packet that is read too, and no stack leaves its checksum to others.
		{"ICMP", &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoReply, 0)}, 8 + len(payload) - 2, -1},
	} {
		frame := frameOf(t, pod, near.Addr(), kind.header, payload)
		before, sent := dropped(t, l.Nodes[0], drops.BadOffload), uint64(0)
		for at := ethernetEnd; at < transport+kind.length; at++ {
			for _, start := range []int{at, at - max(kind.sum, 1), transport} {
				own := start == transport && at == transport+kind.sum
				// Of a sum that begins in front of the IP header nobody hears; the sender's kernel refuses some others.
				if start >= ethernetEnd && start <= at && !own &&
					pod.SendOffloaded(pod.IfName, frame, lab.Offload{SumStart: start, SumOffset: at - start}) == nil {
					sent++
				}
			}
		}
		if sent < uint64(kind.length) {
			t.Errorf("%s: %d packets could be sent", kind.name, sent)
		}
		counted := func() bool { return dropped(t, l.Nodes[0], drops.BadOffload) == before+sent }
		eventually(t, answerLimit, kind.name+": each packet that is to be written to is dropped", counted)
	}
}

// What a pod may leave to others: its packet's own checksum, and whatever stands behind the header.
func TestOffloadsOfPodsAreCarriedOut(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 2})
	pod, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
	if err := l.Nodes[0].SetOffloads(lab.Uplink, false); err != nil {
		t.Fatal(err)
	}
	outside := serve(t, l.Outside)
	for _, to := range []netip.AddrPort{serve(t, near.Namespace), serve(t, far.Namespace), outside} {
		assertSegments(t, pod, to)
	}
	capture, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	payload := append([]byte(forgedMarker), make([]byte, 64)...)
	whole := frameOf(t, pod, outside.Addr(), &layers.UDP{SrcPort: inRange, DstPort: layers.UDPPort(outside.Port())}, payload)
	partial := bytes.Clone(whole)
	partialSum(partial)
	for _, send := range []error{
		pod.SendFrame(pod.IfName, whole),
		pod.SendOffloaded(pod.IfName, partial, lab.Offload{SumStart: transport, SumOffset: udpSum}),
		pod.SendOffloaded(pod.IfName, partial, lab.Offload{SumStart: transport, SumOffset: 8 + len(forgedMarker)}),
	} {
		if send != nil {
			t.Fatal(send)
		}
	}
	arrived := func() (n int) {
		for _, packet := range capture.Packets() {
			if ip, ok := packet.NetworkLayer().(*layers.IPv4); ok && ip.SrcIP.Equal(l.Nodes[0].Addr().AsSlice()) && bytes.Contains(packet.Data(), []byte(forgedMarker)) {
				n++
			}
		}
		return n
	}
	eventually(t, answerLimit, "datagrams of a packet socket arrive", func() bool { return arrived() == 3 })
	capture.Close()
}

// partialSum leaves the sum of the pseudo header where a datagram's checksum belongs, as senders do.
func partialSum(frame []byte) {
	pseudo := append([]byte{0, unix.IPPROTO_UDP}, frame[ethernetEnd+12:transport]...)
	pseudo = append(pseudo, frame[transport+4:transport+6]...)
	binary.BigEndian.PutUint16(frame[transport+udpSum:], onesSum(pseudo))
}

// assertSegments has a pod send datagrams that its kernel hands on in one piece, and wants each answered.
func assertSegments(t *testing.T, pod *lab.Pod, to netip.AddrPort) {
	t.Helper()
	const size, count = 1000, 5
	conn, err := pod.DialUDP(to, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var refused error
	err = raw.Control(func(fd uintptr) { refused = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) })
	if err != nil || refused != nil {
		t.Fatal(err, refused)
	}
	if _, err := conn.Write(make([]byte, size*count)); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if n, err := conn.Read(make([]byte, 2*size)); err != nil || n != size {
			t.Fatalf("segment %d to %s: an answer of %d bytes, %v", i, to, n, err)
		}
	}
}

// TestTunnelBetweenPods: TCP through a VXLAN that two pods have built, whose checksums stand far behind the header.
func TestTunnelBetweenPods(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 2})
	a := addPod(t, l.Nodes[0], "a")
	for i, peer := range []*lab.Pod{addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")} {
		for j, sums := range []bool{true, false} {
			id := 10*i + j
			addTunnel(t, a, peer, id, 1, sums)
			inner := addTunnel(t, peer, a, id, 2, sums)
			server, err := peer.Serve(0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := a.Transfer(within(t, 20*time.Second), netip.AddrPortFrom(inner, server.Port), 1<<20); err != nil {
				t.Errorf("to %s, outer checksums %v: %v", peer.Name, sums, err)
			}
		}
	}
}

// addTunnel makes one end of a VXLAN in a pod and returns its address there.
func addTunnel(t *testing.T, pod, peer *lab.Pod, id, host int, sums bool) netip.Addr {
	t.Helper()
	inner := netip.AddrFrom4([4]byte{192, 168, byte(id), byte(host)})
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "tunnel"+string(rune('a'+id)), 1400
	link := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 100 + id, Port: 4789, UDPCSum: sums,
		SrcAddr: pod.Addr().AsSlice(), Group: peer.Addr().AsSlice(),
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: inner.AsSlice(), Mask: net.CIDRMask(24, 32)}}
	nl := pod.Netlink()
	for _, err := range []func() error{
		func() error { return nl.LinkAdd(link) },
		func() error { return nl.AddrAdd(link, address) },
		func() error { return nl.LinkSetUp(link) },
	} {
		if err := err(); err != nil {
			t.Fatal(err)
		}
	}
	return inner
}
