package prog

import (
	"bytes"
	"net"
	"slices"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Every verdict of ec_from_pod on a packet that is well formed.
func TestFromPodVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.stayOnCPU() // paths are each processor's
		change := func(to string, change func(*packet)) packet { return tcp(podA, 40000, to, 80, syn).with(change) }
		last := func(p *packet) { p.ttl = 1 }
		options := func(p *packet) { p.options = true }
		long := func(p *packet) { p.payload = make([]byte, mtu-f.header()-19) }
		gre := func(p *packet) { p.proto, p.payload = 47, make([]byte, 16) }
		tooBig := each(f, "stack", "drop TOO_BIG") // IPv4 without DF may be fragmented
		for _, c := range []struct {
			name string
			p    packet
			want string
		}{
			{"same node", tcp(podA, 40000, podB, 80, syn), "delivered"},
			{"same node, outside the podCIDR", tcp(podA, 40000, podC, 80, syn), "delivered"},
			{"same node, from outside the podCIDR", tcp(podC, 40000, podA, 80, syn), "delivered"},
			{"same node, unknown protocol", change(podB, gre), "delivered"},
			{"same node, last hop", change(podB, last), "stack"},
			{"same node, IP options", change(podB, options), "stack"},
			{"nobody's address", tcp(podA, 40000, noPod, 80, syn), "drop NO_ENDPOINT"},
			{"other node", tcp(podA, 40000, remote, 80, syn), "forwarded"},
			{"other node, unknown protocol", change(remote, gre), "forwarded"},
			{"other node, later fragment", change(remote, func(p *packet) { p.fragment = 100 }), "forwarded"},
			{"other node, last hop", change(remote, last), "stack"},
			{"other node, IP options", change(remote, options), "stack"},
			{"other node, larger than the link", change(remote, long), tooBig},
			{"other node, off link", tcp(podA, 40000, lost, 80, syn), "drop NODE_OFF_LINK"},
			{"other node, does not resolve", tcp(podA, 40000, mute, 80, syn), "forwarded"},
			{"other node, does not resolve, again", tcp(podA, 40000, mute, 80, syn), "stack"},
			{"address of a node", tcp(podA, 40000, node2IP, 80, syn), "forwarded"},
			{"address of a node, last hop", change(node2IP, last), "stack"},
			{"native", tcp(podA, 40000, native, 80, syn), "forwarded"},
			{"native, unknown protocol", change(native, gre), "forwarded"},
			{"native, larger than the link", change(native, long), tooBig},
			{"the node", tcp(podA, 40000, nodeIP, 80, syn), "stack"},
			{"the node's other address", tcp(podA, 40000, nodeOtherIP, 80, syn), "stack"},
			{"an address on the node's loopback", udp(podA, 40000, "169.254.20.10", 53), "stack"},
			{"world", tcp(podA, 40000, world, 80, syn), "forwarded"},
			{"world, by an entry that says so", tcp(podA, 40000, stated, 80, syn), "forwarded"},
			{"world, second uplink", tcp(podA, 40000, world2, 80, syn), "forwarded"},
			{"world, uplink without address", tcp(podA, 40000, bare, 80, syn), "drop NO_SNAT_ADDRESS"},
			{"world, link without our programs", tcp(podA, 40000, foreign, 80, syn), "stack"},
			{"world, neighbour does not resolve", tcp(podA, 40000, silentIP, 80, syn), "forwarded"},
			{"world, neighbour does not resolve, again", tcp(podA, 40000, silentIP, 80, syn), "stack"},
			{"world, unknown protocol", change(world, gre), "drop UNKNOWN_PROTOCOL"},
			{"world, last hop", change(world, last), "stack"},
			{"world, IP options", change(world, options), "stack"},
			{"world, larger than the link", change(world, long), tooBig},
			{"multicast", udp(podA, 40000, nowhere, 80), "stack"},
			{"broadcast", udp(podA, 40000, "255.255.255.255", 67), each(f, "stack", "drop LINK_SCOPE")},
			{"loopback", udp(podA, 40000, "127.0.0.1", 53), "stack"},
		} {
			b.answers = slices.Contains(answerable, c.want)
			r := b.fromPod(c.p)
			if r.what != c.want {
				t.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
			}
		}
	})
}

// What a pod says must be its own: any other source is dropped, wherever it goes.
func TestFromPodSpoofedSource(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		l := b.pods[podA]
		for _, src := range []string{podB, podC, remote, nodeIP, world, "0.0.0.0", "127.0.0.1", gateway, nowhere} {
			want := "drop SPOOFED_SOURCE"
			if f.ip(src).Is6() && f.ip(src).IsLinkLocalUnicast() {
				want = "drop LINK_SCOPE"
			}
			for _, dst := range []string{podB, remote, node2IP, nodeIP, world, nowhere, noPod} {
				b.run(wire.FromPod, l.index, udp(src, 40000, dst, 80).bytes(f), nil).is(want)
			}
		}
		// A device without a record, or without an address, has no source that it may use.
		must(t, b.devices.Put(devices.Key{Ifindex: uint32(l.index)}, devices.Value{}))
		b.fromPod(udp(podA, 40000, podB, 80)).is("drop SPOOFED_SOURCE")
		must(t, b.devices.Delete(devices.Key{Ifindex: uint32(l.index)}))
		b.fromPod(udp(podA, 40000, podB, 80)).is("drop SPOOFED_SOURCE")
	})
}

