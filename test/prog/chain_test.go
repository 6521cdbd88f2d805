package prog

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// chained is the packet with so many extension headers.
func chained(p packet, headers int) packet {
	p.chain = slices.Repeat([]extension{padded(toDest)}, headers)
	return p
}

// rightSums asserts that the transport checksum is right, through whatever chain.
func (r result) rightSums() result {
	r.b.Helper()
	if got := r.view().transportResidue(); got != uint16(0) {
		r.b.Errorf("%s: transport checksum wrong by %v", describe(r.in), got)
	}
	return r
}

// Behind up to eight extension headers a flow is found in both directions, and the headers stay as they are.
func TestExtensionHeaders(t *testing.T) {
	for name, p := range map[string]packet{
		"TCP": tcp(podA, 1000, world, 80, syn), "UDP": udp(podA, 1000, world, 53), "ping": ping(podA, 1000, world),
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, inIPv6)
			for headers := range 9 {
				long := chained(p, headers)
				out := b.fromPod(long).is("forwarded").rightSums()
				if v := out.view(); v.src != nodeIP || v.extensions != headers || !bytes.Equal(out.frame[54:54+8*headers], out.in[54:54+8*headers]) {
					t.Errorf("%d headers: left as %v, with %d: % x", headers, v, v.extensions, out.frame)
				}
				back := b.fromUplink(chained(answer(out, p), headers)).is("delivered").rightSums()
				back.flow(reversed(describeView(p)))
				b.fromPod(chained(p.with(func(p *packet) { p.dst = podB }), headers)).is("delivered").rightSums()
				b.fromTunnel(chained(udp(beyond, 53, podA, 1000), headers)).is("delivered").rightSums()
				// An error about it, behind as many, quotes as many.
				e := chained(icmpError(world, nodeIP, 11, 0, out.frame, 20), headers)
				if q, err := b.fromUplink(e).is("delivered").rightSums().view().quoted(); err != nil || q.String() != p.flowOf() || q.extensions != headers {
					t.Errorf("%d headers: an error about %v, %v", headers, q, err)
				}
			}
			b.count(1, 0)
		})
	}
}

// A ninth header hides whatever lies behind it: a packet of a pod's, or that arrives, is dropped, the node's own is not judged.
func TestTooManyExtensionHeaders(t *testing.T) {
	b := newBed(t, inIPv6)
	for _, headers := range []int{9, 10, 40} {
		for _, to := range []string{podB, noPod, remote, beyond, node2IP, nodeIP, world, gateway} {
			b.fromPod(chained(udp(podA, 5000, to, 53), headers)).is("drop EXTENSION_HEADERS")
		}
		b.fromUplink(chained(udp(world, 53, podA, 5000), headers)).is("drop EXTENSION_HEADERS")
		b.fromTunnel(chained(udp(beyond, 53, podA, 5000), headers)).is("drop EXTENSION_HEADERS")
		b.toTunnel(chained(udp(podA, 53, beyond, 5000), headers)).is("drop EXTENSION_HEADERS")
		b.toUplink(chained(udp(podA, 5000, world, 53), headers)).is("drop EXTENSION_HEADERS")
		b.fromUplink(chained(udp(world, 53, nodeIP, 5000), headers)).is("drop EXTENSION_HEADERS")
		b.leftToStack("of the node", b.toUplink(chained(udp(nodeIP, 50000, world, 53), headers)))
	}
	// The eighth may be a later fragment's: nothing is read behind that.
	later := chained(udp(podA, 5000, remote, 53), 7).with(func(p *packet) { p.fragment, p.raw, p.payload = 8, true, make([]byte, 64) })
	b.fromPod(later).is("forwarded")
	b.fromPod(chained(later, 8)).is("drop EXTENSION_HEADERS")
	b.empty()
}

