package prog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// fragmented cuts a packet into fragments that fit the MTU, as a sender's stack does.
func fragmented(b *bed, p packet) []packet {
	b.Helper()
	return cut(b, p, (mtu-b.header()-each(b.family, 0, 8*(len(p.chain)+1)))/8*8)
}

// cut cuts a packet into fragments that carry so many bytes each.
func cut(b *bed, p packet, piece int) []packet {
	b.Helper()
	whole, err := read(p.bytes(b.family))
	must(b, err)
	var out []packet
	for at := 0; at < len(whole.l4); at += piece {
		f := p
		f.raw, f.fragment = true, uint16(at/8)
		f.payload = whole.l4[at:min(at+piece, len(whole.l4))]
		if at+piece < len(whole.l4) {
			f.fragment |= moreFragments
		}
		out = append(out, f)
	}
	return out
}

// joined puts fragments together again and returns the frame of the whole packet.
func joined(b *bed, parts []result) []byte {
	b.Helper()
	header := bytes.Clone(parts[0].frame[:ethernet+b.header()])
	var l4 []byte
	for _, r := range parts {
		v := r.view()
		at := int(v.at)
		if len(l4) < at+len(v.l4) {
			l4 = append(l4, make([]byte, at+len(v.l4)-len(l4))...)
		}
		copy(l4[at:], v.l4)
	}
	if b.family == inIPv6 {
		binary.BigEndian.PutUint16(header[18:], uint16(len(l4)))
		header[20] = byte(b.proto(parts[0].view().proto))
		return append(header, l4...)
	}
	binary.BigEndian.PutUint16(header[16:], uint16(20+len(l4)))
	header[20], header[21] = 0, 0
	setIPSum(header)
	return append(header, l4...)
}

// passed sends a packet in fragments through a program that does the same with each, and reads what comes of them.
func passed(b *bed, p packet, by func(packet) result, verdict string) view {
	b.Helper()
	var parts []result
	for _, f := range fragmented(b, p) {
		parts = append(parts, by(f).is(verdict))
	}
	whole := joined(b, parts)
	must(b, sumsValid(whole))
	v, err := read(whole)
	must(b, err)
	return v
}

// firstFragment finds what is remembered of a pod's datagram, in one of the pod's places (frag_slot in bpf/lib/frag.h).
func (b *bed) firstFragment(key snat.Key, id uint32) (fragments.Value, error) {
	pod := uint32(b.pods[nameOf(key.Src.Netip())].index)
	for n := range uint64(fragments.Each) {
		own := (uint64(pod)*fragments.Each + n) * 0x9e3779b97f4a7c15
		own = (own ^ own>>32) * 0xbf58476d1ce4e5b9
		own = (own ^ own>>29) * 0x94d049bb133111eb
		place := fragments.OfWorld + own>>32*fragments.OfOthers>>32
		v, err := b.fragments.Get(fragments.Key{Slot: uint32(place)})
		same := v.Proto == key.Proto || key.Src.Netip().Is6()
		if err != nil || v.Ifindex == pod && v.Src == key.Src && v.Dst == key.Dst && v.ID == id && same {
			return v, err
		}
	}
	return fragments.Value{}, ebpf.ErrKeyNotExist
}

// A datagram as large as there are goes out and comes back in fragments, and both ends could put it together.
func TestFragmentedBothWays(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		big := bytes.Repeat([]byte("0123456789abcde"), 4367)
		for name, p := range map[string]packet{
			"UDP":                  udp(podA, 5000, world, 53),
			"UDP without checksum": udp(podA, 5000, world, 53).with(func(p *packet) { p.noSum = true }),
			"ping":                 ping(podA, 5000, world),
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				p.payload, p.id = big, 77
				v := passed(b, p, b.fromPod, "forwarded")
				if v.src != nodeIP || v.sport < 49152 {
					t.Fatalf("left as %v", v)
				}
				back := p.replied().with(func(r *packet) { r.dst, r.dport, r.id = v.src, v.sport, 99 })
				got := passed(b, back, b.fromUplink, "delivered")
				if want := reversed(view{proto: p.proto, src: podA, dst: world, sport: p.sport, dport: p.dport}); got.String() != want {
					t.Errorf("came back as %q, want %q", got, want)
				}
				b.count(1, 0)
			})
		}
	})
}

