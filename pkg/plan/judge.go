package plan

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gaissmai/bart"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// mostAddresses is how many addresses of a kind a Node may have, each of which takes an entry of every node's map.
const mostAddresses = 16

// candidate is a Node whose values have been parsed.
type candidate struct {
	name     string
	created  time.Time
	index    int // in the list
	standing bool
	internal []netip.Addr
	external []netip.Addr
	pods     []netip.Prefix
	macs     [wire.Families]wire.MAC // of the tunnel's end, by the family of outer packets
}

func (c candidate) hasPods(f wire.Family) bool {
	return slices.ContainsFunc(c.pods, func(p netip.Prefix) bool { return wire.FamilyOf(p.Addr()) == f })
}

// judge decides whose claims are good.
type judge struct {
	in       Input
	used     FamilySet
	ownIndex int                 // of this node in the list
	inForce  map[netip.Addr]bool // by which nodes were reached before
	hops     *addressSet         // made when first asked for
	routes   *bart.Table[KernelRoute]
	others   *bart.Table[KernelRoute] // those of other tables, made when first asked for
	local    *bart.Lite
	away     [wire.Families]netip.Addr // this node's InternalIPs that are on no interface of it
	problems []Problem
	notes    []string
}

// newJudge indexes what is asked for each Node.
func newJudge(in Input) *judge {
	j := &judge{in: in, used: Used(in.Self, in.Nodes, in.Before, in.Facts.Lacks), inForce: map[netip.Addr]bool{}, routes: &bart.Table[KernelRoute]{}, local: &bart.Lite{}}
	for _, via := range in.Before.Claims {
		j.inForce[via] = true
	}
	for _, r := range in.Facts.Routes {
		j.routes.Modify(r.Dst, func(first KernelRoute, there bool) (KernelRoute, bool) {
			if there { // with the better metric
				return first, false
			}
			return r, false
		})
	}
	for _, p := range in.Facts.Local {
		j.local.Insert(p)
	}
	return j
}

func (j *judge) problem(node string, why Reason, format string, args ...any) {
	j.problems = append(j.problems, Problem{node, why, fmt.Sprintf(format, args...)})
}

// split separates this node's object from the others'; of two with one name the
// first counts.
func (j *judge) split() (own *Node, others []candidate) {
	seen := make(map[string]bool, len(j.in.Nodes))
	for i := range j.in.Nodes {
		n := &j.in.Nodes[i]
		for _, text := range n.Doubts {
			j.problem(n.Name, Refused, "%s", text)
		}
		switch {
		case seen[n.Name]:
			j.problem(n.Name, Refused, "a second Node of that name, items[%d], is ignored", i)
		case n.Name == j.in.Self:
			own, j.ownIndex = n, i
		case n.Malformed != "":
			j.problem(n.Name, Refused, "unreadable: %s", n.Malformed)
		default:
			others = append(others, j.parse(n, i))
		}
		seen[n.Name] = true
	}
	return own, others
}

// parse reads the values of another node's object, without a look at the others'.
func (j *judge) parse(n *Node, index int) candidate {
	c := candidate{name: n.Name, created: n.Created, index: index, macs: n.TunnelMACs}
	if len(n.InternalIPs) > mostAddresses {
		j.problem(n.Name, Refused, "%d InternalIPs: only the first %d count", len(n.InternalIPs), mostAddresses)
	}
	for _, s := range n.InternalIPs[:min(len(n.InternalIPs), mostAddresses)] {
		a, err := j.internalIP(s)
		if q, service := overlapsAny(host(a), j.in.Service); err == nil && service {
			err = fmt.Errorf("InternalIP %s is in the service CIDR %s", a, q)
			if j.inForce[a] {
				j.problem(n.Name, Refused, "%v; it is in force and stays: is --service-cidr or the ServiceCIDR wrong?", err)
				err = nil
			}
		}
		if err != nil {
			j.problem(n.Name, Refused, "%v", err)
			continue
		}
		c.internal = append(c.internal, a)
	}
	for _, s := range n.ExternalIPs[:min(len(n.ExternalIPs), mostAddresses)] {
		// Never used to reach a node; only kept free of pods.
		if a, err := parseNodeIP("ExternalIP", s); err == nil {
			c.external = append(c.external, a)
		}
	}
	for _, s := range n.PodCIDRs {
		p, err := j.podCIDR(n.Name, s)
		via, claimed := j.in.Before.Claims[p]
		standing := claimed && slices.Contains(c.internal, via)
		switch {
		case errors.As(err, new(serviceError)) && standing:
			j.problem(n.Name, PodCIDRConflict, "%v; it is in force and stays: is --service-cidr or the ServiceCIDR wrong?", err)
		case err != nil:
			j.problem(n.Name, Refused, "%v", err)
			continue
		}
		c.pods = append(c.pods, p)
		c.standing = c.standing || standing
	}
	j.remark(n, c)
	return c
}

