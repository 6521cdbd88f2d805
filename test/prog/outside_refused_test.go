package prog

import (
	"bytes"
	"cmp"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// turned asserts that a packet stands in the place of the one that came, and goes back to the neighbour that has sent it.
func (r result) turned(want packet) {
	r.b.Helper()
	want.macTo, want.macFrom = r.in[6:12], r.in[:6]
	if r.act != actRedirect || r.mark&mark == 0 || !bytes.Equal(r.frame, want.bytes(r.b.family)) {
		r.b.Errorf("%s: action %d, mark %#x, answer\n% x, want\n% x", describe(r.in), r.act, r.mark, r.frame, want.bytes(r.b.family))
	}
}

// toldOutside asserts that a dropped packet's sender is told so, from where it had sent it.
func (r result) toldOutside(k kind, mtu int) {
	r.b.Helper()
	sent, err := read(r.in)
	must(r.b, err)
	e := r.b.tooBig(r.in[:ethernet+len(sent.ip)], mtu)
	e.icmpType, e.icmpCode, e.src, e.dst = k[0], k[1], sent.dst, sent.src
	r.turned(e)
}

// Who asks from outside is refused as a pod is, by whichever way it has come.
func TestRefusedOutside(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
			b.declare(vip, 80, proto, services.ClusterIP).nodePort(30080, 0)
		}
		for _, client := range outsiders {
			for at, port := range map[string]uint16{nodeIP: 30080, vip: 80} {
				if client != world && at == vip { // theirs is translated elsewhere
					continue
				}
				b.asks(udp(client, 5000, at, port)).is("drop NO_BACKEND").toldOutside(portUnreachable, 0)
				b.asks(tcp(client, 5000, at, port, syn)).is("drop NO_BACKEND").refuses(0, 1001, rst|ack)
			}
		}
		b.fromUplink(tcp(world, 5000, vip, 81, ack)).is("drop NO_SERVICE_PORT").refuses(2000, 0, rst)
		b.empty()
	})
}

// Nobody is answered who cannot have sent the packet, or has sent it to all; nothing of theirs opens a flow.
func TestOutsideFromNobody(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podB+":8080", remote+":8080").nodePort(30080, 0)
		b.declare(vip2, 80, wire.UDP, services.ClusterIP|services.Answers)
		for _, from := range []string{podA, noPod, podC, nodeIP, nodeOtherIP, "127.0.0.1", nowhere, "0.0.0.0"} {
			for what, p := range map[string]packet{
				"to a NodePort": udp(from, 5000, nodeIP, 30080), "to a ClusterIP": udp(from, 5000, vip, 80),
				"without backends": udp(from, 5000, vip2, 80), "to no port": udp(from, 5000, vip, 81), "a ping": ping(from, 7, vip2),
			} {
				if r := b.fromUplink(p); r.what != "drop SPOOFED_SOURCE" {
					t.Errorf("%s from %s: outcome %q", what, from, r.what)
				}
			}
		}
		b.leftToStack("to all", b.fromUplink(udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.macTo = bytes.Repeat([]byte{0xff}, 6) })))
		b.leftToStack("to a group", b.fromUplink(udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.macTo = []byte{1, 0, 0x5e, 0, 0, 1} })))
		b.empty()
	})
}

// A packet whose TTL runs out here, that does not fit or that only the stack could send on is never the stack's; whoever sent it is told.
func TestOutsideLimits(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, way := range map[string]int{podB: 0, remote: mtu, beyond: tunnelMTU, world2: mtu} {
			t.Run(end, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
				want := map[bool]string{true: "delivered", false: "forwarded"}[end == podB]
				p := udp(world, 5000, nodeIP, 30080)
				r := b.fromUplink(p).is(want)
				back := udp(end, 8080, r.view().src, r.view().sport)
				from := map[bool]func(packet) result{true: b.fromPod, false: b.fromUplink}[end == podB]
				if end == beyond {
					from = b.fromTunnel
				}
				b.answers = true
				last := func(p *packet) { p.ttl = 1 }
				b.fromUplink(p.with(last)).is("drop SERVICE_TTL").toldOutside(timeExceeded, 0)
				b.fromUplink(p.with(func(p *packet) { p.options = true })).is("drop SERVICE_OPTIONS")
				if r := from(back.with(last)).is("drop SERVICE_TTL"); !r.answered() {
					t.Error("the backend is not told")
				}
				from(back.with(func(p *packet) { p.options = true })).is("drop SERVICE_OPTIONS")
				if end != podB {
					large := f.whole(p).with(func(p *packet) { p.payload = make([]byte, way-f.header()-8+1) })
					b.fromUplink(large).is("drop TOO_BIG").toldOutside(kind{3, 4}, way)
					large.payload = large.payload[1:]
					b.fromUplink(large).is("forwarded")
				}
				large := f.whole(back).with(func(p *packet) { p.payload = make([]byte, mtu-f.header()-8+1) })
				if r := from(large).is("drop TOO_BIG"); !r.answered() {
					t.Error("the backend is not told how large its answers may be")
				}
				from(back).is("forwarded").flow(ends(wire.UDP, nodeIP, 30080, world, 5000))
				b.count(1, 0)
			})
		}
	})
}

// What may be fragmented and does not fit the tunnel over IPv4 leaves through it in fragments of the outer packet.
func TestOutsideFragmentsOuterPackets(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	b.serve(vip, 80, wire.UDP, beyond+":8080").nodePort(30080, 0)
	b.fromUplink(udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.payload = make([]byte, 1460) })).is("forwarded")
}

