package e2e

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What a pod leaves to others to write into its packets: checksums and segments.

// Where things stand in a frame, and a payload that is told from any other.
const (
	ethernetEnd  = 14
	headerSum    = ethernetEnd + 10 // of IPv4 alone
	udpSum       = 6
	forgedWord   = 0x4d4d
	forgedMarker = "written by whom?"
)

// frames say where things stand in a frame of each family.
var frames = [wire.Families]struct{ source, transport int }{
	wire.IPv4: {ethernetEnd + 12, ethernetEnd + 20},
	wire.IPv6: {ethernetEnd + 8, ethernetEnd + 40},
}

// frameOf is a pod's frame with a transport header, all of its checksums right.
func frameOf(t *testing.T, pod *lab.Pod, to netip.Addr, header gopacket.SerializableLayer, payload []byte) []byte {
	t.Helper()
	gateway, err := net.ParseMAC(pod.Result.Interfaces[0].Mac) // the host's side
	if err != nil {
		t.Fatal(err)
	}
	return frameFrom(t, &layers.Ethernet{SrcMAC: pod.MAC, DstMAC: gateway}, pod.AddrOf(wire.FamilyOf(to)), to, header, payload)
}

// frameFrom is one of anybody's, on a link between two Ethernet addresses.
func frameFrom(t *testing.T, link *layers.Ethernet, from, to netip.Addr, header gopacket.SerializableLayer, payload []byte) []byte {
	t.Helper()
	protocol := layers.IPProtocolICMPv4
	switch header.(type) {
	case *layers.UDP:
		protocol = layers.IPProtocolUDP
	case *layers.TCP:
		protocol = layers.IPProtocolTCP
	case *layers.ICMPv6:
		protocol = layers.IPProtocolICMPv6
	}
	ip := ipLayer(from, to, protocol)
	if covering, ok := header.(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		if err := covering.SetNetworkLayerForChecksum(ip); err != nil {
			t.Fatal(err)
		}
	}
	link.EthernetType = etherTypes[wire.FamilyOf(to)]
	return serialised(t, link, ip, header, gopacket.Payload(payload))
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
// where a checksum is to be written, the payload makes that checksum the word wanted, and the checksum of an IPv4 header is
// right only with it. Until then the carrier changes the frame as carried says.
func forge(t *testing.T, pod *lab.Pod, to netip.AddrPort, sport uint16, at int, carried func(frame []byte)) {
	t.Helper()
	payload := append([]byte(forgedMarker), 0, 0)
	udp := &layers.UDP{SrcPort: layers.UDPPort(sport), DstPort: layers.UDPPort(to.Port())}
	frame, transport := frameOf(t, pod, to.Addr(), udp, payload), frames[wire.FamilyOf(to.Addr())].transport
	copy(frame[transport+udpSum:], []byte{0, 0})
	seen := bytes.Clone(frame)
	carried(seen)
	want := uint16(forgedWord)
	if to.Addr().Is4() && at < transport {
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
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}}, drops.BadOffload, drops.Invalid)
		pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
		if err := l.Nodes[0].SetOffloads(lab.Uplink, false); err != nil { // so that checksums are written here
			t.Fatal(err)
		}
		overEachFamily(t, l, func(t *testing.T, family wire.Family) { assertForgesNothing(t, l, pod, far, family) })
	})
}