// Between pods the packet is what it was, but for the hop: TTL and, on the same node, the Ethernet addresses.
func TestFromPodChangesOnlyTheHop(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, ttl := range []uint8{2, 3, 64, 255} {
			for _, to := range []string{podB, remote, native, node2IP} {
				r := b.fromPod(udp(podA, 40000, to, 80).with(func(p *packet) { p.ttl = ttl })).valid()
				if got := r.view().ttl; got != ttl-1 {
					t.Errorf("to %s with TTL %d: left with TTL %d", to, ttl, got)
				}
				want := bytes.Clone(r.in)
				ttlAt.of(want)[0]--
				setIPSum(want)
				if r.what == "delivered" {
					copy(want, b.pods[podB].peer)
					copy(want[6:], b.pods[podB].mac)
				}
				if !bytes.Equal(r.frame, want) {
					t.Errorf("to %s:\n got % x\nwant % x", to, r.frame, want)
				}
			}
		}
	})
}

// The header checksum is right whatever it was before the hop, the wrap around included.
func TestFromPodHopChecksum(t *testing.T) {
	b := newBed(t, inIPv4)
	for id := range 1 << 16 {
		if id%257 != 0 && id < 1<<16-600 { // a spread of checksums, and a run that wraps around
			continue
		}
		r := b.fromPod(udp(podA, 1, podB, 2).with(func(p *packet) { p.id, p.payload = uint32(id), nil })).is("delivered")
		if residues := r.view().residues(); residues.IP != 0 {
			t.Fatalf("IP identification %d: header checksum wrong by %d", id, residues.IP)
		}
	}
}

// Frames that no parser may trust.
func TestFromPodMalformed(t *testing.T) {
	b := newBed(t, inIPv4)
	l := b.pods[podA]
	edit := func(p packet, edit func(frame []byte) []byte) []byte {
		frame := edit(bytes.Clone(p.bytes(b.family)))
		return frame
	}

	set := func(at int, v ...byte) func([]byte) []byte {
		return func(f []byte) []byte {
			copy(f[at:], v)
			if f[14]&15 == 5 {
				setIPSum(f)
			}
			return f
		}
	}
	// short is a packet whose IP length leaves less than the transport header, followed by what pads a frame.
	short := func(l4 byte) func([]byte) []byte {
		return func(f []byte) []byte { f[16], f[17] = 0, 20+l4; setIPSum(f); return f }
	}
	world := tcp(podA, 40000, world, 80, syn)
	for _, c := range []struct {
		name  string
		frame []byte
		want  string
	}{
		{"version 6", edit(world, set(14, 0x65)), "drop INVALID"},
		{"header length 16", edit(world, set(14, 0x44)), "drop INVALID"},
		{"header longer than the packet", edit(world, set(14, 0x4f)), "drop INVALID"},
		{"total length below the header's", edit(world, set(16, 0, 19)), "drop INVALID"},
		{"total length beyond the frame", edit(world, set(16, 5, 0)), "drop INVALID"},
		{"total length 0", edit(world, set(16, 0, 0)), "drop INVALID"},
		{"half a TCP header", edit(world, short(19)), "drop INVALID"},
		{"TCP header length 16", edit(world, set(46, 0x40)), "drop INVALID"},
		{"TCP header longer than the packet", edit(world, set(46, 0xf0)), "drop INVALID"},
		{"tiny first fragment of TCP", edit(world.with(func(p *packet) { p.fragment = moreFragments }), short(8)), "drop INVALID"},
		{"half a UDP header", edit(udp(podA, 40000, world.dst, 80), short(7)), "drop INVALID"},
		{"half an ICMP header", edit(ping(podA, 40000, world.dst), short(7)), "drop INVALID"},
	} {
		if r := b.run(wire.FromPod, l.index, c.frame, nil); r.what != c.want {
			t.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
		}
	}
}

// A header that any bit was lost of is nobody's: nothing past the stack would look again.
func TestFromPodHeaderChecksum(t *testing.T) {
	b := newBed(t, inIPv4)
	l := b.pods[podA]
	for bit := 8; bit < 8*20; bit++ { // the first byte says where the header ends
		frame := udp(podA, 40000, podB, 80).bytes(b.family)
		frame[14+bit/8] ^= 1 << (bit % 8)
		b.run(wire.FromPod, l.index, frame, nil).is("drop INVALID")
		setIPSum(frame)
		if r := b.run(wire.FromPod, l.index, frame, nil); r.what == "drop INVALID" && bit/8 != 2 && bit/8 != 3 { // its length
			t.Errorf("bit %d, with the checksum right: %q", bit, r.what)
		}
	}
	options := udp(podA, 40000, podB, 80).with(func(p *packet) { p.options = true }).bytes(b.family)
	options[24] ^= 1
	b.run(wire.FromPod, l.index, options, nil).is("stack") // which verifies it
}

