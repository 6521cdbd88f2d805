package e2e

import (
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/lab/shortconn"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// A pod opens more short connections to one place than the node has ports, and none fails, however they end.
func TestShortConnections(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		forEachFamily(t, func(t *testing.T, family []wire.Family) {
			l := startCluster(t, lab.Options{Nodes: 1, Families: family, AgentFlags: []string{attach, "--snat-ports=50000-52047"}})
			o := shortconn.Options{
				Clients: []*lab.Namespace{addPod(t, l.Nodes[0], "a").Namespace},
				Server:  l.Outside,
				At:      netip.AddrPortFrom(l.Outside.AddrOf(family[0]), 8080),
				For:     priv.Patience(30 * time.Second),
			}
			for way, count := range map[shortconn.Way]uint64{
				shortconn.ResetByClient: 3000, shortconn.ResetByServer: 3000, shortconn.FinByClient: 2500, shortconn.FinByServer: 2500, shortconn.Question: 5000,
			} {
				o.Way, o.Count = way, count
				o.At = netip.AddrPortFrom(o.At.Addr(), o.At.Port()+1)
				result, err := shortconn.Run(t.Context(), o)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%s: %v", way, result)
				if result.Failed > 0 || result.Completed != count {
					t.Errorf("%s: %v", way, result)
				}
			}
		})
	})
}