// internalIP reads an address under which another node can be reached, and refuses what can't be one here.
func (j *judge) internalIP(s string) (netip.Addr, error) {
	a, err := parseNodeIP("InternalIP", s)
	if err != nil {
		return a, err
	}
	if j.local.Contains(a) {
		return a, fmt.Errorf("InternalIP %s is an address of this node", a)
	}
	if r, found := j.route(a); found && r.OnLink && isShared(a, r.Dst) {
		return a, fmt.Errorf("InternalIP %s is the broadcast address of %s, or that of all its routers", a, r.Dst)
	}
	return a, nil
}

// remark says what is missing rather than wrong.
func (j *judge) remark(n *Node, c candidate) {
	if len(n.InternalIPs) == 0 {
		j.problem(n.Name, Refused, "no InternalIP: the node can't be reached")
	} else if len(n.PodCIDRs) == 0 {
		j.notes = append(j.notes, fmt.Sprintf("node %s has no podCIDR yet", c.name))
	}
}

// podCIDR reads a podCIDR and refuses what can't be one here.
func (j *judge) podCIDR(node, s string) (netip.Prefix, error) {
	p, err := parsePodCIDR(s)
	if err != nil {
		return p, err
	}
	if written, err := netip.ParsePrefix(s); err == nil && written != p {
		j.notes = append(j.notes, fmt.Sprintf("podCIDR %s of node %s is read as %s", s, node, p))
	}
	return p, j.allowed(p)
}

// serviceError refuses a podCIDR by a setting alone. It may be the setting that is wrong, as pods that talk already show.
type serviceError struct{ pods, service netip.Prefix }

func (e serviceError) Error() string {
	return fmt.Sprintf("podCIDR %s overlaps the service CIDR %s", e.pods, e.service)
}

// inService returns a serviceError for what overlaps a service CIDR.
func (j *judge) inService(p netip.Prefix) error {
	if q, bad := overlapsAny(p, j.in.Service); bad {
		return serviceError{p, q}
	}
	return nil
}

// held says which addresses of this node a podCIDR overlaps, and on which links they are: but for those of bridges whose containers
// have addresses of it.
func (j *judge) held(p netip.Prefix) string {
	var all []string
	for _, q := range j.in.Facts.Local {
		if p.Overlaps(q) && !j.bridged(p, q.Addr()) {
			all = append(all, cmp.Or(j.in.Facts.Holders[q.Addr()], "it")+" has "+q.Addr().String())
		}
	}
	return strings.Join(all, ", ")
}

// allowed refuses a podCIDR that does not go with this node's own network. A serviceError is the last to be found.
func (j *judge) allowed(p netip.Prefix) error {
	if j.local.OverlapsPrefix(p) {
		if held := j.held(p); held != "" {
			return fmt.Errorf("podCIDR %s contains addresses of this node: %s; delete what another network has left, or give the Node another podCIDR", p, held)
		}
	}
	if slices.Contains(j.in.Before.Own, p) {
		return j.inService(p) // a pod of this node may be somebody's gateway
	}
	for _, hop := range j.nextHops().in(p) {
		if r := j.in.Facts.Routes[hop.owner]; !p.Contains(r.Dst.Addr()) || r.Dst.Bits() < p.Bits() {
			return fmt.Errorf("podCIDR %s contains %s, by which this node reaches %s", p, hop.addr, r.Dst)
		}
	}
	return j.inService(p)
}

// nextHops are the gateways that this node's own traffic takes over uplinks.
func (j *judge) nextHops() addressSet {
	if j.hops == nil {
		var all []ownedAddr
		for i, r := range j.in.Facts.Routes {
			if _, out := j.uplink(r.Index); out && r.Via.IsValid() {
				all = append(all, ownedAddr{r.Via, i})
			}
		}
		hops := newAddressSet(all)
		j.hops = &hops
	}
	return *j.hops
}

// rank sorts the nodes by the strength of their claims.
func rank(all []candidate) { slices.SortFunc(all, compare) }

// compare sorts the stronger claim first: the older one, then the one in
// force, then the one that stands first in the list.
func compare(a, b candidate) int {
	return cmp.Or(age(a, b),
		cmp.Compare(btoi(b.standing), btoi(a.standing)),
		cmp.Compare(a.index, b.index))
}

