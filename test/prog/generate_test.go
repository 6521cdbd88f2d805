package prog

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// generator makes frames that a program may meet: good ones, odd ones, broken ones, and answers to what it saw before.
type generator struct {
	*rand.Rand
	templates [][]byte
	addresses [wire.Families][][]byte
	recent    [256][]byte // frames that a program has put out
	seen      int
}

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0))}
	for f := range wire.Families {
		for _, a := range []string{
			podA, podB, podC, noPod, remote, lost, mute, nodeIP, nodeOtherIP, node2IP, gatewayIP, silentIP, node5IP, beyond, tunnelIP,
			world, world2, bare, foreign, native, nowhere, stated, "255.255.255.255", "127.0.0.1", "0.0.0.0", gateway,
		} {
			g.addresses[f] = append(g.addresses[f], family{f}.ip(a).AsSlice())
		}
		g.plain(family{f})
		g.odd(family{f})
	}
	mac := []byte{2, 0, 0, 0, 0, 3}
	g.templates = append(g.templates, arp(1, mac, podA, gateway), arp(2, mac, podA, gateway))
	g.ofTheLink()
	return g
}

// plain makes the templates that a family shares with the other: packets whole, in fragments, with options, and errors
// about them.
func (g *generator) plain(f family) {
	payload := make([]byte, 64)
	plain := []packet{
		tcp(podA, 50000, world, 80, syn), tcp(podA, 50000, world, 80, ack), udp(podA, 50000, world, 53),
		ping(podA, 50000, world), ping(world, 50000, nodeIP).replied(), udp(world, 53, nodeIP, 50000),
		tcp(world, 80, nodeIP, 50000, syn|ack), {proto: 47, src: podA, dst: world, payload: payload},
		{proto: 132, src: world, dst: podA, payload: payload},
	}
	for _, p := range plain {
		p.payload = payload
		frame := p.bytes(f)
		p.fragment = moreFragments
		first := p.bytes(f)
		p.fragment = 8
		g.templates = append(g.templates, frame, first, p.bytes(f))
		p.fragment, p.options = 0, true
		g.templates = append(g.templates, p.bytes(f))
		for _, kind := range icmpErrors {
			e := icmpError(p.dst, p.src, kind[0], kind[1], frame, 8+g.IntN(80))
			g.templates = append(g.templates, e.bytes(f))
		}
	}
}

// odd makes those about sizes: what just fits a path and what does not, and pieces that overlap, are tiny, or lie beyond the
// largest datagram.
func (g *generator) odd(f family) {
	for i, size := range []int{tunnelMTU, tunnelMTU + 1, mtu, mtu + 1, mtu + 2} {
		for _, p := range []packet{udp(podA, 50000, world, 53), {proto: wire.Protocol([]int{4, 41, 50, 51, 253}[i]), src: podA, dst: world}} {
			p.payload = make([]byte, size-f.header()-8)
			p.raw = p.proto != wire.UDP
			g.templates = append(g.templates, p.bytes(f), f.whole(p).bytes(f))
		}
	}
	for _, field := range []uint16{moreFragments, moreFragments | 1, 1, moreFragments | 0x1fff, 0x1fff} {
		for _, size := range []int{0, 7, 8} {
			p := packet{proto: wire.UDP, src: podA, dst: world, raw: true, fragment: field, payload: make([]byte, size)}
			g.templates = append(g.templates, p.bytes(f))
		}
	}
}

