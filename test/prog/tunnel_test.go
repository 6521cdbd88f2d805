package prog

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// tunnelKey is struct bpf_tunnel_key, and the flags that go with it.
type tunnelKey struct {
	Flags    uint64
	ID       uint32
	Remote   [4]uint32
	TOS, TTL uint8
	Ext      uint16
	Label    uint32
	Local    [4]uint32
	_        [4]byte
}

// farEnd returns a program that gives a packet the key that b.sender holds and calls the target, as the kernel does for
// what arrives through the tunnel. The source of a key is its local address: the target reads it as the remote one.
func (b *bed) farEnd(target *ebpf.Program) *ebpf.Program {
	b.Helper()
	size := uint32(binary.Size(tunnelKey{}))
	sender, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: size, MaxEntries: 1})
	must(b, err)
	b.Cleanup(func() { sender.Close() })
	targets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(b, err)
	b.Cleanup(func() { targets.Close() })
	must(b, targets.Put(uint32(0), uint32(target.FD())))
	b.sender = sender
	b.comesFrom(node5IP, vni)
	return b.loadCode(asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMapValue(asm.R2, sender.FD(), 8), // bpf_skb_set_tunnel_key(ctx, key, len, flags)
		asm.LoadMem(asm.R7, asm.R2, 0, asm.Word),
		asm.LoadMapValue(asm.R4, sender.FD(), 0),
		asm.LoadMem(asm.R4, asm.R4, 0, asm.DWord),
		asm.Mov.Imm(asm.R3, 44),
		asm.JEq.Imm32(asm.R7, -1, "call"), // without a key
		asm.FnSkbSetTunnelKey.Call(),
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("call"),
		asm.LoadMapPtr(asm.R2, targets.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, actShot),
		asm.Return(),
	})
}

// comesFrom has what arrives through the tunnel from now on come from this outer source with this VNI; the empty source
// has it come without a key.
func (b *bed) comesFrom(source string, id uint32) { b.Helper(); b.comesOver(b.family, source, id) }

// comesOver does so for an outer source of another family.
func (b *bed) comesOver(f family, source string, id uint32) {
	b.Helper()
	k := tunnelKey{ID: id}
	if source == "" {
		k.ID = 0xffffffff
	} else if a := f.ip(source); a.Is4() {
		v4 := a.As4()
		k.Local[0] = binary.BigEndian.Uint32(v4[:])
	} else {
		v6 := a.As16()
		k.Flags = 1 // BPF_F_TUNINFO_IPV6
		for i := range k.Local {
			k.Local[i] = binary.NativeEndian.Uint32(v6[4*i:])
		}
	}
	var raw bytes.Buffer
	must(b, binary.Write(&raw, binary.NativeEndian, k))
	must(b, b.sender.Put(uint32(0), raw.Bytes()))
}

// fromTunnel has a packet arrive through the tunnel, from where comesFrom has said.
func (b *bed) fromTunnel(p packet) result {
	b.Helper()
	return b.run(wire.FromTunnel, b.tunnel, p.bytes(b.family), nil)
}

// toTunnel has the stack send a packet through the tunnel.
func (b *bed) toTunnel(p packet) result {
	b.Helper()
	return b.run(wire.ToTunnel, b.tunnel, p.bytes(b.family), nil)
}

