package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
)

// report logs what is new among problems and notes, and what is over.
func (c *clusterController) report(s *state) {
	now, news := map[string]bool{}, 0
	isNew := func(key string) bool {
		now[key] = true
		return !c.reported[key]
	}
	for _, p := range c.problems {
		if !isNew("problem " + p.String()) {
			continue
		}
		if news++; news <= mostLines {
			c.log.Warn("problem with a Node", "node", p.Node, "reason", string(p.Reason), "detail", p.Text)
		}
	}
	if news > mostLines {
		c.log.Warn("more problems with Nodes; `ebpfctl status -o json` has them all", "more", news-mostLines)
	}
	for _, text := range s.plan.Notes {
		if isNew("note " + text) {
			c.log.Info("note about a Node", "detail", text)
		}
	}
	for _, own := range s.plan.Standing.Own {
		if text := outsideCluster(own, c.cfg.Cluster); text != "" && isNew(text) {
			c.log.Warn("--cluster-cidr does not contain this node's podCIDR", "detail", text)
		}
	}
	over := 0
	for key := range c.reported {
		if now[key] {
			continue
		}
		if over++; over <= mostLines {
			c.log.Info("no longer the case", "about", key)
		}
	}
	if over > mostLines {
		c.log.Info("nor are others", "more", over-mostLines)
	}
	c.reported = now
}

// listOf is a few things as people write them: one after the other.
func listOf[T fmt.Stringer](all []T) string {
	texts := make([]string, len(all))
	for i, one := range all {
		texts[i] = one.String()
	}
	return strings.Join(texts, ", ")
}

// outsideCluster says what is wrong with a cluster CIDR that is not this cluster's: most often it is another one's default.
func outsideCluster(own netip.Prefix, cluster []netip.Prefix) string {
	cluster = slices.DeleteFunc(slices.Clone(cluster), func(p netip.Prefix) bool { return p.Addr().Is4() != own.Addr().Is4() })
	if !own.IsValid() || len(cluster) == 0 ||
		slices.ContainsFunc(cluster, func(p netip.Prefix) bool { return p.Overlaps(own) && p.Bits() <= own.Bits() }) {
		return ""
	}
	return fmt.Sprintf("podCIDR %s lies outside %v, and packets to there are not masqueraded although no pod has such an address", own, cluster)
}

// reportStack logs, once, on what the host's stack decides although the programs could.
func (c *clusterController) reportStack(s *state) {
	var now [2]string
	if why := s.view.stackRoutes(); why != "" {
		now[0] = "the stack decides: " + why
	}
	if s.plan.Config.Flags&config.Policies != 0 {
		now[1] = "the stack decides on what policies reach" // not how many: they come and go with every tunnel
	}
	for i, about := range []string{"routes", "IPsec"} {
		switch now[i] {
		case c.stack[i]:
		case "":
			c.log.Info("packets take the short way again", "about", about)
		default:
			c.log.Info("packets take the way through the host's stack", "about", about, "reason", now[i])
		}
	}
	c.stack = now
}