// Where no way of ours leads, the packet goes nowhere.
func TestOutsideWithoutRoute(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{lost, foreign, vip3, bare} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			want := map[string]string{bare: "drop NO_SNAT_ADDRESS"}[end]
			b.fromUplink(udp(world, 5000, nodeIP, 30080)).is(cmp.Or(want, "drop SERVICE_ROUTE"))
		}
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, podB+":8080", podB+":8080").nodePort(30080, 0)
		b.fromUplink(udp(foreign, 5000, nodeIP, 30080)).is("delivered")
		b.fromPod(udp(podB, 8080, foreign, 5000)).is("drop SERVICE_ROUTE")
		b.serve(vip2, 80, wire.UDP, mute+":8080").nodePort(30081, 0)
		b.fromUplink(udp(world, 5000, nodeIP, 30081)).is("forwarded") // the kernel asks for the neighbour
	})
}

// Where an uplink's interface does not forward, as that of a host of IPv6 need not, what goes out of it is sent all the same.
func TestOutsideOfAnUplinkThatDoesNotForward(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		for _, ip := range []string{"ipv4", "ipv6"} {
			must(t, os.WriteFile("/proc/sys/net/"+ip+"/conf/ecprup/forwarding", []byte("0"), 0))
		}
		for end, want := range away {
			b.serve(vip, 80, wire.TCP, end+":8080").nodePort(30080, 0)
			p := tcp(world, 5000, nodeIP, 30080, syn)
			b.back(b.fromUplink(p).is(want), p).flow(ends(wire.TCP, nodeIP, 30080, world, 5000))
			b.sweep(0, 86401e9, false)
		}
	})
}

// Of neighbours that do not answer, the stack is made to ask for few on behalf of the world, and none of them is a pod's.
func TestSilentClients(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, end := range []string{podB, remote} {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			began, asked := time.Now(), 0
			for i := range 150 {
				p := udp("172.16.0."+strconv.Itoa(100+i), 5000, nodeIP, 30080)
				out := b.fromUplink(p).view()
				if r := b.sentBack(end, end, udp(end, 8080, out.src, out.sport)); r.what == "forwarded" {
					asked++
				} else {
					r.is("drop NEIGHBOUR_LIMIT")
				}
			}
			if most := 102 + int(time.Since(began).Seconds()*20); asked < 100 || asked > most {
				t.Errorf("%d clients of %s were asked for, want 100 to %d", asked, end, most)
			}
			b.fromPod(udp(podB, 5000, "172.16.0.99", 53)).is("forwarded") // a pod has an allowance of its own
		}
	})
}

// The world has a hundred answers a second, and pods have theirs whatever it does.
func TestRefusalsOutsideAreLimited(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	b.answers = true
	b.declare(vip, 80, wire.UDP, services.ClusterIP)
	told, began := 0, time.Now()
	for range 300 {
		if b.fromUplink(udp(world, 5000, vip, 80)).is("drop NO_BACKEND").answered() {
			told++
		}
	}
	// A second's worth at once, and what has come to it since.
	if most := 101 + int(100*time.Since(began).Seconds()); told < 100 || told > min(most, 250) {
		t.Errorf("%d of 300 were answered, of %d that may be", told, most)
	}
	if r := b.fromPod(udp(podA, 5000, vip, 80)); !r.answered() {
		t.Error("a pod was not")
	}
}

// How large a packet may be the world is told however much of it has been refused.
func TestRefusalsOutsideLeaveSizes(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.declare(vip, 80, wire.UDP, services.ClusterIP)
		b.serve(vip2, 80, wire.TCP, beyond+":8080").nodePort(30080, 0)
		large := f.whole(tcp(world, 5000, nodeIP, 30080, syn)).with(func(p *packet) { p.payload = make([]byte, tunnelMTU) })
		for range 300 {
			b.fromUplink(udp(world, 5000, vip, 80)).is("drop NO_BACKEND")
		}
		for range 300 {
			b.fromUplink(large).is("drop TOO_BIG").toldOutside(kind{3, 4}, tunnelMTU)
		}
	})
}

// While flow tables are being moved, a segment without a flow is left to the program of the other build, which may have it.
func TestOutsideWhileFlowsMove(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	b.serve(vip, 80, wire.TCP, podB+":8080").loadBalancer(external, 443, 0)
	b.configure(config.FlowsMove)
	b.leftToStack("a segment", b.fromUplink(tcp(world, 5000, external, 443, ack)))
	b.fromUplink(tcp(world, 5000, external, 443, syn)).is("delivered")
}

// Without the agent's record of the world nobody outside is served.
func TestOutsideWithoutRecord(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
	must(t, b.devices.Delete(devices.Key{}))
	b.leftToStack("to a NodePort", b.fromUplink(udp(world, 5000, nodeIP, 30080)))
	b.leftToStack("to a ClusterIP", b.fromUplink(udp(world, 5000, vip, 80)))
	b.leftToStack("by the host", b.toUplink(udp(nodeIP, 5000, vip, 80)))
}

// What could not go on opens no flow.
func TestOutsideJudgedFirst(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		for end := range away {
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			last := udp(world, 5000, nodeIP, 30080).with(func(p *packet) { p.ttl = 1 })
			strange := udp(world, 5001, nodeIP, 30080).with(func(p *packet) { p.options = true })
			if end == nodeIP { // whose stack judges
				b.fromUplink(last).is("stack")
				b.fromUplink(strange).is("stack")
				b.sweep(0, 86401e9, false)
				continue
			}
			b.fromUplink(last).is("drop SERVICE_TTL").toldOutside(timeExceeded, 0)
			b.fromUplink(strange).is("drop SERVICE_OPTIONS")
			b.toUplink(last.with(func(p *packet) { p.src, p.dst, p.dport = container, vip, 80 })).is("drop SERVICE_TTL")
			b.empty()
		}
	})
}