// Every verdict of ec_from_tunnel on what a node may send: to pods, to the host, to nobody.
func TestFromTunnelVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		change := func(from string, change func(*packet)) packet { return tcp(from, 4000, podA, 80, syn).with(change) }
		for _, c := range []struct {
			name string
			p    packet
			want string
		}{
			{"pod to pod", tcp(beyond, 4000, podA, 80, syn), "delivered"},
			{"pod to pod outside the podCIDR", udp(beyond, 4000, podC, 53), "delivered"},
			{"pod to pod, ping", ping(beyond, 7, podA), "delivered"},
			{"pod to pod, unknown protocol", sctp(beyond, podA), "delivered"},
			{"pod to pod, first fragment", change(beyond, func(p *packet) { p.fragment = moreFragments }), "delivered"},
			{"pod to pod, later fragment", change(beyond, func(p *packet) { p.fragment = 100 }), "delivered"},
			{"pod to pod, last hop", change(beyond, func(p *packet) { p.ttl = 1 }), "stack"},
			{"pod to pod, IP options", change(beyond, func(p *packet) { p.options = true }), "stack"},
			{"pod to host", tcp(beyond, 4000, nodeIP, 22, syn), "stack"},
			{"pod to host's other address", tcp(beyond, 4000, nodeOtherIP, 22, syn), "stack"},
			{"pod to host, a port of the range", tcp(beyond, 4000, nodeIP, 50000, syn), "stack"},
			{"pod to the tunnel device's address", udp(beyond, 53, tunnelIP, 4000), "stack"},
			{"node to pod", tcp(node5IP, 4000, podA, 80, syn), "delivered"},
			{"node to host", tcp(node5IP, 4000, nodeIP, 22, syn), "stack"},
			{"to a pod that is not there", tcp(beyond, 4000, noPod, 80, syn), "drop NO_ENDPOINT"},
			{"to a third node's pod", tcp(beyond, 4000, remote, 80, syn), "drop TUNNEL_DESTINATION"},
			{"to a third node", tcp(beyond, 4000, node2IP, 80, syn), "drop TUNNEL_DESTINATION"},
			{"back to a pod of its own", tcp(beyond, 4000, "10.244.5.51", 80, syn), "drop TUNNEL_DESTINATION"},
			{"to the world", tcp(beyond, 4000, world, 80, syn), "drop TUNNEL_DESTINATION"},
			{"to what is never masqueraded", tcp(beyond, 4000, native, 80, syn), "drop TUNNEL_DESTINATION"},
			{"multicast", udp(beyond, 4000, nowhere, 53), "drop TUNNEL_DESTINATION"},
			{"broadcast", udp(beyond, 4000, "255.255.255.255", 53), "drop TUNNEL_DESTINATION"},
			{"loopback", udp(beyond, 4000, "127.0.0.1", 53), "drop TUNNEL_DESTINATION"},
		} {
			if r := b.fromTunnel(c.p); r.what != c.want {
				t.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
			}
		}
		b.empty() // no flow between pods and nodes needs memory
	})
}

// Loopback is nobody's destination even where the agent has it among the host's addresses.
func TestFromTunnelToLoopback(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		must(t, b.destinations.Put(b.key("127.0.0.0/8"), destinations.Value{Kind: destinations.Host}))
		b.fromTunnel(udp(beyond, 4000, "127.0.0.1", 53)).is("drop TUNNEL_DESTINATION")
	})
}

// A tunnel in the tunnel ends in pods only: unpacked by the host, a packet would seem to come from another node.
func TestFromTunnelToTheTunnelPort(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, from := range []string{beyond, node5IP} {
			for _, to := range []string{nodeIP, nodeOtherIP, tunnelIP} {
				p := udp(from, 4000, to, tunnelPort)
				b.fromTunnel(p).is("drop TUNNEL_PORT")
				b.fromTunnel(p.with(func(p *packet) { p.options = true })).is("drop TUNNEL_PORT")
				b.fromTunnel(p.with(func(p *packet) { p.fragment = moreFragments })).is("drop TUNNEL_PORT")
				b.fromTunnel(udp(from, 4000, to, tunnelPort+1)).is("stack")
				b.fromTunnel(tcp(from, 4000, to, tunnelPort, syn)).is("stack")
			}
			b.fromTunnel(udp(from, 4000, podA, tunnelPort)).is("delivered")
		}
	})
}

