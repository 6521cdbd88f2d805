package e2e

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// moment is long enough for many datagrams.
const moment = 600 * time.Millisecond

// changes are those of one list after the other, under traffic.
type changes struct {
	begun, done []time.Time
}

// make publishes a list after a moment.
func (c *changes) make(publish func()) {
	time.Sleep(moment)
	c.begun = append(c.begun, time.Now())
	publish()
	c.done = append(c.done, time.Now())
}

// before is the newest change at a time, less than 0 if there was none.
func (c *changes) before(at time.Time) int {
	return sort.Search(len(c.begun), func(i int) bool { return c.begun[i].After(at) }) - 1
}

// probeNumbers are those of the datagrams of a prober in a capture.
func probeNumbers(packets []gopacket.Packet) map[uint64]bool {
	numbers := map[uint64]bool{}
	for _, packet := range packets {
		if udp, ok := packet.TransportLayer().(*layers.UDP); ok && udp.DstPort == backendPort {
			if number, ok := lab.ProbeNumber(udp.Payload); ok {
				numbers[number] = true
			}
		}
	}
	return numbers
}

// after are the probes between a change and the next one.
func (c *changes) after(i int, probes lab.Probes) lab.Probes {
	end := time.Now()
	if i+1 < len(c.begun) {
		end = c.begun[i+1]
	}
	return probes.Between(c.done[i], end)
}

// assertFollowed: what was before a change does not last, and where the machine leaves the agent its time, no longer than 50 ms. lasts
// is how far into the probes after a change that is, negative for ever.
func (c *changes) assertFollowed(t *testing.T, what string, probes lab.Probes, lasts func(change int, after lab.Probes) int) {
	t.Helper()
	var lasted []time.Duration
	for i, done := range c.done {
		span := c.after(i, probes)
		last := lasts(i, span)
		if last < 0 || last >= len(span) {
			t.Errorf("%s: change %d does not reach the packets: %v", what, i, span)
			return
		}
		lasted = append(lasted, max(0, span[last].Sent.Sub(done)))
	}
	if fastest, slowest := slices.Min(lasted), slices.Max(lasted); fastest > priv.Patience(50*time.Millisecond) || slowest > moment-100*time.Millisecond {
		t.Errorf("%s: the changes took %v to reach the packets, want 50 ms or less", what, lasted)
	}
}

// lastAnswer is the place behind the last probe that has been answered by one of some, 0 if none was.
func lastAnswer(probes lab.Probes, by func(netip.AddrPort) bool) int {
	for i, p := range slices.Backward(probes) {
		if by(p.By) {
			return i + 1
		}
	}
	return 0
}

// A client that sends from one port loses nothing when its backend is removed, and sends it nothing more.
func removal(t *testing.T, s *served) func(*testing.T, wire.Family) {
	s.set(t, s.spec("removal", s.near, s.far))
	both := s.named("removal")
	return func(t *testing.T, family wire.Family) {
		s.set(t, both)
		captures := map[*lab.Pod]*lab.Capture{}
		for _, pod := range []*lab.Pod{s.near, s.far} {
			capture, err := pod.Capture(pod.IfName)
			if err != nil {
				t.Fatal(err)
			}
			captures[pod] = capture
		}
		prober, err := s.client.ProbeUDP(s.at("removal", family), 7000, 1000)
		if err != nil {
			t.Fatal(err)
		}
		connect := s.connects(t, s.at("removal", family))
		var turns changes
		removed := []*lab.Pod{s.far, s.near, s.far, s.near}
		for _, pod := range removed {
			alone := s.near
			if pod == s.near {
				alone = s.far
			}
			spec := both
			spec.Endpoints = s.inEachFamily(alone)
			turns.make(s.stage(t, spec))
		}
		time.Sleep(moment)
		probes := prober.Stop()
		arrived := map[*lab.Pod]map[uint64]bool{}
		for pod, capture := range captures {
			arrived[pod] = probeNumbers(capture.Close())
		}
		for i, p := range probes {
			// Answers of a backend that was removed meanwhile are not waited for.
			if change := turns.before(p.Sent); p.Refused || p.Lost() && (change < 0 || !arrived[removed[change]][uint64(i)]) {
				t.Fatalf("while backends are removed: datagram %d: %v", i, probes)
			}
		}
		byRemoved := func(i int, after lab.Probes) int {
			return lastAnswer(after, func(by netip.AddrPort) bool { return by == removed[i].Endpoint(family, backendPort).At })
		}
		turns.assertFollowed(t, "datagrams", probes, byRemoved)
		for _, connections := range connect() {
			if connections.Lost()+connections.Refused() > 0 {
				t.Errorf("while backends are removed: %v", connections)
			}
			turns.assertFollowed(t, "connections", connections, byRemoved)
		}
	}
}

// connects has clients open connections to a Service until the function returned is called: fifty a second, or, in the long form, a
// thousand from twenty pods, of which each is refused as often as it asks.
func (s *served) connects(t *testing.T, to netip.AddrPort) (stop func() []lab.Probes) {
	t.Helper()
	const each, crowd = 50, 20
	if s.clients == nil {
		s.clients = []*lab.Pod{s.client}
		for priv.Long() && len(s.clients) < crowd {
			s.clients = append(s.clients, addPod(t, s.Nodes[0], fmt.Sprintf("client%d", len(s.clients))))
		}
	}
	var probers []*lab.Prober
	for _, client := range s.clients {
		probers = append(probers, client.ProbeTCP(to, each, 3*time.Second))
	}
	return func() (all []lab.Probes) {
		for _, prober := range probers {
			all = append(all, prober.Stop())
		}
		return all
	}
}

