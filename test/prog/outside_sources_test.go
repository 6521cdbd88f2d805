package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Services do not ask each other: what seems to come from one would be answered to it, and that answer served again.
func TestServicesDoNotAskServices(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0).loadBalancer(external, 53, 0)
		b.fromUplink(udp(external, 53, nodeIP, 30053)).is("drop SPOOFED_SOURCE")
		b.fromUplink(udp(node2IP, 30053, nodeIP, 30053)).is("drop SPOOFED_SOURCE")
		b.empty()
		for _, p := range []packet{
			udp(external, 5000, nodeIP, 30053), // the host that has the address outside
			udp(node2IP, 30054, nodeIP, 30053),
			udp(world, 30053, nodeIP, 30053),
		} {
			b.back(b.fromUplink(p).is("delivered"), p).is("forwarded")
		}
	})
}

// Nor does one lead to another: two that do might send each packet to and fro until its TTL has run out.
func TestServicesDoNotLeadToServices(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range map[string]string{
			node2IP + ":30002": "drop NO_BACKEND", // a NodePort
			node2IP + ":443":   "drop NO_BACKEND",
			world2 + ":443":    "drop NO_BACKEND",
			world2 + ":444":    "forwarded",
			node2IP + ":30003": "forwarded",
			node2IP + ":8443":  "forwarded", // where only the Service itself is
			nodeIP + ":30002":  "stack",     // whose sockets are asked
			remote + ":443":    "forwarded", // anybody may claim a pod's address, but there it is the pod's
		} {
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				t.Run(fmt.Sprintf("%v to %s", proto, end), func(t *testing.T) {
					b := newBed(t, f, withServices)
					b.answers = true
					other := b.serve(vip2, 80, proto, podB+":8080").nodePort(30002, 0)
					for _, claimed := range []string{node2IP, world2, remote} {
						other.loadBalancer(claimed, 443, 0)
					}
					b.serve(vip, 80, proto, end).nodePort(30001, 0).also(node2IP, 8443, 0)
					if r := b.fromUplink(initial(proto, world, 5000, nodeIP, 30001)); r.what != want {
						t.Errorf("outcome %q, want %q", r.what, want)
					}
					if want == "drop NO_BACKEND" {
						b.empty()
					}
				})
			}
		}
	})
}

// What a policy of the host's wants encrypted does not pass it by to a backend; what the stack gets it judges itself.
func TestOutsideUnderPolicy(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, want := range away {
			b := newBed(t, f, withServices)
			b.serve(vip, 80, wire.UDP, end+":8080").nodePort(30080, 0)
			b.fromUplink(udp(world, 5000, nodeIP, 30080)).is(want)
			b.giveToStack(world+"/32", destinations.ToStack)
			b.configure(config.Policies)
			if end == nodeIP {
				b.fromUplink(udp(world, 5001, nodeIP, 30080)).is("stack")
				continue
			}
			for port := range uint16(2) { // the first is known
				b.fromUplink(udp(world, 5000+port, nodeIP, 30080)).is("drop IPSEC_POLICY")
			}
			b.count(1, 0)
			b.giveToStack(beyond+"/32", destinations.ToStack|destinations.ByTunnel)
			b.fromTunnel(udp(beyond, 5000, nodeIP, 30080)).is("drop IPSEC_POLICY")
			if end == remote {
				b.giveToStack(world+"/32", 0)
				v := b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("forwarded").view()
				b.giveToStack(remote+"/32", destinations.ToStack)
				b.fromUplink(udp(v.dst, v.dport, v.src, v.sport)).is("drop IPSEC_POLICY")
			}
		}
	})
}

// Who cannot have the source of a packet neither learns of the flow that has its tuple nor renews it.
func TestOutsideJudgedBeforeItsFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.answers = true
		b.serve(vip, 80, wire.TCP, remote+":8080").nodePort(30080, 0)
		b.serve(vip, 53, wire.UDP, podB+":53").nodePort(30053, 0)
		own := tcp(podA, 5000, vip, 80, syn)
		b.fromPod(own).is("forwarded")
		own.flags = ack
		if r := b.fromUplink(own).is("drop SPOOFED_SOURCE"); r.answered() {
			t.Error("whoever has sent it is told of the pod's flow")
		}
		must(t, b.destinations.Put(f.key(node2IP+"/32"), destinations.Value{
			Kind: destinations.Node, Node: b.addr(node2IP), Ifindex: uint32(b.uplink.index), Uplinks: 1 << 1,
		}))
		b.toUplink(udp(nodeIP, 30053, node2IP, 53)).is("stack") // noted
		b.serve(vip, 54, wire.UDP, node2IP+":54").nodePort(30054, 0)
		v := b.fromUplink(udp(world, 5000, nodeIP, 30054)).is("forwarded").view()
		age := func(m *snat.Map) {
			for k, v := range all(b, m) {
				v.LastSeen = past(v.LastSeen, 10*time.Second)
				must(t, m.Put(k, v))
			}
		}
		age(b.snat)
		age(b.reverse)
		before := all(b, b.reverse)
		b.leftToStack("by another uplink than leads there", b.arrive(b.other, udp(node2IP, 53, nodeIP, 30053)))
		b.arrive(b.other, udp(node2IP, 54, nodeIP, v.sport)).is("drop WRONG_UPLINK")
		for k, v := range all(b, b.reverse) {
			if v != before[k] {
				t.Errorf("%v was %+v, is %+v", k, before[k], v)
			}
		}
	})
}

// Nor does who goes straight to a backend, from where a client of a Service has asked it, open a flow with a source that it
// cannot have, or for what only the stack may send on.
func TestOutsideStraightJudged(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withServices)
		b.serve(vip, 80, wire.UDP, remote+":8080").nodePort(30080, 0)
		b.serve(vip2, 80, wire.UDP, nodeIP+":8080").nodePort(30081, 0)
		v := b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("forwarded").view()
		b.fromUplink(udp(nodeIP, v.sport, remote, 8080)).is(map[family]string{inIPv4: "stack", inIPv6: "drop SPOOFED_SOURCE"}[f])
		b.fromUplink(udp(node2IP, 5000, nodeIP, 30081)).is("stack")
		must(t, b.destinations.Put(f.key(node2IP+"/32"), destinations.Value{
			Kind: destinations.Node, Node: b.addr(node2IP), Ifindex: uint32(b.uplink.index), Uplinks: 1 << 1,
		}))
		b.arrive(b.other, udp(node2IP, 5000, nodeIP, 8080)).is("drop WRONG_UPLINK")
		b.count(2, 0)
	})
}
