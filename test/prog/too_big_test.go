package prog

import (
	"bytes"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

const dontFragment = 0x4000

// quoted is how much of a packet its sender gets back, at most.
const quoted = 128

// whole has nobody fragment the packet, which no router does in IPv6.
func (f family) whole(p packet) packet {
	p.fragment |= each[uint16](f, dontFragment, 0)
	return p
}

// tooBig is the error about a frame that has been sent, without addresses.
func (f family) tooBig(sent []byte, mtu int) packet {
	return packet{
		proto: wire.ICMP, icmpType: 3, icmpCode: 4, rest: uint16(mtu), quote: sent[ethernet:][:min(quoted, len(sent)-ethernet)],
		fragment: each[uint16](f, dontFragment, 0),
	}
}

// tooBigFor is the error that a pod gets about a frame that it has sent.
func (b *bed) tooBigFor(pod string, sent []byte, mtu int) []byte {
	e, l := b.tooBig(sent, mtu), b.pods[pod]
	e.src, e.dst, e.macTo, e.macFrom = nodeIP, pod, l.peer, l.mac
	return e.bytes(b.family)
}

// tells asserts that the pod that has sent a packet is told how large it may be.
func (r result) tells(pod string, mtu int) {
	r.b.Helper()
	r.is("drop TOO_BIG")
	if want := r.b.tooBigFor(pod, r.in, mtu); !bytes.Equal(r.frame, want) {
		r.b.Errorf("%s: told\n% x, want\n% x", describe(r.in), r.frame, want)
	}
}

// returns asserts that the stack, which has sent a packet, gets the same as if its destination had told it.
func (r result) returns(mtu int) {
	r.b.Helper()
	r.is("drop TOO_BIG")
	sent, err := read(r.in)
	must(r.b, err)
	e := r.b.tooBig(r.in, mtu)
	e.src, e.dst, e.macTo, e.macFrom = sent.dst, sent.src, r.in[6:12], r.in[6:12]
	if want := e.bytes(r.b.family); !bytes.Equal(r.frame, want) || r.mark&mark == 0 {
		r.b.Errorf("%s: the stack gets, with mark %#x,\n% x, want\n% x", describe(r.in), r.mark, r.frame, want)
	}
}

// narrow are the ways on which a pod's packet may be too big for its path, with the path's MTU.
func narrow() map[*way]int {
	all := make(map[*way]int)
	for i, w := range ways {
		beyondTunnel := w.dst == beyond || w.dst == node5IP
		switch {
		case w.forwarded && w.want == "forwarded", w.want == "forwarded" && beyondTunnel:
			all[&ways[i]] = tunnelMTU
		case w.want == "forwarded":
			all[&ways[i]] = mtu
		}
	}
	return all
}

// A packet that does not fit, and that nobody may fragment, its sender is told of at once, to the last byte, whatever it is.
func TestTooBig(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for name, p := range map[string]packet{
			"TCP":               tcp("", 5000, "", 80, syn),
			"UDP":               udp("", 5000, "", 53),
			"ping":              ping("", 7, ""),
			"unknown protocol":  {proto: 253},
			"first fragment":    udp("", 5000, "", 53).with(func(p *packet) { p.fragment = moreFragments }),
			"extension headers": chained(udp("", 5000, "", 53), each(f, 0, 8)),
		} {
			for w, mtu := range narrow() {
				p := f.whole(w.turned(p))
				least, err := read(p.with(func(p *packet) { p.payload = nil }).bytes(f))
				must(t, err)
				b.answers = true
				for _, size := range []int{mtu + 1, 3002} {
					p.payload = bytes.Repeat([]byte{0xa5, 0x5a, 1}, 1100)[:size-len(least.ip)]
					w.by(b, p).tells(w.src, mtu)
				}
				b.answers = p.proto == 253 // which is refused for that
				p.payload = p.payload[:mtu-len(least.ip)]
				if r := w.by(b, p); r.what != w.want && p.proto != 253 {
					t.Errorf("%s %s, as large as fits: outcome %q", name, w.name, r.what)
				}
				if f == inIPv4 && !w.forwarded { // the stack fragments it
					p.fragment, p.payload = 0, append(p.payload, 0)
					b.leftToStack(name+" "+w.name, w.by(b, p))
				}
			}
		}
	})
}

