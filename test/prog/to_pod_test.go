package prog

import (
	"bytes"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The Service of these stories, and the port of it.
const (
	frontend     = "10.96.7.1"
	frontendPort = 443
)

// newServingBed is a bed whose programs serve Services, with a flow of podA from port 40000 to the frontend, for each
// protocol, whose backend is the node itself, on port 6443.
func newServingBed(t *testing.T, f family) *bed {
	t.Helper()
	b := newBed(t, f, func(c *config.NodeConfig) { c.Services = 1 })
	for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
		b.openToService(proto)
	}
	return b
}

func (b *bed) openToService(proto wire.Protocol) {
	b.Helper()
	index := uint32(b.pods[podA].index)
	half := snat.Value{
		ToAddress: b.addr(podA), ToPort: wire.PortFrom(40000), Flags: flow.Service | flow.OnNode, Ifindex: index, LastSeen: now(b),
		State: flow.SYN | flow.ACK, Set: 1, Backend: 1,
	}
	forward, reverse := half, half
	forward.FarAddress, forward.FarPort = b.addr(nodeIP), wire.PortFrom(6443)
	reverse.FarAddress, reverse.FarPort = b.addr(frontend), wire.PortFrom(frontendPort)
	must(b, b.snat.Put(b.tuple(proto, podA, 40000, frontend, frontendPort), forward))
	must(b, b.reverse.Put(b.tuple(proto, podA, 40000, nodeIP, 6443), reverse))
	dev, err := b.devices.Get(devices.Key{Ifindex: index})
	must(b, err)
	dev.Flags |= devices.Client
	must(b, b.devices.Put(devices.Key{Ifindex: index}, dev))
}

// toPod has the stack send a packet to the pod at that end of a link.
func (b *bed) toPod(l veth, p packet) result {
	b.Helper()
	p.macTo, p.macFrom = l.peer, l.mac
	return b.run(wire.ToPod, l.index, p.bytes(b.family), nil)
}

// fromNode are replies of the node's own sockets to podA.
func fromNode() map[string]packet {
	return map[string]packet{
		"TCP":       tcp(nodeIP, 6443, podA, 40000, ack),
		"TCP, data": tcp(nodeIP, 6443, podA, 40000, ack).with(func(p *packet) { p.payload = []byte("odd") }),
		"UDP":       udp(nodeIP, 6443, podA, 40000),
	}
}

// What the host's stack answers a pod comes from the Service's address.
func TestToPodTranslatesBack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newServingBed(t, f)
		for name, p := range fromNode() {
			want := p
			want.src, want.sport = frontend, frontendPort
			r := b.toPod(b.pods[podA], p).is("stack").flow(want.flowOf()).valid()
			if !bytes.Equal(r.frame[:12], r.in[:12]) || len(r.frame) != len(r.in) {
				t.Errorf("%s: % x became % x", name, r.in, r.frame)
			}
		}
	})
}

// Fragments come after the first, which alone has the ports.
func TestToPodFragments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newServingBed(t, f)
		whole := udp(nodeIP, 6443, podA, 40000).with(func(p *packet) { p.payload, p.id = make([]byte, 64), 9 })
		pieces := cut(b, whole, 24)
		if v := b.toPod(b.pods[podA], pieces[1]).is("stack").view(); v.src != nodeIP {
			t.Errorf("a later fragment before the first left as %v", v)
		}
		var parts []result
		for _, p := range pieces {
			parts = append(parts, b.toPod(b.pods[podA], p).is("stack"))
		}
		whole.src, whole.sport = frontend, frontendPort
		got := joined(b, parts)
		must(t, sumsValid(got))
		if v, err := read(got); err != nil || v.String() != whole.flowOf() {
			t.Errorf("the fragments are of %v, %v; want %s", v, err, whole.flowOf())
		}
	})
}

