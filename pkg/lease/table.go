package lease

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// entry is a lease of a subnet as it stands in the registry.
type entry struct {
	key    string // what of the key is behind subnets/
	subnet Subnet
	record record
	macs   [wire.Families]wire.MAC
	wrong  error            // why it is of no use
	kept   bool             // it says what it said before it went wrong
	lease  clientv3.LeaseID // of etcd's; 0: a reservation, which has no end
	// created and modified are etcd's revisions.
	created, modified int64
	// node is what it says; all are asked for after each change of one.
	node *plan.Node
	// until is when it ends, of one that has vanished; zero: it stands in the registry.
	until time.Time
}

// holder is who has leased a subnet, as our agents note it beside the lease.
type holder struct {
	MachineID string `json:"machineID"`
	Node      string `json:"node"`
}

// holding is a holder as it stands in the registry.
type holding struct {
	holder
	lease    clientv3.LeaseID
	modified int64
}

// table is what is known of the leases.
//
// One that is gone is dropped when a complete list lacks it that is made some seconds later, and not before: a node whose lease was
// revoked takes it again meanwhile. That is no reason to drop it where the list lacks our own lease as well, which we have renewed, or is of another etcd: somebody has emptied the registry, and nodes whose pods go on
// have yet to lease anew. Then each lease that is gone lives for as long as if its node had just renewed it; until the node has
// another one, or another node has the subnet.
type table struct {
	entries map[string]*entry // by what of the key is behind subnets/
	holders map[netip.Addr]holding
}

// leasesOf are the leases that other nodes have had, by what stands on this one.
func leasesOf(s plan.Standing, kind Kind) map[string]*entry {
	nodes := map[netip.Addr]*entry{}
	for p, via := range s.Claims {
		var public [wire.Families]netip.Addr
		for _, a := range []netip.Addr{via, s.Aliases[via]} {
			if a.IsValid() {
				public[wire.FamilyOf(a)] = a
			}
		}
		ipv4, ipv6 := public[wire.IPv4], public[wire.IPv6]
		if nodes[ipv4] == nil {
			nodes[ipv4] = &entry{record: record{PublicIP: ipv4, BackendType: kind}}
		}
		e := nodes[ipv4]
		if ipv6.IsValid() {
			e.record.PublicIPv6 = &ipv6
		}
		e.subnet[wire.FamilyOf(p.Addr())] = p
		if mac := s.MACs[via]; mac != (wire.MAC{}) {
			e.macs[wire.FamilyOf(via)] = mac
		}
	}
	entries := map[string]*entry{}
	for ipv4, e := range nodes {
		if ipv4.IsValid() && e.subnet[wire.IPv4].IsValid() {
			e.key = e.subnet.String()
			entries[e.key] = e
		}
	}
	return entries
}

// replace takes a complete list, and returns how many leases live until end that it lacks: those that have not been seen to go, and of
// a registry that has been emptied all.
func (t *table) replace(l *list, end, now time.Time, emptied bool) (missing int) {
	had := t.entries
	t.entries, t.holders = l.entries, l.holders
	nodes := map[netip.Addr]bool{}
	var listed []Subnet
	for key, e := range l.entries {
		e.keep(had[key])
		if e.wrong == nil {
			nodes[e.record.PublicIP] = true
			listed = append(listed, e.subnet)
		}
	}
	for key, e := range had {
		if t.entries[key] != nil || e.wrong != nil || nodes[e.record.PublicIP] || slices.ContainsFunc(listed, e.subnet.overlaps) {
			continue
		}
		if e.until.IsZero() || emptied && e.until.Before(end) {
			e.until = end
			missing++
		}
		if now.Before(e.until) {
			t.entries[key] = e
		}
	}
	return missing
}

// keep has a lease that has gone wrong say what it said before, if that was of use: a bad value takes no node away.
func (e *entry) keep(had *entry) {
	if e.wrong != nil && had != nil && (had.wrong == nil || had.kept) {
		e.record, e.macs, e.kept = had.record, had.macs, true
	}
}

// put takes one that is new, or has changed, in the place of what has vanished of its node, or had its subnet.
func (t *table) put(key string, e *entry) {
	e.keep(t.entries[key])
	maps.DeleteFunc(t.entries, func(_ string, o *entry) bool {
		return e.wrong == nil && !o.until.IsZero() && (o.record.PublicIP == e.record.PublicIP || o.subnet.overlaps(e.subnet))
	})
	t.entries[key] = e
}

// nextEnd is when the first lease ends that has vanished; zero: none has.
func (t *table) nextEnd() (first time.Time) {
	for _, e := range t.entries {
		if !e.until.IsZero() && (first.IsZero() || e.until.Before(first)) {
			first = e.until
		}
	}
	return first
}

