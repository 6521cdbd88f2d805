package prog

import (
	"bytes"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// way is one of the ways through the node, with the outcome of a packet that nothing is odd about.
type way struct {
	name        string
	by          func(*bed, packet) result
	src, dst    string
	want        string
	masqueraded bool
	forwarded   bool // the stack has routed it before
}

// ways are all of them. What a pod sends to the world is not from the pod that the world sends to.
var ways = []way{
	{name: "to a pod here", by: (*bed).fromPod, src: podA, dst: podB, want: "delivered"},
	{name: "to a pod outside the podCIDR", by: (*bed).fromPod, src: podA, dst: podC, want: "delivered"},
	{name: "to a pod of another node", by: (*bed).fromPod, src: podA, dst: remote, want: "forwarded"},
	{name: "to a pod beyond the tunnel", by: (*bed).fromPod, src: podA, dst: beyond, want: "forwarded"},
	{name: "to a node", by: (*bed).fromPod, src: podA, dst: node2IP, want: "forwarded"},
	{name: "to a node beyond the tunnel", by: (*bed).fromPod, src: podA, dst: node5IP, want: "forwarded"},
	{name: "to what is never masqueraded", by: (*bed).fromPod, src: podA, dst: native, want: "forwarded"},
	{name: "to this node", by: (*bed).fromPod, src: podA, dst: nodeIP, want: "stack"},
	{name: "to the world", by: (*bed).fromPod, src: podB, dst: world, want: "forwarded", masqueraded: true},
	{name: "from a pod of another node", by: (*bed).fromUplink, src: remote, dst: podA, want: "delivered"},
	{name: "from a node", by: (*bed).fromUplink, src: node2IP, dst: podA, want: "delivered"},
	{name: "from the world", by: (*bed).fromUplink, src: world, dst: podA, want: "delivered"},
	{name: "from beyond the tunnel", by: (*bed).fromTunnel, src: beyond, dst: podA, want: "delivered"},
	{name: "from beyond the tunnel to this node", by: (*bed).fromTunnel, src: beyond, dst: nodeIP, want: "stack"},
	{name: "by the stack to another node", by: (*bed).toUplink, src: podA, dst: remote, want: "stack", forwarded: true},
	{name: "by the stack to the world", by: (*bed).toUplink, src: podC, dst: world, want: "stack", masqueraded: true, forwarded: true},
	{name: "by the stack into the tunnel", by: (*bed).toUplink, src: podA, dst: beyond, want: "forwarded", forwarded: true},
	{name: "by the stack through the tunnel", by: (*bed).toTunnel, src: podA, dst: beyond, want: "stack", forwarded: true},
}

// turned is the packet from one end of the way to the other.
func (w way) turned(p packet) packet {
	p.src, p.dst = w.src, w.dst
	return p
}

// carried asserts that a packet was taken as it is: but for a hop, it left as it came.
func (r result) carried() {
	r.b.Helper()
	want := bytes.Clone(r.in)
	if r.what != "stack" {
		copy(want, r.frame[:12])
		ttlAt.of(want)[0] = ttlAt.of(r.frame)[0]
		setIPSum(want)
	}
	if !bytes.Equal(r.frame, want) {
		r.b.Errorf("%s:\n got % x\nwant % x", describe(r.in), r.frame, want)
	}
}

// What has neither ports nor an identifier is carried on every way, but is not masqueraded: to the world it goes if the
// world has opened its flow, and then as it is.
func TestOtherProtocolsOnEveryWay(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, proto := range []wire.Protocol{4, 41, 47, 50, 51, 132, 253} {
			p := packet{proto: proto, payload: []byte("neither ports nor a checksum that anybody knows")}
			for _, w := range ways {
				b.answers = w.masqueraded
				r := w.by(b, w.turned(p))
				want := w.want
				if w.masqueraded {
					want = "drop UNKNOWN_PROTOCOL"
				}
				if r.what != want {
					t.Errorf("protocol %d %s: outcome %q, want %q", proto, w.name, r.what, want)
				} else if !w.masqueraded {
					r.carried()
				}
			}
			reply := p.with(func(p *packet) { p.src, p.dst = podA, world })
			b.fromPod(reply).is("forwarded").carried()
			b.toUplink(reply).is("stack").carried()
		}
		b.count(0, 7)
	})
}