// A packet that stands for many is judged by its segments, and what is told of it is one packet.
func TestTooBigSegments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.answers = true
		for w, mtu := range narrow() {
			if w.forwarded {
				continue
			}
			for _, c := range []struct {
				p      packet
				header int
			}{{tcp("", 5000, "", 80, syn), 20}, {udp("", 5000, "", 53), 8}, {chained(tcp("", 5000, "", 80, syn), each(f, 0, 2)), each(f, 20, 36)}} {
				p := f.whole(w.turned(c.p))
				p.payload = make([]byte, 3000)
				for segment, fits := range map[int]bool{mtu - f.header() - c.header: true, mtu - f.header() - c.header + 1: false} {
					l := b.pods[w.src]
					p.macTo, p.macFrom = l.mac, l.peer
					r := b.run(wire.FromPod, l.index, p.bytes(f), map[int]uint32{skbGSOSize: uint32(segment)})
					if fits {
						r.is(w.want)
					} else {
						r.tells(w.src, mtu)
					}
				}
			}
		}
	})
}

// The segments of SCTP have lengths of their own, which only the kernel knows: it judges them before it sends any.
func TestTooBigUnevenSegments(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		uneven := map[int]uint32{skbGSOSize: 0xffff}
		large := func(to string, l veth) []byte {
			p := f.whole(sctp(podA, to))
			p.payload, p.macTo, p.macFrom = make([]byte, 3000), l.mac, l.peer
			return p.bytes(f)
		}
		l := b.pods[podA]
		for _, to := range []string{remote, beyond, node2IP, node5IP, native, world} {
			b.leftToStack("to "+to, b.run(wire.FromPod, l.index, large(to, l), uneven))
		}
		b.run(wire.ToUplink, b.uplink.index, large(node5IP, b.uplink), uneven).is("forwarded")
	})
}

// Nobody is told about an error, about what many have got, or about a later fragment of IPv4 (RFC 1122, section 3.2.2).
func TestTooBigIsNotTold(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		large := func(p *packet) { p.payload = make([]byte, mtu) }
		for w := range narrow() {
			e := icmpError(w.src, w.dst, 3, 1, udp(w.dst, 53, w.src, 5000).with(large).bytes(f), mtu)
			if r := w.by(b, f.whole(e)).is("drop TOO_BIG"); r.told() {
				t.Errorf("%s: an error was answered", w.name)
			}
			p := f.whole(w.turned(udp("", 5000, "", 53)).with(large))
			p.fragment |= 100
			if f == inIPv6 {
				b.answers = true
				w.by(b, p).tells(w.src, narrow()[w])
				b.answers = false
			} else if r := w.by(b, p).is("drop TOO_BIG"); r.told() {
				t.Errorf("%s: a later fragment was answered", w.name)
			}
		}
		b.leftToStack("multicast", b.fromPod(f.whole(udp(podA, 5000, nowhere, 53).with(large))))
		b.leftToStack("to the node", b.fromPod(f.whole(udp(podA, 5000, nodeIP, 53).with(large))))
		b.fromPod(f.whole(udp(podA, 5000, podB, 53).with(large))).is("delivered") // as wide as the pod's own link
	})
}

