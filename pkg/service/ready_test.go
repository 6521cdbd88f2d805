package service

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestReadyOn(t *testing.T) {
	slice := func(ports int, endpoints ...Endpoint) *Slice {
		s := &Slice{Endpoints: endpoints}
		for i := range ports {
			s.Ports = append(s.Ports, SlicePort{Protocol: wire.TCP, Port: uint16(8080 + i)})
		}
		return s
	}
	on := func(node, address string, conditions ...func(*Endpoint)) Endpoint {
		e := Endpoint{Address: netip.MustParseAddr(address), Ready: true, Serving: true, Node: node}
		for _, change := range conditions {
			change(&e)
		}
		return e
	}
	notReady := func(e *Endpoint) { e.Ready, e.Serving = false, false }
	terminating := func(e *Endpoint) { e.Ready, e.Terminating = false, true }
	for _, c := range []struct {
		what   string
		slices []*Slice
		want   int
	}{
		{"none", nil, 0},
		{"two, and others'", []*Slice{slice(1, on("n1", "10.0.1.1"), on("n1", "10.0.1.2"), on("n2", "10.0.2.1"), on("", "10.0.3.1"))}, 2},
		{"not ready", []*Slice{slice(1, on("n1", "10.0.1.1", notReady), on("n1", "10.0.1.2"))}, 1},
		{"terminating, though it is the last that serves", []*Slice{slice(1, on("n1", "10.0.1.1", terminating))}, 0},
		{"several ports", []*Slice{slice(2, on("n1", "10.0.1.1")), slice(1, on("n1", "10.0.1.1"))}, 1},
		{"ready in one of two slices", []*Slice{slice(1, on("n1", "10.0.1.1", notReady)), slice(1, on("n1", "10.0.1.1"))}, 1},
		{"both families", []*Slice{slice(1, on("n1", "10.0.1.1"), on("n1", "10.0.1.2")), slice(1, on("n1", "fd00::1"), on("n1", "fd00::2"), on("n1", "fd00::3"))}, 3},
		{"no port", []*Slice{slice(0, on("n1", "10.0.1.1"))}, 0},
	} {
		if got := ReadyOn("n1", c.slices); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
	if got := ReadyOn("", []*Slice{slice(1, on("", "10.0.3.1"))}); got != 0 {
		t.Errorf("of no node: %d", got)
	}
}
