package agent

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// neighbourTable is the reason of a problem of this node itself.
const neighbourTable plan.Reason = "neighbour_table"

// neighboursMax is how many neighbours of a family the kernel keeps, of all network namespaces together. Only the first namespace,
// the host's, has the setting.
func neighboursMax(f wire.Family) string { return "net/" + f.String() + "/neigh/default/gc_thresh3" }

// checkNeighbours adds a problem where the kernel can't keep all nodes that packets go straight to as neighbours: each one
// more takes the place of another, whose packets are lost meanwhile.
func (c *clusterController) checkNeighbours(s *state) {
	var hops [wire.Families]map[netip.Addr]bool
	for f := range hops {
		hops[f] = map[netip.Addr]bool{}
	}
	for _, route := range s.plan.Routes {
		if route.Via.IsValid() {
			hops[wire.FamilyOf(route.Via)][route.Via] = true
		}
	}
	for f := range wire.Families {
		c.checkNeighboursOf(f, hops[f])
	}
}

func (c *clusterController) checkNeighboursOf(f wire.Family, hops map[netip.Addr]bool) {
	text, err := device.Sysctl{Dir: c.cfg.ProcSys}.Get(neighboursMax(f))
	if err != nil {
		return // not the first namespace
	}
	most, err := strconv.Atoi(text)
	if err != nil || len(hops) < most {
		return
	}
	c.problems = append(c.problems, plan.Problem{Node: c.cfg.Node, Reason: neighbourTable, Text: fmt.Sprintf(
		"the kernel keeps at most %d neighbours, and packets go straight to %d nodes: some are lost; "+
			"raise the sysctl %s, as tools/deploy/large-clusters.md tells", most, len(hops), strings.ReplaceAll(neighboursMax(f), "/", "."))})
}
