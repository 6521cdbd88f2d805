package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Make plans. Only IPv4 is programmed; IPv6 values are judged and carried.
func Make(in Input) Result {
	if !in.Known {
		in.Nodes = nil // what stands stays
	}
	j := newJudge(in)
	self, others := j.split()
	rank(others)
	standing, why := j.own(self, others)
	j.apart(standing.Own, others)
	j.resolve(others)
	j.addresses(others)
	winners := j.claims(others)

	b := &builder{judge: j, r: Result{
		NotReady:     why,
		Config:       nodeConfig(standing),
		Destinations: make(map[destinations.Key]destinations.Value, 2*len(in.Nodes)),
		Uplinks:      map[uplinks.Key]uplinks.Value{},
		Crossed:      map[string]bool{},
		Standing:     standing,
	}, masks: newRouteMasks(in.Facts)}
	if a := standing.NodeIP4(); a.IsValid() && j.local.Contains(a) {
		b.r.Source = a
	}
	b.keptDefault = b.masks.keepDefault(in.Facts.Uplinks, in.Before.Ways.World)
	b.tunnel()
	b.r.Standing.Claims = make(map[netip.Prefix]netip.Addr, len(in.Nodes))
	if !in.Known {
		b.keepClaims()
	}
	// Later ones win where two say something about the same prefix.
	b.native()
	for _, c := range winners {
		b.peer(c)
	}
	b.local()
	b.uplinks()
	b.mtu()
	b.policies()
	if in.Facts.RoutesToStack {
		b.r.Config.Flags |= config.RoutesToStack
	}
	b.r.Problems, b.r.Notes = j.problems, j.notes
	return b.r
}

// claims drops podCIDRs that a stronger claim overlaps, and nodes that can't be
// reached at all: a refused node does not compete.
func (j *judge) claims(ranked []candidate) []candidate {
	var all []netip.Prefix
	for _, c := range ranked {
		all = append(all, c.pods...)
	}
	taken := newPrefixSet(all)
	var out []candidate
	for _, c := range ranked {
		if len(c.internal) == 0 {
			continue
		}
		c.pods = slices.DeleteFunc(slices.Clone(c.pods), func(p netip.Prefix) bool {
			if owner, bad := taken.overlap(p); bad {
				j.problem(c.name, PodCIDRConflict, "podCIDR %s overlaps one of node %s, whose claim is the stronger one", p, owner)
				return true
			}
			taken.add(p, c.name)
			return false
		})
		out = append(out, c)
	}
	return out
}

// builder puts the Result together.
type builder struct {
	*judge
	r     Result
	masks routeMasks
	// keptDefault says that a default route counts that is missing.
	keptDefault bool
}