// From 50 backends to none and back: every attempt is answered or refused.
func scaling(t *testing.T, s *served) func(*testing.T, wire.Family) {
	const perPod, first = 25, 9000
	full := s.spec("scale")
	for _, pod := range []*lab.Pod{s.near, s.far} {
		for i := range perPod {
			server, err := pod.Serve(uint16(first + i))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(server.Close)
			for _, family := range s.Options.Families {
				full.Endpoints = append(full.Endpoints, pod.Endpoint(family, uint16(first+i)))
			}
		}
	}
	return func(t *testing.T, family wire.Family) {
		empty := full
		empty.Endpoints = nil
		s.set(t, full)
		connect := s.connects(t, s.at("scale", family))
		datagrams, err := s.client.ProbeUDP(s.at("scale", family), 7100, 1000)
		if err != nil {
			t.Fatal(err)
		}
		var turns changes
		for range 2 {
			turns.make(s.stage(t, empty))
			turns.make(s.stage(t, full))
		}
		time.Sleep(moment)
		connections := connect()
		for _, probes := range append(connections, datagrams.Stop()) {
			if before := probes.Between(time.Time{}, turns.begun[0]); before.Lost() > 0 || before.Refused() > 0 {
				t.Errorf("with all backends: %v", before)
			}
			turns.assertFollowed(t, "scaling", probes, func(i int, after lab.Probes) int {
				if i%2 == 0 {
					return lastAnswer(after, netip.AddrPort.IsValid)
				}
				return slices.IndexFunc(after, func(p lab.Probe) bool { return p.By.IsValid() })
			})
		}
		for _, probes := range connections {
			if probes.Lost() > 0 {
				t.Errorf("an attempt got no answer: %v", probes)
			}
		}
	}
}

// A client keeps its backend as long as it comes back in time, and as the backend serves.
func affinityOfClients(t *testing.T, s *served) func(*testing.T, wire.Family) {
	const long, short = 3600, 1 // seconds; nothing here takes as long as the first
	spec := s.spec("affinity", s.near, s.far, s.Nodes[1])
	spec.Affinity = long
	return func(t *testing.T, family wire.Family) {
		s.set(t, spec)
		to := s.at("affinity", family)
		chosen := s.servedBy(t, to)
		for range 20 { // others would be met, but for one of 3^20 times
			if by := s.servedBy(t, to); by != chosen {
				t.Fatalf("a client of %s is served by %s", chosen, by)
			}
		}
		smaller := spec
		smaller.Endpoints = slices.DeleteFunc(slices.Clone(spec.Endpoints), func(e lab.EndpointSpec) bool { return e.At == chosen })
		s.set(t, smaller)
		second := s.servedBy(t, to)
		if second == chosen {
			t.Errorf("a backend that is gone serves: %s", second)
		}
		for range 20 {
			if by := s.servedBy(t, to); by != second {
				t.Fatalf("a client of %s is served by %s", second, by)
			}
		}
		smaller.Affinity = short
		s.set(t, smaller)
		eventually(t, 30*time.Second, "a client that was away meets another", func() bool {
			time.Sleep((short*1000 + 100) * time.Millisecond)
			return s.servedBy(t, to) != second
		})
	}
}

// servedBy is who answers a new connection of the client's.
func (s *served) servedBy(t *testing.T, to netip.AddrPort) netip.AddrPort {
	t.Helper()
	conn, err := s.client.DialTCP(t.Context(), to, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	return conn.By
}

// Clients that send from many pods and ports spread over the backends as chance has it.
func TestServiceSpread(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		const pods, ports, backends, first = 100, 20, 5, 9000
		s := startServed(t, lab.Options{AgentFlags: []string{attach}})
		spec := s.spec("spread")
		for i := range backends {
			if _, err := s.near.Serve(first + uint16(i)); err != nil {
				t.Fatal(err)
			}
			spec.Endpoints = append(spec.Endpoints, s.near.Endpoint(firstFamily(s.Lab), first+uint16(i)))
		}
		s.set(t, spec)
		to := s.at("spread", firstFamily(s.Lab))
		counts := map[netip.AddrPort]int{}
		for i := range pods {
			pod := addPod(t, s.Nodes[0], fmt.Sprintf("client%d", i))
			for range ports {
				by, err := pod.AskUDP(within(t, answerLimit), to)
				if err != nil {
					t.Fatal(err)
				}
				counts[by]++
			}
		}
		// The probability that chance alone is as uneven: that of chi-square with 4 degrees of freedom.
		const expected = float64(pods*ports) / backends
		var chi float64
		for _, endpoint := range spec.Endpoints {
			off := float64(counts[endpoint.At]) - expected
			chi += off * off / expected
		}
		if p := math.Exp(-chi/2) * (1 + chi/2); p < 1e-6 {
			t.Errorf("%d clients are spread like %v, which happens by chance once in %.0f times", pods, counts, 1/p)
		}
	})
}
