package e2e

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// assertNodePortsOutlive the agent: clients outside go on to open connections through a node, to backends of another one, while the
// first node's agent is killed, stays dead, comes back, and in the long form is upgraded: a thousand a second then, and dead for five minutes.
func (s *served) assertNodePortsOutlive(t *testing.T, assertDead func()) {
	t.Helper()
	rate, dead := 50, time.Second
	if priv.Long() {
		rate, dead = 1000, 5*time.Minute
	}
	spec := s.spec("far", s.far)
	for port := uint16(backendPort + 1); port < backendPort+4; port++ {
		server, err := s.far.Serve(port)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Close)
		for _, family := range families {
			spec.Endpoints = append(spec.Endpoints, s.far.Endpoint(family, port))
		}
	}
	spec.NodePort = nodePorts
	s.set(t, spec)
	var probers []*lab.Prober
	for _, family := range families {
		to := netip.AddrPortFrom(s.Nodes[0].AddrOf(family), nodePorts)
		probers = append(probers, s.Outside.ProbeTCP(to, rate/len(families), 3*time.Second))
	}
	time.Sleep(moment)
	s.replaceAgent(t, func() { assertDead(); time.Sleep(dead) })
	time.Sleep(moment)
	for i, prober := range probers {
		assertAllAnswered(t, families[i], prober.Stop(), len(spec.Endpoints)/len(families))
	}
}

// replaceAgent kills the first node's agent, does something, starts it again, and in the long form starts that of another build.
func (s *served) replaceAgent(t *testing.T, meanwhile func()) {
	t.Helper()
	node := s.Nodes[0]
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	meanwhile()
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	if !priv.Long() {
		return
	}
	dir := build(t, []edit{otherPrograms()}, map[string]string{"bpf/changed.go": programsThatDiffer}, "ebpf-agent", "ebpf-cni")
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgentBinary(filepath.Join(dir, "ebpf-agent")); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
}

// assertAllAnswered: no connection was refused or lost, and each backend had some.
func assertAllAnswered(t *testing.T, family wire.Family, probes lab.Probes, backends int) {
	t.Helper()
	by := map[netip.AddrPort]int{}
	var refused, lost int
	for _, p := range probes {
		switch {
		case p.Refused:
			refused++
		case p.Lost():
			lost++
		default:
			by[p.By]++
		}
	}
	t.Logf("%v: %d connections: %v", family, len(probes), by)
	if refused+lost != 0 || len(by) != backends {
		t.Errorf("%v: of %d connections %d were refused and %d lost; answers by %v, want %d backends", family, len(probes), refused, lost, by, backends)
	}
}
