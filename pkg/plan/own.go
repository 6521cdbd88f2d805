package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// own decides on this node's podCIDRs and InternalIPs. Without an object in the
// list, or with one that says nothing usable, what stands stays: pods live there.
// It says why there is no podCIDR of a family, and what is wrong with those that there are.
func (j *judge) own(n *Node, others []candidate) (s Standing, none [wire.Families]string, wrong string) {
	s.Own, s.NodeIPs = slices.Clone(j.in.Before.Own), slices.Clone(j.in.Before.NodeIPs)
	switch {
	case !j.in.Known:
		none = everyFamily("no complete list of Nodes yet")
	case n == nil:
		none = everyFamily(fmt.Sprintf("no Node %s in the list", j.in.Self))
	case n.Malformed != "":
		none = everyFamily(fmt.Sprintf("Node %s is unreadable: %s", n.Name, n.Malformed))
		j.problem(n.Name, Refused, "unreadable: %s", n.Malformed)
	default:
		if ips := j.ownAddresses(n); len(ips) > 0 {
			s.NodeIPs = ips
		}
		var pods []netip.Prefix
		if pods, none = j.ownPodCIDRs(n, others); len(pods) > 0 {
			s.Own = pods
		}
	}
	for _, own := range s.Own {
		// Its pods talk on; but with that setting it would not have begun, and another node's agent should not either.
		if err := j.inService(own); err != nil {
			wrong = fmt.Sprintf("%v, and pods of this node have addresses in it: --service-cidr or the ServiceCIDR is wrong", err)
		}
	}
	return s, none, wrong
}

func everyFamily(text string) (all [wire.Families]string) {
	for f := range all {
		all[f] = text
	}
	return all
}

// noPodCIDR says why this node has no podCIDR of any family that the cluster has; empty: it has one.
func (j *judge) noPodCIDR(s Standing, none [wire.Families]string) string {
	if len(s.Own) > 0 {
		return ""
	}
	var why []string
	for f, has := range ofPods(j.in.Nodes, j.in.Before) {
		if has && !slices.Contains(why, none[f]) {
			why = append(why, none[f])
		}
	}
	if len(why) == 0 {
		return none[wire.IPv4]
	}
	return strings.Join(why, "; ")
}

func (j *judge) ownAddresses(n *Node) []netip.Addr {
	var ips []netip.Addr
	for _, text := range n.InternalIPs {
		a, err := parseNodeIP("InternalIP", text)
		if err == nil && j.used[wire.FamilyOf(a)] && !j.local.Contains(a) {
			j.away[wire.FamilyOf(a)] = a
			err = fmt.Errorf("InternalIP %s is on no interface of this node", a)
		}
		if err != nil {
			j.problem(n.Name, Refused, "%v", err)
			continue
		}
		if !firstOf(wire.FamilyOf(a), ips).IsValid() {
			ips = append(ips, a)
		}
	}
	return ips
}

// ownPodCIDRs returns at most one usable podCIDR per family, in the Node's order, and why there is none of a family. Where one
// is refused, pods may have addresses in what stood before.
func (j *judge) ownPodCIDRs(n *Node, others []candidate) (pods []netip.Prefix, none [wire.Families]string) {
	for f := range wire.Families {
		none[f] = fmt.Sprintf("Node %s has no %s podCIDR yet", n.Name, f.Name())
	}
	var found Standing
	for _, text := range n.PodCIDRs {
		p, why := j.ownPodCIDR(n, text, others)
		f := familyOfText(text)
		if why != "" {
			none[f], p = why, j.in.Before.PodCIDR(f)
		}
		if p.IsValid() && !found.PodCIDR(f).IsValid() {
			found.Own = append(found.Own, p)
		}
	}
	return found.Own, none
}

// ownPodCIDR judges one podCIDR of this node's, and says why it is refused.
func (j *judge) ownPodCIDR(n *Node, text string, others []candidate) (p netip.Prefix, refused string) {
	p, err := j.podCIDR(n.Name, text)
	if err != nil {
		j.problem(n.Name, Refused, "%v", err)
		return p, fmt.Sprintf("Node %s: %v", n.Name, err)
	}
	if winner := j.strongerClaim(n, p, others); winner != "" {
		refused = fmt.Sprintf("podCIDR %s overlaps one of node %s", p, winner)
		j.problem(n.Name, PodCIDRConflict, "%s", refused)
	}
	return p, refused
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
			bad := Contains(own, a)
			if bad {
				j.problem(c.name, Refused, "InternalIP %s lies in this node's own podCIDR", a)
			}
			return bad
		})
		c.external = slices.DeleteFunc(c.external, func(a netip.Addr) bool { return Contains(own, a) })
	}
}
