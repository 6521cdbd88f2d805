package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A pod that gets the address of one that was a backend neither gets what was for that nor speaks for it, whoever has asked;
// what follows chooses anew.
func TestBackendsSuccessor(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for end, other := range map[string]string{podB: podC, podC: podB} {
			for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
				for client, ask := range map[string]func(*bed, packet) result{world: (*bed).fromUplink, podA: (*bed).fromPod} {
					b := newBed(t, f, withServices)
					b.serve(vip, 80, proto, end+":8080").nodePort(30080, 0)
					p := initial(proto, client, 5000, nodeIP, 30080)
					r := ask(b, p).is("delivered")
					answer := p.replied().with(func(p *packet) { p.src, p.sport, p.flags = end, 8080, syn|ack })
					answer.dst, answer.dport = r.view().src, r.view().sport
					if client == world {
						b.fromPod(answer).is("forwarded")
					}
					b.giveAway(end, other)
					ask(b, initial(proto, client, 5001, nodeIP, 30080)).is("delivered") // it is a backend now, too
					if client == world {
						if got := b.fromPodAt(other, answer); got.what == "forwarded" && got.view().src == nodeIP && got.view().sport == 30080 {
							t.Errorf("the new pod at %s answers %s", end, got.view())
						}
					}
					p.flags = ack
					b.answers = true
					if got := ask(b, p); got.what == "delivered" || got.what == "stack" {
						t.Errorf("%v: the new pod at %s gets a packet: %s", proto, end, got.what)
					}
					b.answers = false
					p.flags = syn
					ask(b, p).is("delivered").flow(ends(proto, r.view().src, r.view().sport, end, 8080))
				}
			}
		}
	})
}