// Where the stack may know another way, or the node has no address to answer from, the stack answers.
func TestTooBigLeftToStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		large := func(to string) packet {
			return f.whole(udp(podA, 5000, to, 53).with(func(p *packet) { p.payload = make([]byte, mtu) }))
		}
		b := newBed(t, f, besideNetfilter)
		b.answers = true
		for _, to := range []string{world, service, node2IP, node5IP, native} {
			b.leftToStack("beside netfilter, to "+to, b.fromPod(large(to)))
		}
		b.fromPod(large(remote)).tells(podA, mtu)
		b.fromPod(large(beyond)).tells(podA, tunnelMTU)
		// Netfilter may have given it another destination, so that the pod would not know what it is told about.
		if r := b.toUplink(large(node5IP)); f == inIPv4 {
			r.is("forwarded")
		} else {
			r.returns(tunnelMTU)
		}

		b = newBed(t, f)
		v, err := b.config.Get(config.Key{})
		must(t, err)
		v.NodeAddresses[f.Family] = wire.Addr{}
		must(t, b.config.Put(config.Key{}, v))
		b.answers = true
		r := b.fromPod(large(world)).is("drop TOO_BIG")
		if src := r.view().src; src != tunnelIP {
			t.Errorf("told by %s, want the tunnel device's address", src)
		}
		b.answers = false
		v.Tunnel[f.Family].Address = wire.Addr{}
		must(t, b.config.Put(config.Key{}, v))
		for _, to := range []string{world, remote, node2IP, native} {
			b.leftToStack("without an address, to "+to, b.fromPod(large(to)))
		}
		b.configure(0)
		b.leftToStack("with options", b.fromPod(large(world).with(func(p *packet) { p.options = true })))
		b.leftToStack("last hop", b.fromPod(large(world).with(func(p *packet) { p.ttl = 1 })))
		b.giveToStack(world+"/32", destinations.ToStack)
		b.leftToStack("under a policy", b.fromPod(large(world)))
	})
}

// What the kernel has learnt of the way to the tunnel's far end over IPv6, which nobody fragments on it, the pods are told; and
// when the way is wider again they may send more. To the lookup a route with a locked MTU is what a router has said.
func TestTooBigForWhatTheTunnelHasLearnt(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		const learnt, outer = 1400, 70
		b := newBed(t, f)
		b.tunnelOver(inIPv6)
		way := netlink.Route{LinkIndex: b.uplink.index, Dst: inIPv6.ipNet(node5IP + "/32"), Gw: inIPv6.netIP(gatewayIP), MTU: learnt, MTULock: true}
		p := udp(podA, 5000, beyond, 53)
		larger := f.sized(p, learnt-outer+1)
		for range 2 {
			b.fromPod(larger).is("forwarded")
			must(t, netlink.RouteAdd(&way))
			b.outlast(110 * time.Millisecond) // longer than it is kept
			b.fromPod(f.sized(p, learnt-outer)).is("forwarded")
			b.answers = true
			b.fromPod(larger).tells(podA, learnt-outer)
			b.toUplink(larger).tells(podA, learnt-outer)
			b.answers = false
			must(t, netlink.RouteDel(&way))
			b.outlast(110 * time.Millisecond)
		}
	})
}

// A packet that is shorter than what is quoted at most is quoted whole, also one of an odd length.
func TestTooBigForANarrowPath(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		v := b.behind(node2IP, b.uplink.index)
		v.MTU = quoted - 2
		must(t, b.destinations.Put(b.key("10.244.2.0/24"), v))
		p := f.whole(udp(podA, 5000, remote, 53))
		b.answers = true
		for _, size := range []int{quoted - 1, quoted, quoted + 1} {
			b.fromPod(f.sized(p, size)).tells(podA, quoted-2)
		}
	})
}

// A pod is told a hundred times at once and a hundred times a second, whatever others get, and whatever neighbours it has asked
// for. Its TCP is told all the same.
func TestTooBigIsLimited(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.answers = true
		told := func(p packet, packets int) (n int) {
			p = f.whole(p.with(func(p *packet) { p.payload = make([]byte, mtu) }))
			for range packets {
				if b.fromPod(p).is("drop TOO_BIG").told() {
					n++
				}
			}
			return n
		}
		started := time.Now()
		got := told(udp(podA, 5000, world, 53), 200)
		// The programs' clock moves in ticks, so that it may be one further on.
		if most := 102 + int(time.Since(started)/(10*time.Millisecond)); got < 100 || got > most {
			t.Errorf("told of %d of 200 packets; want 100 to %d", got, most)
		}
		if got := told(tcp(podA, 5000, remote, 80, ack), 50); got != 50 {
			t.Errorf("TCP was told of %d of 50 segments", got)
		}
		for i := range 150 {
			b.fromPod(udp(podB, 5000, "172.16.0."+strconv.Itoa(100+i), 53))
		}
		if got := told(udp(podB, 5000, world, 53), 50); got != 50 {
			t.Errorf("another pod was told of %d of 50 packets", got)
		}
		b.outlast(600 * time.Millisecond)
		if told(udp(podA, 5000, world, 53), 1) != 1 {
			t.Error("not told after a pause")
		}
	})
}