// Nobody gets a packet in whose inner source is not the sender's own, and the reason says whether the sender is a node.
func TestFromTunnelComparesOuterWithInner(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, c := range []struct {
			name, outer, inner, want string
		}{
			{"its pod", node5IP, beyond, "delivered"},
			{"itself", node5IP, node5IP, "delivered"},
			{"a pod of a node that is reached directly", node2IP, remote, "delivered"},
			{"that node itself", node2IP, node2IP, "delivered"},
			{"a pod of a node that is off link", offLinkIP, lost, "delivered"},
			{"another node's pod", node2IP, beyond, "drop TUNNEL_SOURCE"},
			{"another node", node5IP, node2IP, "drop TUNNEL_SOURCE"},
			{"our pod", node5IP, podB, "drop TUNNEL_SOURCE"},
			{"our pod outside the podCIDR", node5IP, podC, "drop TUNNEL_SOURCE"},
			{"our podCIDR", node5IP, noPod, "drop TUNNEL_SOURCE"},
			{"our node", node5IP, nodeIP, "drop TUNNEL_SOURCE"},
			{"our tunnel device", node5IP, tunnelIP, "drop TUNNEL_SOURCE"},
			{"the world", node5IP, world, "drop TUNNEL_SOURCE"},
			{"what is never masqueraded", node5IP, native, "drop TUNNEL_SOURCE"},
			{"nobody", node5IP, "0.0.0.0", "drop TUNNEL_SOURCE"},
			{"loopback", node5IP, "127.0.0.1", "drop TUNNEL_SOURCE"},
			{"multicast", node5IP, nowhere, "drop TUNNEL_SOURCE"},
			{"sent by the world", world, beyond, "drop TUNNEL_NODE"},
			{"the world as itself", world, world, "drop TUNNEL_NODE"},
			{"sent by a pod of ours", podB, beyond, "drop TUNNEL_NODE"},
			{"sent by a pod as itself", beyond, beyond, "drop TUNNEL_NODE"},
			{"sent by this node", nodeIP, beyond, "drop TUNNEL_NODE"},
			{"sent by this node as itself", nodeIP, nodeIP, "drop TUNNEL_NODE"},
			{"sent by what is never masqueraded", native, native, "drop TUNNEL_NODE"},
			{"sent by nobody", "0.0.0.0", beyond, "drop TUNNEL_NODE"},
			{"sent over IPv6", "2001:db8::5", beyond, "drop TUNNEL_NODE"},
			{"sent over IPv6 by nobody", "::", beyond, "drop TUNNEL_NODE"},
			{"without a key", "", beyond, "drop TUNNEL_FAILED"},
		} {
			b.comesFrom(c.outer, vni)
			for to, want := range map[string]string{podA: c.want, nodeIP: map[bool]string{true: "stack", false: c.want}[c.want == "delivered"]} {
				if r := b.fromTunnel(udp(c.inner, 4000, to, 53)); r.what != want {
					t.Errorf("%s, to %s: outcome %q, want %q", c.name, to, r.what, want)
				}
			}
		}
	})
}

// tunnelOver has the tunnel to node 5 and its pods lead there over a family.
func (b *bed) tunnelOver(over family) {
	b.Helper()
	for name, kind := range map[string]destinations.Kind{node5IP + "/32": destinations.Node, "10.244.5.0/24": destinations.PodCIDR} {
		must(b, b.destinations.Put(b.key(name), over.byTunnel(kind)))
	}
}

// The tunnel carries either family over either, and a node may send from its address of each.
func TestFromTunnelOverEitherFamily(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		inEachFamily(t, func(t *testing.T, over family) {
			b := newBed(t, f)
			b.tunnelOver(over)
			p := udp(beyond, 4000, podA, 53)
			for _, outer := range []family{over, over.opposite()} {
				b.comesOver(outer, node5IP, vni)
				b.fromTunnel(p).is("delivered")
				b.fromTunnel(udp(node5IP, 4000, podA, 53)).is("delivered")
				b.fromTunnel(udp(remote, 4000, podA, 53)).is("drop TUNNEL_SOURCE")
				b.comesOver(outer, node5IP, vni+1)
				b.fromTunnel(p).is("drop TUNNEL_VNI")
				b.comesOver(outer, node2IP, vni)
				b.fromTunnel(p).is("drop TUNNEL_SOURCE")
				b.comesOver(outer, world, vni)
				b.fromTunnel(p).is("drop TUNNEL_NODE")
			}
			// A node that has one family alone has no alias, and nobody's address is not that.
			v := over.byTunnel(destinations.PodCIDR)
			v.Alias = wire.Addr{}
			must(t, b.destinations.Put(b.key("10.244.5.0/24"), v))
			b.comesOver(over, node5IP, vni)
			b.fromTunnel(p).is("delivered")
			b.comesOver(over.opposite(), node5IP, vni)
			b.fromTunnel(p).is("drop TUNNEL_SOURCE")
			b.comesOver(inIPv6, "::", vni)
			b.fromTunnel(p).is("drop TUNNEL_NODE")
			// Nor is it that of a node that is not known.
			must(t, b.destinations.Put(b.key("10.244.5.0/24"), destinations.Value{Kind: destinations.PodCIDR}))
			b.fromTunnel(p).is("drop TUNNEL_NODE")
		})
	})
}