// Every kind of extension header is followed. Hop-by-hop options are for routers, so the stack looks at them.
func TestKindsOfExtensionHeaders(t *testing.T) {
	b := newBed(t, inIPv6)
	for _, kind := range []wire.Protocol{routing, toDest, mobility} {
		p := udp(podA, 1000, world, 53).with(func(p *packet) { p.chain = []extension{padded(kind)} })
		out := b.fromPod(p).is("forwarded").rightSums()
		b.fromUplink(answer(out, p)).is("delivered").rightSums()
	}
	large := extension{toDest, make([]byte, 8*100-2)}
	copy(large.body, []byte{1, 200})
	b.fromPod(udp(podA, 1000, world, 53).with(func(p *packet) { p.chain = []extension{large} })).is("forwarded").rightSums()
	for _, to := range []string{podB, remote, beyond, world} {
		b.fromPod(udp(podA, 1000, to, 53).with(func(p *packet) { p.options, p.chain = true, []extension{padded(toDest)} })).is("stack")
	}
	// Nothing follows (59), or what no program reads, such as an authentication header.
	for _, proto := range []wire.Protocol{noNext, 50, 51, foreignICMP} {
		p := packet{proto: proto, src: podA, dst: podB, payload: make([]byte, 24), chain: []extension{padded(toDest)}}
		b.fromPod(p).is("delivered")
		b.turnedAway(p.with(func(p *packet) { p.dst = world }), "drop UNKNOWN_PROTOCOL")
	}
	b.count(1, 0)
}

// A later fragment names the header that its datagram goes on with, and that may be an extension. Only the first tells whose it is.
func TestHeadersBehindFragmentHeader(t *testing.T) {
	b := newBed(t, inIPv6)
	first := func(p packet, id byte) packet {
		p.chain, p.payload = []extension{{fragmentation, []byte{0, 1, 0, 0, 0, id}}, padded(toDest)}, make([]byte, 64)
		return p
	}
	later := func(p packet, id byte) packet {
		p.chain, p.payload = []extension{{fragmentation, []byte{0, 80, 0, 0, 0, id}}}, make([]byte, 64)
		p.proto, p.raw = toDest, true
		return p
	}
	p := udp(podA, 50000, world, 53)
	out := b.fromPod(first(p, 5)).is("forwarded")
	b.fromPod(later(p, 6)).is("drop FRAG_NOT_FOUND")
	if src := b.fromPod(later(p, 5)).is("forwarded").view().src; src != nodeIP {
		t.Errorf("the later fragment left from %s", src)
	}
	back := udp(world, 53, nodeIP, out.view().sport)
	b.fromUplink(first(back, 7)).is("delivered")
	if dst := b.fromUplink(later(back, 7)).is("delivered").view().dst; dst != podA {
		t.Errorf("the answer's later fragment came to %s", dst)
	}
	b.count(1, 0)
}

// Chains that no parser may trust.
func TestBrokenExtensionHeaders(t *testing.T) {
	b := newBed(t, inIPv6)
	p := udp(podA, 5000, world, 53)
	cut := func(chain packet, payload int) packet { // ends so many bytes behind the IPv6 header
		chain.payload, chain.raw = chain.bytes(inIPv6)[ethernet+40:][:payload], true
		chain.proto, chain.chain, chain.options = toDest, nil, false
		return chain
	}
	for name, p := range map[string]packet{
		"hop-by-hop options behind others": p.with(func(p *packet) { p.chain = []extension{padded(toDest), padded(hopByHop)} }),
		"hop-by-hop options twice":         p.with(func(p *packet) { p.options, p.chain = true, []extension{padded(hopByHop)} }),
		"a fragment of a fragment": p.with(func(p *packet) {
			p.chain, p.fragment = []extension{{fragmentation, []byte{0, 1, 0, 0, 0, 1}}}, moreFragments
		}),
		"nothing in spite of a header": cut(chained(p, 1), 0),
		"half a header":                cut(chained(p, 1), 7),
		"half a second header":         cut(chained(p, 2), 12),
		"half a UDP header":            cut(chained(p, 1), 15),
	} {
		want := "drop EXTENSION_HEADERS"
		if strings.HasSuffix(name, "UDP header") {
			want = "drop INVALID"
		}
		if r := b.fromPod(p); r.what != want {
			t.Errorf("%s: outcome %q", name, r.what)
		}
	}
	for length := 3; length < 256; length += 7 { // longer than the packet
		frame := chained(p, 1).bytes(inIPv6)
		frame[ethernet+41] = byte(length)
		b.run(wire.FromPod, b.pods[podA].index, frame, nil).is("drop EXTENSION_HEADERS")
	}
	b.empty()
}

