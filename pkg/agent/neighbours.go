package agent

import (
	"fmt"
	"net/netip"
	"strconv"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// neighbourTable is the reason of a problem of this node itself.
const neighbourTable plan.Reason = "neighbour_table"

// neighboursMax is how many neighbours the kernel keeps, of all network namespaces together. Only the first namespace,
// the host's, has the setting.
const neighboursMax = "net/ipv4/neigh/default/gc_thresh3"

// checkNeighbours adds a problem where the kernel can't keep all nodes that packets go straight to as neighbours: each one
// more takes the place of another, whose packets are lost meanwhile.
func (c *clusterController) checkNeighbours(s *state) {
	hops := map[netip.Addr]bool{}
	for _, route := range s.plan.Routes {
		if route.Via.IsValid() {
			hops[route.Via] = true
		}
	}
	text, err := device.Sysctl{Dir: c.cfg.ProcSys}.Get(neighboursMax)
	if err != nil {
		return // not the first namespace
	}
	most, err := strconv.Atoi(text)
	if err != nil || len(hops) < most {
		return
	}
	c.problems = append(c.problems, plan.Problem{Node: c.cfg.Node, Reason: neighbourTable, Text: fmt.Sprintf(
		"the kernel keeps at most %d neighbours, and packets go straight to %d nodes: some are lost; "+
			"raise the sysctl net.ipv4.neigh.default.gc_thresh3, as tools/deploy/large-clusters.md tells", most, len(hops))})
}
