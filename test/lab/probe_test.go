package lab

import (
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Probers count who answers, what is refused and what is lost.
func TestProbers(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1, Families: []wire.Family{wire.IPv4, wire.IPv6}})
	node := l.Nodes[0]
	server, err := l.Outside.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range l.Options.Families {
		addr := OutsideAddr[family]
		for name, c := range map[string]struct {
			port   uint16
			judged func(Probes) bool
		}{
			"answered": {server.Port, func(p Probes) bool { return p.By()[netip.AddrPortFrom(addr, server.Port)] == len(p) && p.Lost() == 0 }},
			"refused":  {9, func(p Probes) bool { return p.Refused() > 0 && len(p.By()) == 0 }},
		} {
			to := netip.AddrPortFrom(addr, c.port)
			udp, err := node.ProbeUDP(to, 0, 100)
			if err != nil {
				t.Fatal(err)
			}
			// A busy machine may be away for seconds.
			tcp := node.ProbeTCP(to, 100, time.Minute)
			udp.waitFor(10)
			tcp.waitFor(10)
			for kind, p := range map[string]Probes{"UDP": udp.Stop(), "TCP": tcp.Stop()} {
				if len(p) < 10 || !c.judged(p) {
					t.Errorf("%v, %s, %s: %v", family, kind, name, p)
				}
			}
		}
		lost, err := node.ProbeUDP(netip.AddrPortFrom(OutsideAddr[family].Next(), server.Port), 0, 100)
		if err != nil {
			t.Fatal(err)
		}
		lost.waitFor(1)
		if p := lost.Stop(); len(p) == 0 || len(p.By()) > 0 {
			t.Errorf("%v, to nobody: %v", family, p)
		}
	}
}

// waitFor waits a while for so many questions.
func (p *Prober) waitFor(number int) {
	for end := time.Now().Add(10 * time.Second); p.questions() < number && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

func (p *Prober) questions() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.probes)
}