// ofTheLink makes the templates that IPv6 alone has: chains of extension headers, and what never leaves a link.
func (g *generator) ofTheLink() {
	long := udp(podA, 50000, world, 53)
	for range 9 {
		long.chain = append(long.chain, padded(toDest))
		g.templates = append(g.templates, long.bytes(inIPv6))
	}
	long.chain = []extension{padded(hopByHop), padded(routing), padded(mobility)}
	g.templates = append(g.templates, long.bytes(inIPv6), udp(podA, 50000, world, 53).with(func(p *packet) { p.atomic = true }).bytes(inIPv6))
	for icmpType := range uint8(30) { // multicast listeners, routers, neighbours, redirects, and what is near them
		g.templates = append(g.templates, linkMessage("fe80::1234", "ff02::1", 128+icmpType, make([]byte, 28)).bytes(inIPv6))
	}
	g.templates = append(g.templates, solicitation(podA, "fe80::1").bytes(inIPv6), solicitation("fe80::1234", "fe80::1").bytes(inIPv6))
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
		g.address(f, sourceAt)
		g.address(f, destinationAt)
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

// familyOf says of which family a frame is that has at least a header's length.
func familyOf(frame []byte) (f family, ok bool) {
	switch {
	case len(frame) >= 34 && frame[12] == 8 && frame[13] == 0:
		return inIPv4, true
	case len(frame) >= 54 && frame[12] == 0x86 && frame[13] == 0xdd:
		return inIPv6, true
	}
	return inIPv4, false
}

// at is where a field of the header is in a frame, by family.
type at [wire.Families]int

var (
	sourceAt      = at{26, 22}
	destinationAt = at{30, 38}
	ttlAt         = at{22, 21}
	protocolAt    = at{23, 20}
	lengthAt      = at{16, 18}
)

// of is the field from there on.
func (at at) of(frame []byte) []byte {
	f, _ := familyOf(frame)
	return frame[at[f.Family]:]
}

// l4Of is where the transport header begins, or would if the header before it were sound.
func l4Of(frame []byte) int {
	f, _ := familyOf(frame)
	if v, err := read(frame); err == nil {
		return ethernet + v.header
	}
	return ethernet + f.header()
}

// turn makes of a frame that went out the answer to it: the packet of the other end, or an error about it.
func (g *generator) turn(f []byte) {
	family, ok := familyOf(f)
	if !ok {
		return
	}
	l4, size := l4Of(f), family.ip(nodeIP).BitLen()/8
	source := slices.Clone(sourceAt.of(f)[:size])
	copy(sourceAt.of(f), destinationAt.of(f)[:size])
	copy(destinationAt.of(f), source)
	if len(f) < l4+8 {
		return
	}
	switch wire.Protocol(protocolAt.of(f)[0]) {
	case family.proto(wire.ICMP):
		f[l4] ^= each[byte](family, 8, 1) // a request becomes a reply
	default:
		sport := binary.BigEndian.Uint16(f[l4:])
		copy(f[l4:], f[l4+2:l4+4])
		binary.BigEndian.PutUint16(f[l4+2:], sport)
	}
}

// address puts one of the story's addresses into the frame.
func (g *generator) address(f []byte, at at) {
	if family, ok := familyOf(f); ok && g.IntN(4) != 0 {
		addresses := g.addresses[family.Family]
		copy(at.of(f), addresses[g.IntN(len(addresses))])
	}
}

// ports draws from few, so that flows meet.
func (g *generator) ports(f []byte) {
	family, ok := familyOf(f)
	if !ok || protocolAt.of(f)[0] == byte(family.proto(wire.ICMP)) {
		return
	}
	l4 := l4Of(f)
	if len(f) < l4+8 {
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
	family, ok := familyOf(f)
	if !ok {
		f[g.IntN(len(f))] ^= 1 << g.IntN(8)
		return f
	}
	l4 := min(l4Of(f), len(f)-1)
	switch g.IntN(12) {
	case 0: // TTL
		ttlAt.of(f)[0] = byte(g.IntN(3))
	case 1: // protocol, or the next header
		protocolAt.of(f)[0] = []byte{0, 1, 6, 17, 43, 44, 47, 50, 51, 58, 60, 132, byte(g.IntN(256))}[g.IntN(13)]
	case 2: // fragment field, near enough
		binary.BigEndian.PutUint16(f[min(each(family, 20, 56), len(f)-2):], uint16(g.IntN(1<<16)))
	case 3: // total length
		binary.BigEndian.PutUint16(lengthAt.of(f), uint16(g.IntN(len(f)+8)))
	case 4: // header length, version
		f[14] = byte(g.IntN(256))
	case 5: // the frame's length
		least := ethernet + family.header()
		return f[:least+g.IntN(len(f)-least+1)]
	case 6: // what follows the packet
		return append(f, make([]byte, g.IntN(64))...)
	case 7: // TCP flags, or near them
		f[min(l4+13, len(f)-1)] = byte(g.IntN(64))
	case 8: // UDP checksum, or near it
		copy(f[min(l4+6, len(f)-2):], []byte{0, 0})
	case 9: // identification, near enough
		binary.BigEndian.PutUint16(f[min(each(family, 18, 60), len(f)-2):], uint16(g.IntN(4)))
	default: // anything in the headers
		f[14+g.IntN(min(len(f)-14, 80))] ^= 1 << g.IntN(8)
	}
	return f
}

// sum makes the header's checksum right in most frames: without it no program reads on.
func (g *generator) sum(f []byte) {
	header := int(f[14]&15) * 4
	if f[12] != 8 || f[13] != 0 || header < 20 || len(f) < 14+header || g.IntN(8) == 0 {
		return
	}
	setIPSum(f)
}

// whole pads the frame to what BPF_PROG_TEST_RUN takes.
func (g *generator) whole(f []byte) []byte {
	least := 15
	switch binary.BigEndian.Uint16(f[12:]) {
	case 0x0800:
		least = 34
	case 0x86dd:
		least = 54
	}
	for len(f) < least {
		f = append(f, 0)
	}
	return f
}