// A pod's questions for the gateway are answered on the spot; nothing else that is no IP leaves it.
func TestFromPodNotIP(t *testing.T) {
	b := newBed(t, inIPv4)
	b.answers = true
	l := b.pods[podA]
	question := arp(layers.ARPRequest, l.peer, podA, gateway)
	r := b.run(wire.FromPod, l.index, question, nil).is("answered")
	reply, ok := gopacket.NewPacket(r.frame, layers.LayerTypeEthernet, gopacket.Default).Layer(layers.LayerTypeARP).(*layers.ARP)
	if !ok {
		t.Fatalf("the answer is no ARP: % x", r.frame)
	}
	if !bytes.Equal(r.frame[:6], l.peer) || !bytes.Equal(r.frame[6:12], l.mac) || reply.Operation != layers.ARPReply {
		t.Errorf("answer % x: want a reply from %s to %s", r.frame, l.mac, l.peer)
	}
	if !bytes.Equal(reply.SourceHwAddress, l.mac) || !net.IP(reply.SourceProtAddress).Equal(net.ParseIP(gateway)) {
		t.Errorf("answer says %x is at %x, want the gateway at %s", reply.SourceProtAddress, reply.SourceHwAddress, l.mac)
	}
	if !bytes.Equal(reply.DstHwAddress, l.peer) || !net.IP(reply.DstProtAddress).Equal(net.ParseIP(podA)) {
		t.Errorf("answer is for %x at %x, want the pod", reply.DstProtAddress, reply.DstHwAddress)
	}

	foreign := bytes.Clone(question)
	other := func(ethertype ...byte) []byte {
		return slices.Concat(question[:12], ethertype, make([]byte, 46))
	}
	foreign[14] = 2 // not Ethernet's hardware type
	for _, c := range []struct {
		name  string
		frame []byte
		want  string
	}{
		{"question for another address", arp(layers.ARPRequest, l.peer, podA, podB), "drop NOT_IP"},
		{"an answer", arp(layers.ARPReply, l.peer, podA, gateway), "drop NOT_IP"},
		{"another kind of ARP", foreign, "drop NOT_IP"},
		{"half a question", question[:40], "drop INVALID"},
		{"no IPv6 in spite of its type", other(0x86, 0xdd), "drop INVALID"},
		{"LLDP", other(0x88, 0xcc), "drop NOT_IP"},
		{"802.3 length", other(0, 46), "drop NOT_IP"},
	} {
		if r := b.run(wire.FromPod, l.index, c.frame, nil); r.what != c.want {
			t.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
		}
	}
}

// Without masquerading the world is one more place that the kernel's routes lead to.
func TestFromPodWithoutMasquerade(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withoutMasquerade)
		b.fromPod(tcp(podA, 50000, world, 80, syn)).is("forwarded").flow("tcp " + podA + ":50000 > " + world + ":80").valid()
		b.fromPod(tcp(podA, 50000, foreign, 80, syn)).is("stack")
		b.fromUplink(tcp(world, 80, podA, 50000, syn|ack)).is("delivered")
		b.toUplink(tcp(podA, 50000, world, 80, syn)).is("stack").flow("tcp " + podA + ":50000 > " + world + ":80")
		b.empty()
	})
}

// A pod's own counters hold everything that it sent, what was dropped included.
func TestFromPodCountsPerPod(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		var want uint64
		for _, to := range []string{podB, remote, world, noPod, bare, nowhere} {
			want += uint64(len(b.fromPod(udp(podA, 40000, to, 80)).in))
		}
		if got := b.device(podA); got.Packets != 6 || got.Bytes != want {
			t.Errorf("pod counted %d packets, %d bytes; want 6, %d", got.Packets, got.Bytes, want)
		}
		if got := b.device(podB); got.Packets != 0 {
			t.Errorf("a pod that sent nothing counted %d packets", got.Packets)
		}
	})
}

// While a neighbour resolves it is not looked up for every packet, and when it stops resolving that is soon seen.
func TestFromPodNeighbourCheckedAgain(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.stayOnCPU() // paths are each processor's
		b.fromPod(udp(podA, 40000, remote, 80)).is("forwarded")
		key := b.key("10.244.2.0/24")
		v, err := b.destinations.Get(key)
		must(t, err)
		if v.NeighbourChecked == 0 {
			t.Fatal("the check left no time stamp")
		}
		v.Node, v.NeighbourChecked = b.addr(silentIP), v.NeighbourChecked-uint64(200e6)
		must(t, b.destinations.Put(key, v))
		b.fromPod(udp(podA, 40000, remote, 80)).is("forwarded")
		b.fromPod(udp(podA, 40000, remote, 80)).is("stack")
	})
}

// An uplink that loses its record is no longer ours to send through.
func TestFromPodUplinkGone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		must(t, b.uplinks.Delete(uplinks.Key{Ifindex: uint32(b.uplink.index)}))
		b.fromPod(udp(podA, 40000, world, 80)).is("stack")
		b.fromPod(udp(podA, 40000, native, 80)).is("stack")
	})
}