// age is negative when a is the older one. A node without a timestamp counts as
// the youngest.
func age(a, b candidate) int {
	if a.created.IsZero() != b.created.IsZero() {
		return cmp.Compare(btoi(a.created.IsZero()), btoi(b.created.IsZero()))
	}
	return a.created.Compare(b.created)
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// resolve decides between a podCIDR of one node and an address of another that
// lies in it. What stood before stays. Of two new ones it is the podCIDR that is
// wrong, unless the address is on no link of ours and its node is the younger:
// then it may as well have been taken from a pod.
func (j *judge) resolve(others []candidate) {
	var all []ownedAddr
	for i, c := range others {
		for _, a := range slices.Concat(c.internal, c.external) {
			all = append(all, ownedAddr{a, i})
		}
	}
	addresses := newAddressSet(all)
	badAddr := map[ownedAddr]bool{}
	for i := range others {
		c := &others[i]
		c.pods = slices.DeleteFunc(c.pods, func(p netip.Prefix) bool {
			for _, a := range addresses.in(p) {
				if a.owner != i && j.podCIDRStays(others, i, p, a) {
					j.problem(others[a.owner].name, Refused, "address %s lies in %s, a podCIDR of node %s", a.addr, p, c.name)
					badAddr[a] = true
					continue
				}
				j.problem(c.name, Refused, "podCIDR %s contains %s, an address of node %s", p, a.addr, others[a.owner].name)
				return true
			}
			return false
		})
	}
	for i := range others {
		c := &others[i]
		isBad := func(a netip.Addr) bool { return badAddr[ownedAddr{a, i}] }
		c.internal = slices.DeleteFunc(c.internal, isBad)
		c.external = slices.DeleteFunc(c.external, isBad)
	}
}

// podCIDRStays reports whether the podCIDR p of node i beats the address a.
func (j *judge) podCIDRStays(others []candidate, i int, p netip.Prefix, a ownedAddr) bool {
	if via, ok := j.in.Before.Claims[p]; ok && slices.Contains(others[i].internal, via) {
		return true
	}
	_, onLink := j.reach(a.addr)
	return !onLink && i < a.owner // ranked: the stronger claim comes first
}

// addresses leaves each InternalIP to one node: to the one that is reached by it, else to one that has it besides; of two, to
// the stronger claim. A kubelet writes its Node's addresses itself: what it adds to them is not to take another node away.
func (j *judge) addresses(ranked []candidate) {
	owners := make(map[netip.Addr]int, len(ranked))
	refuse := func(i int, a netip.Addr) bool {
		owner, is := owners[a]
		if is && owner != i {
			j.problem(ranked[i].name, Refused, "InternalIP %s is node %s's, which is reached by it or has the stronger claim", a, ranked[owner].name)
			return true
		}
		owners[a] = i
		return false
	}
	for i := range ranked {
		c := &ranked[i]
		for f := range wire.Families {
			for via := firstOf(f, c.internal); via.IsValid() && refuse(i, via); via = firstOf(f, c.internal) {
				c.internal = slices.DeleteFunc(c.internal, func(a netip.Addr) bool { return a == via })
			}
		}
	}
	for i := range ranked {
		c := &ranked[i]
		c.internal = slices.DeleteFunc(c.internal, func(a netip.Addr) bool { return refuse(i, a) })
	}
}

// reach finds the uplink on whose link an address is, and its neighbours: a VPN's peers take packets with the VPN's addresses alone.
func (j *judge) reach(a netip.Addr) (Link, bool) {
	r, found := j.route(a)
	if !found || !r.OnLink {
		return Link{}, false
	}
	if l, is := j.uplink(r.Index); is && !l.Bare {
		return l, true
	}
	return Link{}, false
}

func (j *judge) uplink(index uint32) (Link, bool) {
	for _, l := range j.in.Facts.Uplinks {
		if l.Index == index {
			return l, true
		}
	}
	return Link{}, false
}

// route finds the most specific route to an address.
func (j *judge) route(a netip.Addr) (KernelRoute, bool) { return j.routes.Lookup(a) }

// notEthernet finds the link without an Ethernet header that this node reaches an address over, and how long the route's prefix is. The
// link's MTU is the least of it, of others that the route leads over, and of the route; without a name, there is no such link. A route of
// another table counts if it says more than the main table's, unless rules lead there by a packet's source alone, or a part of the packets.
func (j *judge) notEthernet(a netip.Addr) (l Link, bits int) {
	if len(j.in.Facts.NotEthernet) == 0 {
		return l, 0
	}
	if j.others == nil {
		j.others = &bart.Table[KernelRoute]{}
		for _, r := range j.in.Facts.Others {
			_, bySource := j.in.Facts.Sources[r.Table]
			if _, there := j.others.Get(r.Dst); !there && !bySource && !j.in.Facts.InPart[r.Table] {
				j.others.Insert(r.Dst, r)
			}
		}
	}
	r, known := j.routes.Lookup(a)
	if other, has := j.others.Lookup(a); has && (!known || other.Dst.Bits() > r.Dst.Bits()) {
		r = other
	}
	mtu := r.MTU
	for _, index := range append([]uint32{r.Index}, r.Hops...) {
		hop, bare := j.in.Facts.NotEthernet[index]
		if bare {
			l = hop
		} else if hop, bare = j.uplink(index); !bare {
			continue
		}
		if mtu == 0 || hop.MTU < mtu {
			mtu = hop.MTU
		}
	}
	l.MTU = mtu
	return l, r.Dst.Bits()
}
