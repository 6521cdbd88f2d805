package prog

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// generator makes frames that a program may meet: good ones, odd ones, broken ones, and answers to what it saw before.
type generator struct {
	*rand.Rand
	templates [][]byte
	addresses [][]byte
	recent    [256][]byte // frames that a program has put out
	seen      int
}

func newGenerator(tb testing.TB, seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0))}
	for _, a := range []string{
		podA, podB, podC, noPod, remote, lost, mute, nodeIP, nodeOtherIP, node2IP, gatewayIP, silentIP, node5IP, beyond, tunnelIP,
		world, world2, bare, foreign, native, nowhere, "198.51.100.200", "255.255.255.255", "127.0.0.1", "0.0.0.0", "169.254.1.1",
	} {
		v := netip.MustParseAddr(a).As4()
		g.addresses = append(g.addresses, v[:])
	}
	payload := make([]byte, 64)
	plain := []packet{
		tcp(podA, 50000, world, 80, syn), tcp(podA, 50000, world, 80, ack), udp(podA, 50000, world, 53),
		ping(podA, 50000, world), ping(world, 50000, nodeIP).replied(), udp(world, 53, nodeIP, 50000),
		tcp(world, 80, nodeIP, 50000, syn|ack), {proto: 47, src: podA, dst: world, payload: payload},
		{proto: 132, src: world, dst: podA, payload: payload},
	}
	for _, p := range plain {
		p.payload = payload
		frame := p.bytes(tb)
		p.fragment = moreFragments
		first := p.bytes(tb)
		p.fragment = 8
		g.templates = append(g.templates, frame, first, p.bytes(tb))
		p.fragment, p.options = 0, true
		g.templates = append(g.templates, p.bytes(tb))
		for _, kind := range icmpErrors {
			e := icmpError(p.dst, p.src, kind[0], kind[1], frame, 8+g.IntN(80))
			g.templates = append(g.templates, e.bytes(tb))
		}
	}
	mac := []byte{2, 0, 0, 0, 0, 3}
	g.templates = append(g.templates, arp(tb, 1, mac, podA, "169.254.1.1"), arp(tb, 2, mac, podA, "169.254.1.1"),
		append(append(make([]byte, 12), 0x86, 0xdd), make([]byte, 60)...))
	return g
}

// saw remembers a frame to make answers to.
func (g *generator) saw(frame []byte) {
	g.recent[g.seen%len(g.recent)] = append(g.recent[g.seen%len(g.recent)][:0], frame...)
	g.seen++
}

// frame makes the next one for a program on an interface that has this MAC.
func (g *generator) frame(buffer []byte, mac []byte) []byte {
	f := append(buffer[:0], g.templates[g.IntN(len(g.templates))]...)
	if g.seen > len(g.recent) && g.IntN(2) == 0 {
		f = append(f[:0], g.recent[g.IntN(len(g.recent))]...)
		g.turn(f)
	} else {
		g.address(f, 26)
		g.address(f, 30)
		g.ports(f)
	}
	if g.IntN(8) != 0 {
		copy(f, mac)
	}
	for g.IntN(3) == 0 {
		f = g.mutate(f)
	}
	return g.whole(f)
}

func isIPv4(f []byte) bool { return len(f) >= 34 && f[12] == 8 && f[13] == 0 }

// turn makes of a frame that went out the answer to it: the packet of the other end, or an error about it.
func (g *generator) turn(f []byte) {
	if !isIPv4(f) {
		return
	}
	var a [4]byte
	copy(a[:], f[26:30])
	copy(f[26:30], f[30:34])
	copy(f[30:34], a[:])
	l4 := 14 + int(f[14]&15)*4
	if len(f) < l4+8 {
		return
	}
	switch wire.Protocol(f[23]) {
	case wire.ICMP:
		f[l4] ^= 8 // a request becomes a reply
	default:
		sport := binary.BigEndian.Uint16(f[l4:])
		copy(f[l4:], f[l4+2:l4+4])
		binary.BigEndian.PutUint16(f[l4+2:], sport)
	}
}

// address puts one of the story's addresses into the frame.
func (g *generator) address(f []byte, at int) {
	if isIPv4(f) && g.IntN(4) != 0 {
		copy(f[at:], g.addresses[g.IntN(len(g.addresses))])
	}
}

// ports draws from few, so that flows meet.
func (g *generator) ports(f []byte) {
	l4 := 14 + int(f[14]&15)*4
	if !isIPv4(f) || len(f) < l4+8 || f[23] == byte(wire.ICMP) {
		return
	}
	for _, at := range []int{l4, l4 + 2} {
		switch g.IntN(4) {
		case 0:
			binary.BigEndian.PutUint16(f[at:], uint16(50000+g.IntN(200)))
		case 1:
			binary.BigEndian.PutUint16(f[at:], uint16(g.IntN(1<<16)))
		}
	}
}

// mutate changes the frame a little: a field, a bit, its length.
func (g *generator) mutate(f []byte) []byte {
	if !isIPv4(f) {
		f[g.IntN(len(f))] ^= 1 << g.IntN(8)
		return f
	}
	l4 := min(14+int(f[14]&15)*4, len(f)-1)
	switch g.IntN(12) {
	case 0: // TTL
		f[22] = byte(g.IntN(3))
	case 1: // protocol
		f[23] = []byte{1, 6, 17, 47, 50, 132, byte(g.IntN(256))}[g.IntN(7)]
	case 2: // fragment field
		binary.BigEndian.PutUint16(f[20:], uint16(g.IntN(1<<16)))
	case 3: // total length
		binary.BigEndian.PutUint16(f[16:], uint16(g.IntN(len(f)+8)))
	case 4: // header length, version
		f[14] = byte(g.IntN(256))
	case 5: // the frame's length
		return f[:34+g.IntN(len(f)-33)]
	case 6: // what follows the packet
		return append(f, make([]byte, g.IntN(64))...)
	case 7: // TCP flags, or near them
		f[min(l4+13, len(f)-1)] = byte(g.IntN(64))
	case 8: // UDP checksum, or near it
		copy(f[min(l4+6, len(f)-2):], []byte{0, 0})
	case 9: // identification
		binary.BigEndian.PutUint16(f[18:], uint16(g.IntN(4)))
	default: // anything in the headers
		f[14+g.IntN(min(len(f)-14, 80))] ^= 1 << g.IntN(8)
	}
	return f
}

// sum makes the header's checksum right in most frames: without it no program reads on.
func (g *generator) sum(f []byte) {
	header := int(f[14]&15) * 4
	if !isIPv4(f) || header < 20 || len(f) < 14+header || g.IntN(8) == 0 {
		return
	}
	setIPSum(f)
}

// whole pads the frame to what BPF_PROG_TEST_RUN takes.
func (g *generator) whole(f []byte) []byte {
	least := 15
	if len(f) >= 14 && f[12] == 8 && f[13] == 0 {
		least = 34
	}
	if len(f) >= 14 && f[12] == 0x86 && f[13] == 0xdd {
		least = 54
	}
	for len(f) < least {
		f = append(f, 0)
	}
	return f
}
