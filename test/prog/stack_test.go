package prog

import (
	"bytes"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
)

// giveToStack has the host's stack decide on a prefix, as the agent does for one under a policy.
func (b *bed) giveToStack(what string, flags destinations.Flags) {
	b.Helper()
	key := b.key(what)
	v, err := b.destinations.Get(key) // the longest match
	if err != nil {
		v = destinations.Value{}
	}
	v.Flags = flags
	must(b, b.destinations.Put(key, v))
}

// leftToStack runs a packet and wants it passed on as it came.
func (b *bed) leftToStack(what string, r result) {
	b.Helper()
	if r.what != "stack" || !bytes.Equal(r.in, r.frame) {
		b.Errorf("%s: outcome %q, changed %v; want it left to the stack", what, r.what, !bytes.Equal(r.in, r.frame))
	}
}

// What the stack decides on takes no shortcut, in neither direction, and the host sees it as it came.
func TestStackDecidesOnADestination(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for what, other := range map[string]string{
			"world": world, "a pod of another node": remote, "another node": node2IP, "native": native, "a pod outside the podCIDR": podC,
		} {
			t.Run(what, func(t *testing.T) {
				b := newBed(t, f, withPaths(time.Second))
				b.giveToStack(other+"/32", destinations.ToStack)
				for range 2 {
					b.leftToStack("to it", b.fromPod(tcp(podA, 5000, other, 80, syn)))
					if other != podC {
						b.leftToStack("from it", b.fromUplink(tcp(other, 4000, podA, 80, syn)))
					}
				}
				if what != "world" { // whose flow is recorded
					b.empty()
				}
			})
		}
		b := newBed(t, f)
		b.giveToStack("10.244.1.0/24", destinations.ToStack)
		b.fromUplink(tcp(podB, 4000, podA, 80, syn)).is("drop SPOOFED_SOURCE")
		b.fromUplink(tcp(nodeIP, 4000, podA, 80, syn)).is("drop SPOOFED_SOURCE")
	})
}

// Where the stack decides on this node's podCIDR, or on routes, it does so both ways.
func TestStackDecidesOnThePodCIDRAndOnRoutes(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			flags config.Flags
			own   string
		}{
			"podCIDR": {config.PodCIDRToStack, "stack"},
			"routes":  {config.RoutesToStack, "delivered"},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, withPaths(time.Second))
				b.fromPod(tcp(podA, 5000, remote, 80, syn)).is("forwarded") // what was found is not kept then
				b.configure(c.flags)
				b.fromPod(tcp(podA, 5000, podB, 80, syn)).is(c.own)
				for _, other := range []string{remote, node2IP, native} {
					b.leftToStack("from "+other, b.fromUplink(tcp(other, 4000, podA, 80, syn)))
					if c.flags == config.RoutesToStack {
						b.leftToStack("to "+other, b.fromPod(tcp(podA, 5000, other, 80, syn)))
					}
				}
				b.leftToStack("from the world", b.fromUplink(tcp(world, 4000, podA, 80, syn)))
				b.fromUplink(tcp(podB, 4000, podA, 80, syn)).is("drop SPOOFED_SOURCE")
				b.fromUplink(tcp(world, 4000, noPod, 80, syn)).is("drop NO_ENDPOINT")
			})
		}
	})
}

// toStackBy is the two ways in which the stack comes to decide on the world.
func toStackBy(b *bed) map[string]func() {
	return map[string]func(){
		"policy": func() { b.giveToStack(world+"/32", destinations.ToStack); b.configure(config.Policies) },
		"routes": func() { b.configure(config.RoutesToStack) },
	}
}

// A flow to the world that the stack decides on is masqueraded where it leaves, and its replies walk the stack.
func TestStackDecidesOnANewFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, how := range []string{"policy", "routes"} {
			t.Run(how, func(t *testing.T) {
				b := newBed(t, f)
				toStackBy(b)[how]()
				p := udp(podA, 50000, world, 53)
				b.leftToStack("out of the pod", b.fromPod(p))
				out := b.toUplink(p).is("stack").flow("udp " + nodeIP + ":50000 > " + world + ":53").valid()
				b.fromUplink(answer(out, p)).is("stack").flow("udp " + world + ":53 > " + podA + ":50000").valid()
			})
		}
	})
}

