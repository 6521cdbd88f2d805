package prog

import (
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
