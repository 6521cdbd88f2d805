package device

import (
	"net/netip"
	"testing"
)

func TestNeighbours(t *testing.T) {
	p := newPair(t)
	for _, a := range []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")} {
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macB))
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macA))
		if !hasNeighbour(t, p, a) {
			t.Errorf("no permanent neighbour %s", a)
		}
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		if hasNeighbour(t, p, a) {
			t.Errorf("neighbour %s survived its deletion", a)
		}
	}
}

func hasNeighbour(t *testing.T, p pair, a netip.Addr) bool {
	t.Helper()
	list, err := p.pod.Neighbours(p.peer.Index)
	must(t, err)
	for _, n := range list {
		if n.Is(a, macA) {
			return true
		}
	}
	return false
}