// Routers have to look at options, so the stack gets the packet as it is, wherever it goes; masqueraded all the same.
func TestOptionsOnEveryWay(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, w := range ways {
			p := w.turned(udp("", 5000, "", 53)).with(func(p *packet) { p.options = true })
			want := "stack"
			if w.forwarded {
				want = w.want
			}
			r := w.by(b, p).is(want)
			if !w.forwarded || !w.masqueraded {
				r.carried()
			} else if r.valid().view().src != nodeIP {
				t.Errorf("%s: left from %s", w.name, r.view().src)
			}
		}
		out := udp(podB, 5000, world, 53)
		back := answer(b.fromPod(out).is("forwarded"), out).with(func(p *packet) { p.options = true })
		b.fromUplink(back).is("stack").flow("udp " + world + ":53 > " + podB + ":5000").valid()
	})
}

// A packet may say in an option how long it is, and not in its header (RFC 2675). Nobody sends one that large, so it is refused;
// what says both is the stack's, and so is what a pod sends in segments, unless it is really longer than the header can say.
func TestJumboOptionOnEveryWay(t *testing.T) {
	b := newBed(t, inIPv6)
	for _, w := range ways {
		p := w.turned(udp("", 5000, "", 53)).with(func(p *packet) { p.chain = []extension{jumbo(65536)} })
		want := "stack"
		if w.forwarded {
			want = w.want
		}
		w.by(b, p).is(want)
		w.by(b, p.with(func(p *packet) { p.noLength = true })).is("drop EXTENSION_HEADERS")
	}
	p := tcp(podA, 5000, remote, 80, ack).with(func(p *packet) { p.chain, p.noLength, p.payload = []extension{jumbo(65536)}, true, make([]byte, 3000) })
	b.run(wire.FromPod, b.pods[podA].index, p.bytes(inIPv6), map[int]uint32{skbGSOSize: 1400}).is("stack").carried()
}

// Fragments take every way as whole packets do, in whatever order they come. Where the ports of the first are needed, those
// before it are lost, and counted.
func TestFragmentsOnEveryWay(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			with   option
			before string // the outcome of what comes before the first, to the world
		}{
			"masqueraded": {func(*config.NodeConfig) {}, "drop FRAG_NOT_FOUND"},
			"as it is":    {withoutMasquerade, ""},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, c.with)
				id := uint32(0)
				for _, w := range ways {
					for kind, p := range map[string]packet{
						"TCP": tcp("", 5000, "", 80, syn), "UDP": udp("", 5000, "", 53), "ping": ping("", 5000, ""),
					} {
						id++ // of IPv6 the protocols share them
						p.id, p.payload = id, bytes.Repeat([]byte("odd"), 33)
						before := w.want
						if w.masqueraded && c.before != "" {
							before = c.before
						}
						w.inFragments(b, kind, cut(b, w.turned(p), 32), before)
					}
				}
			})
		}
	})
}

// inFragments sends the later fragments, the first, and the later ones again. before is the outcome of those before the first.
func (w way) inFragments(b *bed, kind string, parts []packet, before string) {
	b.Helper()
	for _, p := range parts[1:] {
		if r := w.by(b, p); r.what != before {
			b.Errorf("%s %s: a later fragment before the first: outcome %q, want %q", kind, w.name, r.what, before)
		}
	}
	var out []result
	for _, p := range parts {
		r := w.by(b, p).is(w.want)
		out = append(out, r)
		if src := r.view().src; src != out[0].view().src {
			b.Errorf("%s %s: a fragment left from %s, the first from %s", kind, w.name, src, out[0].view().src)
		}
	}
	must(b, sumsValid(joined(b, out)))
	masqueraded := w.masqueraded && before != w.want
	if src := out[0].view().src; masqueraded != (src == nodeIP) || !masqueraded && src != w.src {
		b.Errorf("%s %s: left from %s", kind, w.name, src)
	}
}