// The world opens a flow with fragments: the replies' fragments leave as they are.
func TestFragmentedFromWorld(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(world, 4000, podA, 53).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 5 })
		for _, f := range fragmented(b, p) {
			b.fromUplink(f).is("delivered")
		}
		for _, f := range fragmented(b, p.replied()) {
			if r := b.fromPod(f).is("forwarded"); r.view().src != podA {
				t.Errorf("fragment left as %v", r.view())
			}
		}
		b.count(0, 1)
	})
}

// A later fragment is nothing without its first: dropped towards the world, the stack's from there.
func TestFragmentOutOfOrder(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		parts := fragmented(b, udp(podA, 5000, world, 53).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 5 }))
		b.fromPod(parts[1]).is("drop FRAG_NOT_FOUND")
		b.fromPod(parts[0]).is("forwarded")
		b.fromPod(parts[1]).is("forwarded")
		for name, other := range map[string]packet{
			"identification": parts[2].with(func(p *packet) { p.id = 6 }),
			"destination":    parts[2].with(func(p *packet) { p.dst = world2 }),
			"protocol":       parts[2].with(func(p *packet) { p.proto = wire.TCP }),
			"source":         parts[2].with(func(p *packet) { p.src = podB }),
		} {
			if f == inIPv6 && name == "protocol" { // what it says of that is not used (RFC 8200, section 4.5)
				b.fromPod(other).is("forwarded")
				continue
			}
			if r := b.fromPod(other); r.what != "drop FRAG_NOT_FOUND" {
				t.Errorf("fragment with another %s: outcome %q", name, r.what)
			}
		}
	})
}

// Of a later fragment to the node whose first has not arrived nobody can tell whether it is a pod's. It is counted, and the
// stack gets it as it is. What follows its first is the pod's, or the node's own, for certain.
func TestFragmentOutOfOrderFromWorld(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		back := answer(b.fromPod(p).is("forwarded"), p).with(func(p *packet) { p.payload, p.id = make([]byte, 4000), 5 })
		for _, c := range []struct {
			p    packet
			want string
		}{
			{back, "delivered"},
			{back.with(func(p *packet) { p.dport, p.id = 22, 6 }), "stack"},
		} {
			parts := fragmented(b, c.p)
			if r := b.fromUplink(parts[1]).is("drop FRAG_NOT_FOUND"); !bytes.Equal(r.in, r.frame) {
				t.Error("a fragment of nobody's was changed")
			}
			for _, f := range parts {
				b.fromUplink(f).is(c.want)
			}
		}
		// No pod can have been waiting for those.
		esp := packet{proto: 50, src: world, dst: nodeIP, id: 7, payload: make([]byte, 64), fragment: 8}
		b.fromUplink(esp).is("stack")
	})
}

// Fragments of a protocol that cannot be masqueraded stay here, the later ones too.
func TestFragmentUnknownProtocol(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		gre := packet{proto: 47, src: podA, dst: world, id: 5, payload: make([]byte, 64), fragment: moreFragments}
		b.turnedAway(gre, "drop UNKNOWN_PROTOCOL")
		b.turnedAway(gre.with(func(p *packet) { p.fragment = 8 }), "drop UNKNOWN_PROTOCOL")
		b.empty()
	})
}

// The first fragments of a TCP segment keep their flow; a first fragment opens one only as a SYN.
func TestFragmentedTCP(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(podA, 5000, world, 80, ack).with(func(p *packet) { p.payload, p.id = make([]byte, 3000), 5 })
		parts := fragmented(b, p)
		b.fromPod(parts[0]).is("drop NO_MAPPING")
		b.fromPod(parts[1]).is("drop NO_MAPPING")
		b.fromPod(tcp(podA, 5000, world, 80, syn)).is("forwarded")
		var out []result
		for _, f := range parts {
			out = append(out, b.fromPod(f).is("forwarded"))
		}
		must(t, sumsValid(joined(b, out)))
	})
}

// A flow of an unknown protocol that the world opened has its replies' fragments leave as they are.
func TestFragmentUnknownProtocolOfWorldsFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		esp := packet{proto: 50, src: world, dst: podA, id: 5, payload: make([]byte, 64), fragment: moreFragments}
		b.fromUplink(esp).is("delivered")
		b.fromPod(esp.replied()).is("forwarded").flow("50 " + podA + ":0 > " + world + ":0")
		b.fromPod(esp.replied().with(func(p *packet) { p.fragment = 8 })).is("forwarded").flow("50 " + podA + ":0 > " + world + ":0")
	})
}