// unreadable are packets whose transport header no program finds, though a kernel may.
func unreadable(p packet) []packet {
	return []packet{
		chained(p, 9),
		p.with(func(p *packet) { p.chain = []extension{padded(toDest), padded(hopByHop)} }),
		p.with(func(p *packet) {
			p.chain, p.fragment = []extension{{fragmentation, []byte{0, 1, 0, 0, 0, 1}}}, moreFragments
		}),
	}
}

// What can't be read gets past no judgement: it does not arrive, nor leave a pod, nor leave for the tunnel port.
func TestUnreadableIsJudged(t *testing.T) {
	b := newBed(t, inIPv6)
	forwarded := map[int]uint32{skbIngressIfindex: uint32(b.foreign.index)}
	for _, from := range []string{world, podB, node2IP, "127.0.0.1"} {
		for _, p := range unreadable(udp(from, 4000, podA, 53)) {
			b.fromUplink(p).is("drop EXTENSION_HEADERS")
		}
	}
	for _, p := range unreadable(udp(podA, 4000, world, 53)) {
		b.fromPod(p).is("drop EXTENSION_HEADERS")
		b.toUplink(p).is("drop EXTENSION_HEADERS")
	}
	b.leadsBy(node2IP+"/32", destinations.Node, b.uplink)
	for _, p := range unreadable(udp(node2IP, 4000, nodeIP, tunnelPort)) {
		b.arrive(b.uplink, p).is("drop EXTENSION_HEADERS")
	}
	for _, p := range unreadable(udp(nodeIP, 4000, node2IP, tunnelPort)) {
		b.leftToStack("the node's own", b.toUplink(p))
		b.run(wire.ToUplink, b.uplink.index, p.bytes(b.family), forwarded).is("drop EXTENSION_HEADERS")
	}
	b.empty()
}

// Headers that no parser may trust.
func TestFromPodMalformedIPv6(t *testing.T) {
	b := newBed(t, inIPv6)
	l := b.pods[podA]
	for name, c := range map[string]struct {
		at   int
		with []byte
		want string
	}{
		"version 4":                 {14, []byte{0x45}, "drop INVALID"},
		"version 7":                 {14, []byte{0x70}, "drop INVALID"},
		"length beyond the frame":   {18, []byte{0, 17 + 8}, "drop INVALID"},
		"length 0":                  {18, []byte{0, 0}, "drop INVALID"},
		"half a UDP header":         {18, []byte{0, 7}, "drop INVALID"},
		"source of IPv4":            {22, inIPv4AsIPv6(podA), "drop INVALID"},
		"destination of IPv4":       {38, inIPv4AsIPv6(world), "drop INVALID"},
		"destination of IPv4 here":  {38, inIPv4AsIPv6(podB), "drop INVALID"},
		"hop limit 0":               {21, []byte{0}, "stack"},
		"traffic class, flow label": {14, []byte{0x6b, 0x8f, 0xff, 0xff}, "forwarded"},
	} {
		frame := udp(podA, 40000, world, 80).bytes(inIPv6)
		copy(frame[c.at:], c.with)
		if r := b.run(wire.FromPod, l.index, frame, nil); r.what != c.want {
			t.Errorf("%s: outcome %q, want %q", name, r.what, c.want)
		}
	}
}