func (b *builder) destination(p netip.Prefix, v destinations.Value) {
	if p.Addr().Is4() {
		b.r.Destinations[destinations.KeyFrom(p)] = v
	}
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// native adds what is never masqueraded.
func (b *builder) native() {
	for _, p := range b.in.Native {
		b.destination(p, destinations.Value{Kind: destinations.Native, Uplinks: b.masks.around(p) | b.masks.within(p)})
	}
}

// peer adds another node: its addresses, its podCIDRs and the routes there.
func (b *builder) peer(c candidate) {
	via := c.via()
	w := b.way(via)
	for _, a := range c.internal {
		b.node(a, via, w)
	}
	if via.Is4() && (w.kind == destinations.None || w.kind == destinations.Tunnel && b.keptDefault && b.masks.onlyByDefault(host(via))) {
		b.problem(c.name, OffLink, "%s", b.whyNone(via))
	}
	b.r.Peers = append(b.r.Peers, Peer{Name: c.name, Address: via, Way: w.kind, PodCIDRs: c.pods})
	for _, p := range c.pods {
		b.podCIDR(p, via, w)
	}
}

// node adds an address of the node whose InternalIP is via. The tunnel leads to via only; to the others packets go by routes,
// since a kubelet can write any address into its Node. What arrives through the tunnel may have each of them as its source.
func (b *builder) node(a, via netip.Addr, w way) {
	v := destinations.Value{Kind: destinations.Node, Node: wire.AddrFrom(via), Uplinks: b.masks.around(host(a))}
	if a == via && w.kind == destinations.Tunnel {
		v.Flags, v.MTU = destinations.ByTunnel, w.mtu
	} else {
		link, _ := b.reach(a)
		v.Ifindex = link.Index
	}
	b.destination(host(a), v)
}

// podCIDR adds the way to a podCIDR of another node. Without one the kernel
// answers that it is unreachable, instead of sending pods' packets out of the cluster.
func (b *builder) podCIDR(p netip.Prefix, via netip.Addr, w way) {
	b.r.Standing.Claims[p] = via
	if !p.Addr().Is4() || !via.Is4() {
		return
	}
	v := destinations.Value{
		Kind: destinations.PodCIDR, Node: wire.AddrFrom(via), Uplinks: b.masks.around(host(via)) | b.masks.within(p), MTU: w.mtu,
	}
	r := Route{Dst: p}
	switch w.kind {
	case destinations.Direct:
		v.Ifindex = w.index
		r.Via, r.Src, r.Index = via, b.r.Source, w.index
	case destinations.Tunnel:
		v.Flags = destinations.ByTunnel
		r.Src, r.Index, r.MTU = b.r.Source, w.index, w.mtu
		if link, onLink := b.reach(via); onLink {
			b.r.Crossed[link.Name] = true
		}
	}
	b.destination(p, v)
	b.r.Routes = append(b.r.Routes, r)
}

// keepClaims carries on what stands while no complete list has arrived.
func (b *builder) keepClaims() {
	for p, via := range b.in.Before.Claims {
		if _, bad := overlapsAny(p, b.r.Standing.Own); bad {
			continue
		}
		w := b.way(via)
		b.podCIDR(p, via, w)
		b.node(via, via, w)
	}
	slices.SortFunc(b.r.Routes, func(x, y Route) int { return x.Dst.Addr().Compare(y.Dst.Addr()) })
}

// local adds what is on this node: podCIDR, pods outside it, own addresses. An address
// that was here a moment ago is nobody else's unless something says so.
func (b *builder) local() {
	own := b.r.Standing.Own4()
	if own.IsValid() {
		b.destination(own, destinations.Value{Kind: destinations.Local})
		b.r.Routes = append(b.r.Routes, Route{Dst: own})
	}
	for _, a := range b.in.Facts.Endpoints {
		if !own.IsValid() || !own.Contains(a) {
			b.destination(host(a), destinations.Value{Kind: destinations.Local})
		}
	}
	for _, p := range b.in.Facts.Local {
		b.destination(p, destinations.Value{Kind: destinations.Host})
	}
	if a := b.r.Config.Tunnel[wire.IPv4].Address.Netip(); a.IsValid() {
		b.destination(host(a), destinations.Value{Kind: destinations.Host})
	}
	more := slices.Clone(b.in.Facts.Broadcast)
	for _, a := range b.in.Facts.Recent {
		more = append(more, host(a))
	}
	for _, p := range more {
		if _, taken := b.r.Destinations[destinations.KeyFrom(p)]; !taken {
			b.destination(p, destinations.Value{Kind: destinations.Host})
		}
	}
}

// uplinks adds the address to masquerade to on each uplink: the InternalIP where
// it stands there, else the primary one.
func (b *builder) uplinks() {
	nodeIP := b.r.Standing.NodeIP4()
	for _, l := range b.in.Facts.Uplinks {
		var chosen netip.Addr
		for _, a := range l.Addresses {
			if a.Is4() && (!chosen.IsValid() || a == nodeIP) {
				chosen = a
			}
		}
		b.r.Uplinks[uplinks.Key{Ifindex: l.Index}] = uplinks.Value{Addresses: wire.AddressesFrom(chosen), Bit: l.Bit}
	}
}

func (b *builder) uplinkNames() string {
	if len(b.in.Facts.Uplinks) == 0 {
		return "there is none"
	}
	var names []string
	for _, l := range b.in.Facts.Uplinks {
		names = append(names, l.Name)
	}
	return strings.Join(names, ", ")
}

func nodeConfig(s Standing) config.Value {
	v := config.Value{Layout: wire.LayoutVersion, NodeAddresses: wire.AddressesFrom(s.NodeIPs...)}
	for _, p := range s.Own {
		v.SetPodCIDR(p)
	}
	return v
}

// String describes a problem as one line.
func (p Problem) String() string { return fmt.Sprintf("node %s: %s: %s", p.Node, p.Reason, p.Text) }