// holder is one of those who have records of their own of the datagrams that they send.
type holder struct {
	d      wire.Direction
	link   func(*bed) veth
	p      packet
	fields map[int]uint32
	want   string // the outcome of each piece; of a later one whose first is forgotten it is another
}

func (h holder) sends(b *bed, p packet) {
	b.Helper()
	l := h.link(b)
	p.macTo = l.mac
	b.run(h.d, l.index, p.bytes(b.family), h.fields).is(h.want)
}

// Whoever begins however many datagrams, those of the others stay known until their rest has come.
func TestFragmentsPushOutNobodyElses(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		pod := func(name string) func(*bed) veth { return func(b *bed) veth { return b.pods[name] } }
		uplink := func(b *bed) veth { return b.uplink }
		holders := map[string]holder{
			"a pod":       {wire.FromPod, pod(podA), udp(podA, 5000, world, 53), nil, "forwarded"},
			"another pod": {wire.FromPod, pod(podB), udp(podB, 5000, world, 53), nil, "forwarded"},
			"the world":   {wire.FromUplink, uplink, udp(world, 53, nodeIP, 5000), nil, "stack"},
			// What the node forwards to a tunnel port is dropped.
			"the node": {wire.ToUplink, uplink, udp(nodeIP, 5000, world, tunnelPort), map[int]uint32{skbIngressIfindex: 1}, "drop TUNNEL_PORT"},
		}
		for _, flooder := range []string{"a pod", "the world", "the node"} {
			t.Run(flooder, func(t *testing.T) {
				b := newBed(t, f)
				b.eachBut(flooder, holders, first)
				// More than all pods have. A slow machine has to be done before the others' are forgotten, and sends a few times the
				// flooder's own share.
				h := holders[flooder]
				flood := first(h.p, 0).with(func(p *packet) { p.macTo = h.link(b).mac })
				for id := range uint32(min(9000, max(2*fragments.Each, *packets/10))) {
					flood.id = 100 + id
					b.act(h.d, h.link(b).index, flood.bytes(f))
				}
				b.eachBut(flooder, holders, later)
				h.sends(b, later(flood, flood.id))
				if flooder == "a pod" {
					b.fromPod(later(flood, 100)).is("drop FRAG_NOT_FOUND")
				}
			})
		}
	})
}

// eachBut has all holders but one send the same piece of a datagram.
func (b *bed) eachBut(one string, holders map[string]holder, piece func(packet, uint32) packet) {
	b.Helper()
	for name, h := range holders {
		if name != one {
			h.sends(b, piece(h.p, 5))
		}
	}
}

// addPodAt adds a pod whose interface has a certain index.
func (b *bed) addPodAt(pod string, index int) {
	b.Helper()
	name := fmt.Sprintf("at%d", index)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Index = name, mtu, index
	must(b, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}))
	var mac [2]net.HardwareAddr
	for i, name := range []string{name, name + "p"} {
		link, err := netlink.LinkByName(name)
		must(b, err)
		must(b, netlink.LinkSetUp(link))
		mac[i] = link.Attrs().HardwareAddr
	}
	b.pods[pod] = veth{index: index, mac: mac[0], peer: mac[1]}
	b.addPod(pod)
}

// However far apart the indices of their interfaces lie: two pods never share most of their places.
func TestFragmentsOfPodsFarApart(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		const attacker, index, datagrams = "10.244.1.50", 1000, 200
		b.addPodAt(attacker, index)
		flood := udp(attacker, 5000, world, 53).with(func(p *packet) { p.fragment = moreFragments })
		for i, distance := range []int{3069, 3074, 46368} { // of these many places the multiples of the golden ratio meet
			victim := fmt.Sprintf("10.244.1.%d", 51+i)
			b.addPodAt(victim, index+distance)
			for id := range uint32(2 * fragments.Each) {
				flood.id = id
				b.fromPod(flood)
			}
			first := udp(victim, 5000, world, 53).with(func(p *packet) { p.fragment = moreFragments })
			rest := first.with(func(p *packet) { p.fragment, p.payload = 8, make([]byte, 64) })
			lost := 0
			for id := range uint32(datagrams) {
				first.id, rest.id = id, id
				b.fromPod(first).is("forwarded")
				if b.fromPod(rest).what != "forwarded" {
					lost++
				}
			}
			if lost > datagrams/50 {
				t.Errorf("%d indices apart: lost %d of %d datagrams to another pod's", distance, lost, datagrams)
			}
		}
	})
}