// inOrder are the entries, the older first, in the same order each time.
func (t *table) inOrder() []*entry {
	return slices.SortedFunc(maps.Values(t.entries), func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.created, b.created), cmp.Compare(a.key, b.key))
	})
}

// nodes are the nodes of the network, this one first, and what is worth a line in the log. Of two leases with one public address the
// stronger counts, and the node has a doubt.
func (t *table) nodes(self plan.Node, own Subnet, public netip.Addr, network Network) (all []plan.Node, remarks []string) {
	all = append(make([]plan.Node, 0, len(t.entries)+1), self)
	names, at, counts := map[string]bool{self.Name: true}, map[netip.Addr]int{}, map[netip.Addr]*entry{}
	for _, e := range t.inOrder() {
		a := e.record.PublicIP
		if remark := e.remark(public, network.Backend.Kind); remark != "" {
			remarks = append(remarks, remark)
		}
		if a == public && e.wrong == nil && e.subnet != own && len(all[0].Doubts) < mostDoubts {
			all[0].Doubts = append(slices.Clip(all[0].Doubts), fmt.Sprintf("lease %s has this node's public address %s as well, and does not count", e.key, a))
		}
		if e.wrong != nil && !e.kept || a == public || e.record.BackendType != network.Backend.Kind {
			continue
		}
		node := *e.asNode(network)
		if i, twice := at[a]; twice {
			weak, doubts := e, all[i].Doubts
			if t.isStronger(e, counts[a], network) {
				weak, counts[a] = counts[a], e
				node.Name = all[i].Name
				all[i] = node
			}
			if len(doubts) < mostDoubts {
				doubts = append(doubts, fmt.Sprintf("lease %s has the same public address %s as lease %s, and does not count", weak.key, a, counts[a].key))
			}
			all[i].Doubts = doubts
			continue
		}
		if h := t.holders[a]; isName(h.Node) && !names[h.Node] {
			node.Name = h.Node
		}
		names[node.Name], at[a], counts[a] = true, len(all), e
		all = append(all, node)
	}
	return all, remarks
}

// remark is what there is to be said about a lease; a broken one may be of any length.
func (e *entry) remark(public netip.Addr, kind Kind) string {
	switch a := e.record.PublicIP; {
	case e.kept:
		return fmt.Sprintf("lease %.80s is what it was: %.200v", e.key, e.wrong)
	case e.wrong != nil:
		return fmt.Sprintf("lease %.80s is ignored: %.200v", e.key, e.wrong)
	case a != public && e.record.BackendType != kind:
		return fmt.Sprintf("lease %s of %s is ignored: its backend is %.40q, and the network's %s", e.subnet, a, e.record.BackendType, kind)
	}
	return ""
}

// mostDoubts is how many second leases of a node are worth a word.
const mostDoubts = 4

// isStronger reports whether of two leases with one public address the first counts: the one that its node is known to renew, then one
// that somebody renews at all, then one that the network's configuration leaves, then the older. A newer one can be anybody's.
func (t *table) isStronger(a, b *entry, n Network) bool {
	for _, is := range []func(*entry) bool{t.renews, func(e *entry) bool { return e.lease != 0 }, func(e *entry) bool { return n.fits(e.subnet) }} {
		if is(a) != is(b) {
			return is(a)
		}
	}
	return a.created < b.created
}

// renews reports whether the lease is the one that its node renews, as our agents note.
func (t *table) renews(e *entry) bool {
	h := t.holders[e.record.PublicIP]
	return h.lease != 0 && h.lease == e.lease
}

// longestName is that of a host.
const longestName = 253

// isName reports whether a node may be called like that. Those without a name are called by their addresses.
func isName(s string) bool {
	_, err := netip.ParseAddr(s)
	return err != nil && isPlain(s)
}

// isPlain reports whether people may be shown a text that anybody can have written.
func isPlain(s string) bool {
	return s != "" && len(s) <= longestName && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError })
}

// asNode is what a lease says of the families that the network has.
func (e *entry) asNode(network Network) *plan.Node {
	if e.node != nil {
		return e.node
	}
	n := plan.Node{Name: e.record.PublicIP.String(), TunnelMACs: e.macs}
	for f, p := range e.subnet {
		if p.IsValid() && network.Ranges[f].Prefix.IsValid() {
			n.PodCIDRs = append(n.PodCIDRs, p.String())
		}
	}
	for _, a := range e.record.public() {
		if a.IsValid() {
			n.InternalIPs = append(n.InternalIPs, a.String())
		}
	}
	e.node = &n
	return e.node
}