// inIPv4AsIPv6 is an address of IPv4 as the maps have it.
func inIPv4AsIPv6(name string) []byte {
	a := inIPv4.addr(name)
	return a[:]
}

// Traffic class and flow label reach the other end, whatever becomes of the rest.
func TestFlowLabelKept(t *testing.T) {
	b := newBed(t, inIPv6)
	marked := func(p packet) packet {
		return p.with(func(p *packet) { p.tos, p.label = 0xb9, 0xabcde })
	}
	kept := func(r result) result {
		t.Helper()
		if !bytes.Equal(r.frame[14:18], []byte{0x6b, 0x9a, 0xbc, 0xde}) {
			t.Errorf("%s: the first word became % x", describe(r.in), r.frame[14:18])
		}
		return r
	}
	for _, to := range []string{podB, remote, beyond, native, node2IP} {
		kept(b.fromPod(marked(udp(podA, 5000, to, 53))))
	}
	p := marked(udp(podA, 5000, world, 53))
	out := kept(b.fromPod(p).is("forwarded"))
	kept(b.fromUplink(answer(out, p)).is("delivered"))
	kept(b.fromUplink(marked(udp(world, 4000, podA, 53))).is("delivered"))
	kept(b.toUplink(p))
	kept(b.fromTunnel(marked(udp(beyond, 4000, podA, 53))).is("delivered"))
	kept(b.toTunnel(marked(udp(nodeIP, 4000, beyond, 53))).is("stack"))
}

// A packet may say that it is a fragment and be whole (RFC 6946): it is read as any other.
func TestAtomicFragments(t *testing.T) {
	b := newBed(t, inIPv6)
	for _, p := range []packet{tcp(podA, 1000, world, 80, syn), udp(podA, 1000, world, 53), ping(podA, 1000, world)} {
		p.atomic, p.id = true, 7
		out := b.fromPod(p).is("forwarded").rightSums()
		if v := out.view(); v.src != nodeIP || v.sport < 49152 {
			t.Errorf("left as %v", v)
		}
		b.fromUplink(answer(out, p)).is("delivered").rightSums().flow(reversed(describeView(p)))
	}
	b.count(3, 0)
}

// Fragments behind other headers are as those without, and all 32 bits tell one datagram from another.
func TestFragmentsOfIPv6(t *testing.T) {
	b := newBed(t, inIPv6)
	p := chained(udp(podA, 5000, world, 53), 3).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 0x10007 })
	v := passed(b, p, b.fromPod, "forwarded")
	passed(b, p.replied().with(func(r *packet) { r.dst, r.dport = v.src, v.sport }), b.fromUplink, "delivered")
	later := fragmented(b, p)[1]
	b.fromPod(later).is("forwarded")
	for _, id := range []uint32{7, 0x20007, 0x80010007} {
		b.fromPod(later.with(func(p *packet) { p.id = id })).is("drop FRAG_NOT_FOUND")
	}
	b.count(1, 0)
}

// A router that can't pass a packet on says how large it may be, in 32 bits; the pod reads the same of its own packet, and
// a pod's own report reaches the world.
func TestPacketTooBig(t *testing.T) {
	b := newBed(t, inIPv6)
	p := tcp(podA, 1000, world, 80, syn)
	out := b.fromPod(p).is("forwarded")
	for _, size := range []uint16{1280, 1400, 0xffff} {
		e := icmpError("192.0.2.1", nodeIP, 3, 4, out.frame, 1000)
		e.rest = size
		r := b.fromUplink(e).is("delivered").valid()
		checkError(t, fmt.Sprintf("%d bytes", size), r, e, "192.0.2.1", podA, p.flowOf())
	}
	in := b.fromUplink(answer(out, p)).is("delivered")
	e := icmpError(podA, world, 3, 4, in.frame, 1000)
	e.rest = 1300
	checkError(t, "the pod's", b.fromPod(e).is("forwarded").valid(), e, nodeIP, world, answer(out, p).flowOf())
}