// Whatever belongs to no flow of that pod to a Service passes as it is, as does what can't be read.
func TestToPodPassesTheRest(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newServingBed(t, f)
		a, other := b.pods[podA], b.pods[podB]
		reply := tcp(nodeIP, 6443, podA, 40000, ack)
		for name, c := range map[string]struct {
			at veth
			p  packet
		}{
			"another port":      {a, tcp(nodeIP, 6444, podA, 40000, ack)},
			"another pod's":     {other, tcp(nodeIP, 6443, podB, 40000, ack)},
			"on another's link": {other, reply},
			"ping":              {a, ping(nodeIP, 7, podA)},
			"error":             {a, icmpError(nodeIP, podA, 3, 3, tcp(podA, 40000, nodeIP, 6444, ack).bytes(f), 8)},
			"GRE":               {a, reply.with(func(p *packet) { p.proto = 47 })},
		} {
			if r := b.toPod(c.at, c.p).is("stack"); !bytes.Equal(r.in, r.frame) {
				t.Errorf("%s: % x became % x", name, r.in, r.frame)
			}
		}
		frame := reply.bytes(f)
		for length := ethernet + f.header(); length < ethernet+f.header()+20; length++ {
			if r := b.run(wire.ToPod, a.index, frame[:length], nil); r.act != actUnspec || !bytes.Equal(r.in, r.frame) {
				t.Errorf("cut off after %d bytes: %s", length, r.what)
			}
		}
	})
}

// The stack's errors are about what the pod has sent to the Service. Those of the backend's own host come from there too.
func TestToPodErrors(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newServingBed(t, f)
		for _, p := range []packet{tcp(podA, 40000, nodeIP, 6443, ack), udp(podA, 40000, nodeIP, 6443)} {
			p.payload = bytes.Repeat([]byte{7}, 64)
			sent := p
			sent.dst, sent.dport = frontend, frontendPort
			for from, want := range map[string]string{nodeIP: frontend, tunnelIP: tunnelIP} {
				for what, kind := range icmpErrors {
					for _, beyond := range []int{8, 20, 1000} {
						e := icmpError(from, podA, kind[0], kind[1], p.bytes(f), beyond)
						checkError(t, what, b.toPod(b.pods[podA], e).is("stack"), e, want, podA, sent.flowOf())
					}
				}
			}
		}
	})
}

// Without Services the program does nothing, and counts nothing.
func TestToPodWithoutServices(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.openToService(wire.TCP)
		l := b.pods[podA]
		frame := tcp(nodeIP, 6443, podA, 40000, ack).with(func(p *packet) { p.macTo, p.macFrom = l.peer, l.mac }).bytes(f)
		before := b.counters(wire.ToPod)
		if got := b.act(wire.ToPod, l.index, frame); got != actUnspec {
			t.Errorf("action %d", got)
		}
		for name, v := range b.counters(wire.ToPod) {
			if v != before[name] {
				t.Errorf("%s: %+v, was %+v", name, v, before[name])
			}
		}
	})
}

// A socket of the host leaves its checksum to the kernel, which writes it behind the program, on the link.
func TestToPodOnTheWire(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newServingBed(t, f)
		l := b.pods[podA]
		b.attach(wire.ToPod, l.index)
		pod := b.linkTo("ecprpod0-p")
		must(t, offloading(pod.socket))
		node := b.linkTo("ecprpod0")
		must(t, offloading(node.socket))
		for name, p := range map[string]packet{
			"UDP": udp(nodeIP, 6443, podA, 40000).with(func(p *packet) { p.payload = []byte("longer than what fills a frame, and odd") }),
			"TCP": tcp(nodeIP, 6443, podA, 40000, ack).with(func(p *packet) { p.payload = []byte("longer than what fills a frame, and odd") }),
		} {
			p.macTo, p.macFrom = l.peer, l.mac
			start := ethernet + f.header()
			at := start + map[wire.Protocol]int{wire.UDP: 6, wire.TCP: 16}[p.proto]
			want := p
			want.src, want.sport = frontend, frontendPort
			sent := pseudo(p.bytes(f), f, p, start, at)
			var frame []byte
			if !pod.waits(func(got []byte) bool {
				frame = completed(got)
				v, err := read(frame)
				return err == nil && v.String() == want.flowOf()
			}, func() { node.send(pending(sent, start, at)) }) {
				t.Fatalf("%s: nothing arrived as the Service's", name)
			}
			if err := sumsValid(frame); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// pseudo leaves in a frame's checksum what a socket does, the sum of the pseudo header.
func pseudo(frame []byte, f family, p packet, start, at int) []byte {
	frame = bytes.Clone(frame)
	length := len(frame) - start
	header := append(append([]byte{}, f.netIP(p.src)...), f.netIP(p.dst)...)
	header = append(header, 0, byte(p.proto), byte(length>>8), byte(length))
	s := fold(sum(0, header))
	frame[at], frame[at+1] = byte(s>>8), byte(s)
	return frame
}
