package e2e

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// A pod that sends to every address of the node's link leaves the node's table of neighbours nearly as it was: it is the whole
// host's, and the node itself needs room there.
func TestPodSendsToSilentNeighbours(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: families}, drops.NeighbourLimit)
	node := l.Nodes[0]
	pod := addPod(t, node, "a")
	for family := range wire.Families {
		network := lab.FabricPrefix[family].Addr().AsSlice()
		for i := range 150 {
			network[len(network)-1] = byte(100 + i)
			to, _ := netip.AddrFromSlice(network)
			conn, err := pod.DialUDP(netip.AddrPortFrom(to, 53), 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write([]byte("anybody?")); err != nil {
				t.Fatal(err)
			}
			conn.Close()
		}
	}
	asked, err := lab.RetryInterrupted(func() ([]netlink.Neigh, error) { return node.Netlink().NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		t.Fatal(err)
	}
	silent := 0
	for _, n := range asked {
		if n.State&(netlink.NUD_INCOMPLETE|netlink.NUD_FAILED) != 0 {
			silent++
		}
	}
	if silent == 0 || silent > 150 {
		t.Errorf("%d neighbours that do not answer in the node's table, of 300 addresses", silent)
	}
}
