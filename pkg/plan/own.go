package plan

import (
	"fmt"
	"net/netip"
	"slices"
)

// own decides on this node's podCIDRs and InternalIPs. Without an object in the
// list, or with one that says nothing usable, what stands stays: pods live there.
func (j *judge) own(n *Node, others []candidate) (s Standing, why string) {
	s.Own, s.NodeIPs = slices.Clone(j.in.Before.Own), slices.Clone(j.in.Before.NodeIPs)
	switch {
	case !j.in.Known:
		why = "no complete list of Nodes yet"
	case n == nil:
		why = fmt.Sprintf("no Node %s in the list", j.in.Self)
	case n.Malformed != "":
		why = fmt.Sprintf("Node %s is unreadable: %s", n.Name, n.Malformed)
		j.problem(n.Name, Refused, "unreadable: %s", n.Malformed)
	default:
		if ips := j.ownAddresses(n); len(ips) > 0 {
			s.NodeIPs = ips
		}
		var pods []netip.Prefix
		if pods, why = j.ownPodCIDRs(n, others); len(pods) > 0 {
			s.Own = pods
		}
	}
	if own := s.Own4(); own.IsValid() {
		why = ""
		// Its pods talk on; but with that setting it would not have begun, and another node's agent should not either.
		if err := j.inService(own); err != nil {
			why = fmt.Sprintf("%v, and pods of this node have addresses in it: --service-cidr is wrong", err)
		}
	}
	return s, why
}

func (j *judge) ownAddresses(n *Node) []netip.Addr {
	var ips []netip.Addr
	for _, text := range n.InternalIPs {
		a, err := parseNodeIP("InternalIP", text)
		// Which IPv6 addresses are local is not looked at yet.
		if err == nil && a.Is4() && !j.local.Contains(a) {
			err = fmt.Errorf("InternalIP %s is on no interface of this node", a)
		}
		if err != nil {
			j.problem(n.Name, Refused, "%v", err)
			continue
		}
		if !slices.ContainsFunc(ips, func(b netip.Addr) bool { return b.Is4() == a.Is4() }) {
			ips = append(ips, a)
		}
	}
	return ips
}

// ownPodCIDRs returns at most one usable podCIDR per family, and when there is
// no IPv4 one the reason.
func (j *judge) ownPodCIDRs(n *Node, others []candidate) (pods []netip.Prefix, why string) {
	why = fmt.Sprintf("Node %s has no IPv4 podCIDR yet", n.Name)
	for _, text := range n.PodCIDRs {
		p, err := j.podCIDR(n.Name, text)
		if err != nil {
			j.problem(n.Name, Refused, "%v", err)
			why = fmt.Sprintf("Node %s: %v", n.Name, err)
			continue
		}
		if winner := j.strongerClaim(n, p, others); winner != "" {
			why = fmt.Sprintf("podCIDR %s overlaps one of node %s", p, winner)
			j.problem(n.Name, PodCIDRConflict, "%s", why)
			continue
		}
		if !slices.ContainsFunc(pods, func(q netip.Prefix) bool { return q.Addr().Is4() == p.Addr().Is4() }) {
			pods = append(pods, p)
		}
	}
	slices.SortFunc(pods, func(a, b netip.Prefix) int { return a.Addr().BitLen() - b.Addr().BitLen() })
	return pods, why
}

// strongerClaim returns the node whose claim beats a new one of ours, and why, by
// the same rules as among others. What we already have is never given up: pods
// live there.
func (j *judge) strongerClaim(n *Node, p netip.Prefix, others []candidate) string {
	if slices.Contains(j.in.Before.Own, p) {
		return ""
	}
	ours := candidate{created: n.Created, index: j.ownIndex}
	for _, c := range others {
		if _, overlaps := overlapsAny(p, c.pods); !overlaps || len(c.internal) == 0 || compare(c, ours) > 0 {
			continue
		}
		switch {
		case age(c, ours) < 0:
			return c.name + ", which is older"
		case c.standing:
			return c.name + ", whose claim is in force"
		}
		return c.name + ", which comes first in the list"
	}
	return ""
}

// apart refuses what overlaps this node's own podCIDRs.
func (j *judge) apart(own []netip.Prefix, others []candidate) {
	for i := range others {
		c := &others[i]
		c.pods = slices.DeleteFunc(c.pods, func(p netip.Prefix) bool {
			q, bad := overlapsAny(p, own)
			if bad {
				j.problem(c.name, Refused, "podCIDR %s overlaps %s, this node's own", p, q)
			}
			return bad
		})
		c.internal = slices.DeleteFunc(c.internal, func(a netip.Addr) bool {
			bad := containsAddr(own, a)
			if bad {
				j.problem(c.name, Refused, "InternalIP %s lies in this node's own podCIDR", a)
			}
			return bad
		})
		c.external = slices.DeleteFunc(c.external, func(a netip.Addr) bool { return containsAddr(own, a) })
	}
}