// A flow that is older goes on, and walks the stack both ways from its next packet on.
func TestStackDecidesOnAnOlderFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, how := range []string{"policy", "routes"} {
			t.Run(how, func(t *testing.T) {
				b := newBed(t, f)
				p := udp(podA, 50000, world, 53)
				out := b.fromPod(p).is("forwarded")
				b.fromUplink(answer(out, p)).is("delivered")
				toStackBy(b)[how]()
				if how == "policy" { // whose check the reply must not escape, though the pod is silent
					b.fromUplink(answer(out, p)).is("stack")
				}
				b.leftToStack("out of the pod", b.fromPod(p))
				b.toUplink(p).is("stack").flow("udp " + nodeIP + ":50000 > " + world + ":53")
				b.fromUplink(answer(out, p)).is("stack").flow("udp " + world + ":53 > " + podA + ":50000").valid()
				for k, v := range all(b, b.snat) {
					if v.Flags&^flow.Counted != flow.ViaStack {
						t.Errorf("%v: flags %v", k, v.Flags)
					}
				}
			})
		}
	})
}

// What the world opens is recorded all the same, so that the replies leave as they are.
func TestStackDecidesOnAWorldsFlow(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, how := range []string{"policy", "routes"} {
			for _, older := range []bool{false, true} {
				b := newBed(t, f)
				if older {
					b.fromUplink(tcp(world, 4000, podA, 80, syn)).is("delivered")
				}
				toStackBy(b)[how]()
				b.leftToStack("in", b.fromUplink(tcp(world, 4000, podA, 80, syn)))
				reply := tcp(podA, 80, world, 4000, syn|ack)
				b.leftToStack("out of the pod", b.fromPod(reply))
				b.leftToStack("out of the uplink", b.toUplink(reply))
				for k, v := range all(b, b.conntrack) {
					if v.Flags != flow.ViaStack {
						t.Errorf("%s, older %v: %v: flags %v", how, older, k, v.Flags)
					}
				}
			}
		}
	})
}

// A packet that only masquerading brings under a policy would leave in clear: it does not leave.
func TestMasqueradedPacketThatAPolicyProtects(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		older := udp(podA, 50000, world, 53)
		b.fromPod(older).is("forwarded")
		b.fromUplink(tcp(world, 4000, podA, 80, syn)).is("delivered")
		b.giveToStack(world+"/32", destinations.ToStack|destinations.Protected)
		b.configure(config.Policies)
		b.leftToStack("out of the pod", b.fromPod(older))
		b.toUplink(older).is("drop IPSEC_POLICY")
		b.toUplink(udp(podB, 5000, world, 53)).is("drop IPSEC_POLICY")
		b.toUplink(udp(podB, 5000, world2, 53)).is("stack")
		b.toUplink(tcp(podA, 80, world, 4000, syn|ack)).is("stack").flow("tcp " + podA + ":80 > " + world + ":4000")
		b.toUplink(udp(nodeIP, 5000, world, 53)).is("stack") // the kernel has judged it
	})
}

// No route leads from pod to pod of this node, wherever their addresses lie: both directions take the shortcut.
func TestRoutesByTheStackSparePodsOfTheNode(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.configure(config.RoutesToStack)
		b.fromPod(tcp(podA, 5000, podC, 80, syn)).is("delivered")
		b.fromPod(tcp(podC, 80, podA, 5000, syn|ack)).is("delivered")
	})
}

// What comes from where a policy of the host's holds is the stack's, an ICMP error too, whatever that quotes.
func TestErrorFromUnderAPolicy(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.giveToStack(world+"/32", destinations.ToStack)
		b.configure(config.Policies)
		for _, to := range []string{world2, remote} {
			b.fromUplink(icmpError(world, podA, 3, 3, udp(podA, 5000, to, 53).bytes(b.family), 8)).is("stack")
		}
	})
}
