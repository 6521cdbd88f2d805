package prog

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// offloading has a socket take a struct virtio_net_hdr before each frame.
func offloading(socket int) error {
	return unix.SetsockoptInt(socket, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)
}

// pending is a frame whose sender leaves a checksum to the kernel: of what begins at start, to be written at that place.
func pending(frame []byte, start, at int) []byte {
	header := []byte{1, 0} // needs a checksum, and no segments
	for _, v := range []int{0, 0, start, at - start} {
		header = binary.NativeEndian.AppendUint16(header, uint16(v))
	}
	return append(header, frame...)
}

// leastStart is where a sum may begin at the earliest: the kernel refuses one before.
const leastStart = 20

// A pod may leave the kernel the checksum of its own packet, or one in the payload. Written anywhere else, it would change an
// address or a port that has been checked.
func TestPendingChecksums(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		l := b.pods[podA]
		send := b.onWire(wire.FromPod, l, "ecprpod0-p", offloading)
		l4 := ethernet + f.header()
		behind := udp(podA, 5000, remote, 53)
		behind.chain = each(f, nil, []extension{padded(toDest)})
		for name, c := range map[string]struct {
			p          packet
			start, end int   // where the places begin and end that are tried, from the IP header's end on
			right      []int // those where a checksum may be written
		}{
			"UDP":             {udp(podA, 5000, remote, 53), 0, 8, []int{6}},
			"UDP payload":     {udp(podA, 5000, remote, 53), 8, 16, []int{8, 10, 12, 14}},
			"TCP":             {tcp(podA, 5000, remote, 80, ack), 0, 20, []int{16}},
			"ping":            {ping(podA, 7, remote), 0, 12, nil},
			"fragment":        {udp(podA, 5000, remote, 53).with(func(p *packet) { p.fragment = moreFragments }), 0, 16, nil},
			"behind a header": {behind, each(f, 0, 8), each(f, 8, 16), []int{each(f, 6, 14)}},
		} {
			c.p.macTo, c.p.macFrom = l.mac, l.peer
			frame := c.p.bytes(f)
			for at := l4 + c.start; at < l4+c.end; at += 2 {
				want := "drop BAD_OFFLOAD"
				if slices.Contains(c.right, at-l4) {
					want = "forwarded"
				}
				if got := send(pending(frame, l4+c.start, at)); got != want {
					t.Errorf("%s: written at %d: outcome %q, want %q", name, at, got, want)
				}
			}
			for at := leastStart; at < l4; at += 2 { // the IP header, its addresses
				if got := send(pending(frame, leastStart, at)); got != "drop BAD_OFFLOAD" {
					t.Errorf("%s: written at %d: outcome %q", name, at, got)
				}
			}
		}
	})
}

// vnetHeader is the length of a struct virtio_net_hdr; it is zero before a frame of which nothing is left to do.
const vnetHeader = 10

// completed is a frame that a socket has got, with the checksum that its header says is still to be written.
func completed(got []byte) []byte {
	frame := got[vnetHeader:]
	if got[0]&1 != 0 {
		start := binary.NativeEndian.Uint16(got[6:])
		at := start + binary.NativeEndian.Uint16(got[8:])
		binary.BigEndian.PutUint16(frame[at:], ^fold(sum(0, frame[start:])))
	}
	return frame
}

// A tunnel of the pod's own leaves the checksum inside to the kernel, but has that of its datagram right already (local
// checksum offload): masqueraded, both are right once the one inside is written.
func TestMasqueradedWithPendingChecksumInside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		l := b.pods[podA]
		b.attach(wire.FromPod, l.index)
		pod, far := b.linkTo("ecprpod0-p"), b.linkTo("ecprup-p")
		must(t, offloading(pod.socket))
		must(t, offloading(far.socket))
		inside := []byte("0123456789 of an odd length")
		inside[6], inside[7] = 0, 0
		binary.BigEndian.PutUint16(inside[6:], ^fold(sum(0, inside)))
		p := udp(podA, 5000, world, 4790).with(func(p *packet) { p.payload, p.macTo, p.macFrom = inside, l.mac, l.peer })
		sent, start := p.bytes(f), ethernet+f.header()+8
		sent[start+6], sent[start+7] = 0, 0
		var frame []byte
		if !far.waits(func(got []byte) bool {
			frame = completed(got)
			v, err := read(frame)
			return err == nil && v.src == nodeIP && v.dst == world && bytes.Equal(v.l4[8:], inside)
		}, func() { pod.send(pending(sent, start, start+6)) }) {
			t.Fatal("no datagram left as it was sent")
		}
		must(t, sumsValid(frame))
	})
}

// What the kernel has still to do for the packet, its checksum or its segments, nobody does for the answer, and the packet is
// quoted as it was sent.
func TestTooBigOnTheWire(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.attach(wire.FromPod, b.pods[podA].index)
		pod, l := b.linkTo("ecprpod0-p"), b.pods[podA]
		must(t, offloading(pod.socket))
		l4 := ethernet + f.header()
		inner := l4 + 8 + 8 + ethernet + f.header() // of a tunnel of the pod's own
		for name, c := range map[string]struct {
			p         packet
			start, at int
			segment   int
		}{
			"UDP":                 {udp(podA, 5000, beyond, 53), l4, l4 + 6, 0},
			"TCP":                 {tcp(podA, 5000, beyond, 80, ack), l4, l4 + 16, 0},
			"TCP segments":        {tcp(podA, 5001, beyond, 80, ack), l4, l4 + 16, mtu - f.header() - 20},
			"tunnel in a pod":     {udp(podA, 5000, beyond, 4789), inner, inner + 16, 0},
			"tunnel in a tunnel":  {udp(podA, 5000, beyond, 4790), l4 + 140, l4 + 156, 0},
			"far into the packet": {udp(podA, 5000, beyond, 5353), l4 + 700, l4 + 716, 0},
		} {
			c.p.macTo, c.p.macFrom, c.p.payload = l.mac, l.peer, make([]byte, mtu-f.header()-20)
			if c.segment > 0 {
				c.p.payload = make([]byte, 9000)
			}
			frame := f.whole(c.p).bytes(f)
			sent := pending(frame, c.start, c.at)
			if c.segment > 0 {
				sent[1] = each[byte](f, 1, 4) // VIRTIO_NET_HDR_GSO_TCPV4, TCPV6
				binary.NativeEndian.PutUint16(sent[2:], uint16(l4+20))
				binary.NativeEndian.PutUint16(sent[4:], uint16(c.segment))
			}
			want := append(make([]byte, vnetHeader), b.tooBigFor(podA, frame, tunnelMTU)...)
			if !pod.waits(func(got []byte) bool { return bytes.Equal(got, want) }, func() { pod.send(sent) }) {
				t.Errorf("%s: not told", name)
			}
		}
	})
}
