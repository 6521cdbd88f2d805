package datapath

import (
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// The world has an entry among pods' and no link; what has no interface is on sockets.
func TestPlacesAreOfLinks(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	places, err := knownPlaces(n.opts)
	check(t, err)
	for _, pod := range n.pods {
		if !slices.Contains(places, attach.Place{Ifindex: pod, Hook: attach.FromPod}) {
			t.Errorf("pod %d is not among %v", pod, places)
		}
	}
	if slices.ContainsFunc(places, func(p attach.Place) bool {
		return p.Ifindex == devices.World && !slices.Contains(attach.SocketHooks(), p.Hook)
	}) {
		t.Errorf("the world is among %v", places)
	}
}