// A flow-based device takes every VNI, and so another cluster's that shares the underlay.
func TestFromTunnelTakesOneVNI(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, id := range []uint32{0, 1, vni - 1, vni + 1, 1<<24 - 1} {
			b.comesFrom(node5IP, id)
			b.fromTunnel(udp(beyond, 4000, podA, 53)).is("drop TUNNEL_VNI")
			b.fromTunnel(udp(beyond, 4000, nodeIP, 53)).is("drop TUNNEL_VNI")
		}
	})
}

// What is no IP, or malformed, does not belong on the device: the stack never sees it.
func TestFromTunnelDropsTheRest(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		frame := func() []byte { return udp(beyond, 4000, nodeIP, 53).bytes(b.family) }
		broken, disturbed, foreign := frame(), frame(), frame()
		broken[14] = 0x44
		disturbed[each(f, 24, 14)] ^= 0x10 // or the version, where there is no checksum
		copy(foreign[12:], each(f, []byte{0x86, 0xdd}, []byte{8, 0}))
		for name, c := range map[string]struct {
			frame []byte
			want  string
		}{
			"ARP":              {arp(1, b.uplink.peer, beyond, nodeIP), "drop NOT_IP"},
			"another family's": {foreign, "drop INVALID"},
			"malformed":        {broken, "drop INVALID"},
			"wrong checksum":   {disturbed, "drop INVALID"},
			"cut short":        {frame()[:ethernet+f.header()+6], "drop INVALID"},
		} {
			if r := b.run(wire.FromTunnel, b.tunnel, c.frame, nil); r.what != c.want {
				t.Errorf("%s: outcome %q, want %q", name, r.what, c.want)
			}
		}
	})
}

// A pod gets the packet as the other pod sent it, one hop later.
func TestFromTunnelDelivers(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := tcp(beyond, 4000, podA, 80, syn).with(func(p *packet) { p.macTo = []byte{6, 5, 4, 3, 2, 1} })
		r := b.fromTunnel(p).is("delivered").flow("tcp " + beyond + ":4000 > " + podA + ":80").valid()
		if l := b.pods[podA]; !bytes.Equal(r.frame[:6], l.peer) || !bytes.Equal(r.frame[6:12], l.mac) || r.view().ttl != 63 {
			t.Errorf("Ethernet header % x, TTL %d", r.frame[:12], r.view().ttl)
		}
	})
}

// ICMP errors pass, by the same rules as by an uplink.
func TestFromTunnelErrors(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		sent := udp(podA, 5000, beyond, 53).bytes(b.family)
		b.fromTunnel(icmpError(beyond, podA, 3, 3, sent, 8)).is("delivered").valid()
		b.fromTunnel(icmpError(node5IP, podA, 11, 0, sent, 8)).is("delivered")
		b.fromTunnel(icmpError(beyond, podA, 3, 3, udp(podB, 5000, beyond, 53).bytes(b.family), 8)).is("drop FORGED_ERROR")
		b.fromTunnel(icmpError(beyond, podA, 5, 1, sent, 8)).is("drop ICMP_REDIRECT")
		b.fromTunnel(icmpError(beyond, podA, 3, 3, sent, 8).with(func(p *packet) { p.fragment = moreFragments })).is("drop INVALID")
		b.fromTunnel(icmpError(beyond, nodeIP, 3, 3, udp(nodeIP, 5000, beyond, 53).bytes(b.family), 8)).is("stack")
	})
}

// What the stack decides on, it decides on when it comes through the tunnel, too.
func TestFromTunnelLeavesToStack(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(beyond, 4000, podA, 53)
		sent := icmpError(beyond, podA, 3, 3, udp(podA, 4000, beyond, 53).bytes(b.family), 8)
		for _, flags := range []config.Flags{config.PodCIDRToStack, config.RoutesToStack} {
			b.configure(flags)
			b.leftToStack(flags.String(), b.fromTunnel(p))
			b.leftToStack(flags.String(), b.fromTunnel(sent))
		}
		b.configure(0)
		b.giveToStack(beyond+"/32", destinations.ToStack|destinations.ByTunnel)
		b.leftToStack("to_stack", b.fromTunnel(p))
		b.leftToStack("to_stack", b.fromTunnel(sent))
	})
}