func assertForgesNothing(t *testing.T, l *lab.Lab, pod, far *lab.Pod, family wire.Family) {
	t.Helper()
	at, node := serveOver(t, l.Outside, family), l.Nodes[0]
	for _, to := range []netip.Addr{far.AddrOf(family), at.Addr()} { // whose neighbours are to be known
		if _, err := pod.Ping(t.Context(), to, lab.PingOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	inside, err := far.Capture(far.IfName)
	if err != nil {
		t.Fatal(err)
	}
	outside, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	source := frames[family].source
	lowest := source + len(node.AddrOf(family).AsSlice()) - 2 // the last two bytes of the source address
	masqueraded := func(frame []byte) { copy(frame[source:], node.AddrOf(family).AsSlice()) }
	before := dropped(t, node, drops.Invalid) + dropped(t, node, drops.BadOffload)
	forge(t, pod, netip.AddrPortFrom(far.AddrOf(family), 9), 40000, lowest, func([]byte) {})
	forge(t, pod, at, inRange, lowest, masqueraded)
	forge(t, pod, at, inRange, frames[family].transport, masqueraded)
	// Where the address changes, the checksum of an IPv4 header gives it away too.
	eventually(t, answerLimit, "each forged datagram is counted as a drop", func() bool {
		return dropped(t, node, drops.Invalid)+dropped(t, node, drops.BadOffload) == before+3
	})
	for _, packet := range append(inside.Close(), outside.Close()...) {
		if bytes.Contains(packet.Data(), []byte(forgedMarker)) {
			t.Errorf("a forged datagram arrived:\n%s", packet)
		}
	}
}

// No place in a header that is read may be written later: all are tried.
func TestOffloadWritesNoHeader(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families}, drops.BadOffload)
	pod, near := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near")
	// Its payload may be a packet that is read too, and no stack leaves its checksum to others.
	replies := [wire.Families]gopacket.SerializableLayer{
		wire.IPv4: &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoReply, 0)},
		wire.IPv6: &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(layers.ICMPv6TypeEchoReply, 0)},
	}
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		for _, kind := range []struct {
			name        string
			header      gopacket.SerializableLayer
			length, sum int // of the header, 0: all; and where its checksum stands
		}{
			{"UDP", &layers.UDP{SrcPort: 40000, DstPort: 9}, 8, udpSum},
			{"TCP", &layers.TCP{SrcPort: 40000, DstPort: 9, RST: true}, 20, 16},
			{"ICMP", replies[family], 0, -1},
		} {
			frame := frameOf(t, pod, near.AddrOf(family), kind.header, make([]byte, 64))
			end := frames[family].transport + kind.length
			if kind.length == 0 {
				end = len(frame) - 2
			}
			before, sent := dropped(t, l.Nodes[0], drops.BadOffload), writtenOver(pod, frame, frames[family].transport, end, kind.sum)
			if sent < uint64(end-frames[family].transport) {
				t.Errorf("%s: %d packets could be sent", kind.name, sent)
			}
			counted := func() bool { return dropped(t, l.Nodes[0], drops.BadOffload) == before+sent }
			eventually(t, answerLimit, kind.name+": each packet that is to be written to is dropped", counted)
		}
	})
}

// writtenOver sends a frame again and again, to be written to at each place before end but the one where its checksum belongs.
func writtenOver(pod *lab.Pod, frame []byte, transport, end, sum int) (sent uint64) {
	for at := ethernetEnd; at < end; at++ {
		for _, start := range []int{at, at - max(sum, 1), transport} {
			own := start == transport && at == transport+sum
			// Of a sum that begins in front of the IP header nobody hears; the sender's kernel refuses some others.
			if start >= ethernetEnd && start <= at && !own &&
				pod.SendOffloaded(pod.IfName, frame, lab.Offload{SumStart: start, SumOffset: at - start}) == nil {
				sent++
			}
		}
	}
	return sent
}

// What a pod may leave to others: its packet's own checksum, and whatever stands behind the header.
func TestOffloadsOfPodsAreCarriedOut(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families})
	pod, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
	if err := l.Nodes[0].SetOffloads(lab.Uplink, false); err != nil {
		t.Fatal(err)
	}
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		outside := serveOver(t, l.Outside, family)
		for _, to := range []*lab.Namespace{near.Namespace, far.Namespace, l.Outside} {
			assertDatagramsReturn(t, route{"", pod.Namespace, to}, family, segmented)
		}
		capture, err := l.Outside.Capture(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		payload, transport := append([]byte(forgedMarker), make([]byte, 64)...), frames[family].transport
		whole := frameOf(t, pod, outside.Addr(), &layers.UDP{SrcPort: inRange, DstPort: layers.UDPPort(outside.Port())}, payload)
		partial := bytes.Clone(whole)
		partialSum(partial, family)
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
				if ip, ok := ipHeaderOf(packet.NetworkLayer()); ok && ip.source == l.Nodes[0].AddrOf(family) && bytes.Contains(packet.Data(), []byte(forgedMarker)) {
					n++
				}
			}
			return n
		}
		eventually(t, answerLimit, "datagrams of a packet socket arrive", func() bool { return arrived() == 3 })
		capture.Close()
	})
}

// partialSum leaves the sum of the pseudo header where a datagram's checksum belongs, as senders do.
func partialSum(frame []byte, family wire.Family) {
	f := frames[family]
	pseudo := append([]byte{0, unix.IPPROTO_UDP}, frame[f.source:f.transport]...)
	pseudo = append(pseudo, frame[f.transport+4:f.transport+6]...)
	binary.BigEndian.PutUint16(frame[f.transport+udpSum:], onesSum(pseudo))
}