// Beside netfilter a flow that it knows is the stack's, and so is all that concerns the node.
func TestFromTunnelBesideNetfilter(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, besideNetfilter)
		b.netfilterKnows(b.tuple(wire.UDP, podA, 5000, beyond, 53))
		b.fromTunnel(udp(beyond, 53, podA, 5000)).is("stack")
		b.fromTunnel(udp(beyond, 53, podA, 5001)).is("delivered")
		b.fromTunnel(icmpError(beyond, podA, 3, 3, udp(podA, 5000, beyond, 53).bytes(b.family), 8)).is("stack")
		b.fromTunnel(icmpError(beyond, podA, 3, 3, udp(podA, 5001, beyond, 53).bytes(b.family), 8)).is("delivered")
		b.fromTunnel(sctp(beyond, podA)).is("stack")
		b.fromTunnel(udp(node5IP, 4000, podA, 53)).is("stack")
		b.fromTunnel(udp(beyond, 4000, nodeIP, 53)).is("stack")
	})
}

// What the stack sends to a node that is reached by tunnel goes there; it has no other way through the device.
func TestToTunnelVerdicts(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, p := range []packet{udp(nodeIP, 4000, beyond, 53), tcp(podA, 5000, beyond, 80, ack), ping(nodeIP, 7, node5IP), sctp(tunnelIP, beyond),
			udp(nodeIP, 4000, beyond, 53).with(func(p *packet) { p.fragment = 100 })} {
			r := b.toTunnel(p).is("stack")
			if !bytes.Equal(r.in, r.frame) || r.mark&mark == 0 {
				t.Errorf("%s: changed %v, mark %#x", describe(r.in), !bytes.Equal(r.in, r.frame), r.mark)
			}
		}
		// The host's route may lead here for a moment after the way to a podCIDR has become a direct one, or none.
		for _, to := range []string{remote, lost, mute} {
			b.toTunnel(udp(nodeIP, 4000, to, 53)).is("stack")
		}
		for _, to := range []string{node2IP, podA, nodeIP, tunnelIP, world, native, nowhere} {
			b.toTunnel(udp(nodeIP, 4000, to, 53)).is("drop NODE_OFF_LINK")
		}
		b.run(wire.ToTunnel, b.tunnel, arp(1, b.uplink.mac, nodeIP, beyond), nil).is("drop NOT_IP")
		broken := udp(nodeIP, 4000, beyond, 53).bytes(b.family)
		broken[14] = 0x44
		b.run(wire.ToTunnel, b.tunnel, broken, nil).is("drop INVALID")
		// Ours have their key, and are passed on unread.
		b.run(wire.ToTunnel, b.tunnel, broken, map[int]uint32{skbMark: mark}).is("stack")
	})
}

// A node that takes one Ethernet address alone gets that.
func TestToTunnelWritesTheInnerMAC(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		v, err := b.destinations.Get(b.key("10.244.5.0/24"))
		must(t, err)
		v.MAC = wire.MAC{2, 0xaa, 0, 0, 0, 5}
		must(t, b.destinations.Put(b.key("10.244.5.0/24"), v))
		r := b.toTunnel(udp(nodeIP, 4000, beyond, 53)).is("stack")
		if !bytes.Equal(r.frame[:6], v.MAC[:]) || !bytes.Equal(r.frame[6:], r.in[6:]) {
			t.Errorf("left as % x", r.frame[:14])
		}
	})
}

// Nobody outside sends to a tunnel's port as this node: the stack would forward it to a node that is reached over a link without our
// programs, which takes it for this node's.
func TestOuterPacketsAsThisNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, to := range []string{nodeIP, node2IP, beyond, world} {
			b.fromUplink(udp(nodeIP, 4000, to, tunnelPort)).is("drop SPOOFED_SOURCE")
			b.fromUplink(udp(node2IP, 4000, to, tunnelPort)).is("stack")
		}
	})
}
