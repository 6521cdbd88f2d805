package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Make plans. Values of a family that is not used are judged and carried, and nothing is made of them.
func Make(in Input) Result {
	if !in.Known {
		in.Nodes = nil // what stands stays
	}
	j := newJudge(in)
	self, others := j.split()
	rank(others)
	standing, none, wrong := j.own(self, others)
	j.apart(standing.Own, others)
	j.resolve(others)
	j.addresses(others)
	winners := j.claims(others)

	b := &builder{judge: j, r: Result{
		NotReady:     cmp.Or(wrong, j.noPodCIDR(standing, none)),
		Config:       nodeConfig(standing),
		Destinations: make(map[destinations.Key]destinations.Value, 2*len(in.Nodes)),
		Uplinks:      map[uplinks.Key]uplinks.Value{},
		Exceptions:   map[sources.Key]sources.Value{},
		Bridges:      map[bridges.Key]bridges.Value{},
		Crossed:      map[string]bool{},
		Standing:     standing,
	}, masks: newRouteMasks(in.Facts), holders: holdersOf(in.Facts.Addresses)}
	for f := range wire.Families {
		if a := standing.NodeIP(f); j.used[f] && a.IsValid() && j.local.Contains(a) {
			b.r.Sources[f] = wire.AddrFrom(a)
		}
	}
	for f := range wire.Families {
		b.keptDefault[f] = b.masks.keepDefault(everything[f], in.Facts.Uplinks, in.Before.Ways.World[f])
	}
	b.tunnel()
	b.r.Standing.Claims = make(map[netip.Prefix]netip.Addr, len(in.Nodes))
	b.r.Standing.Aliases, b.r.Standing.MACs = map[netip.Addr]netip.Addr{}, map[netip.Addr]wire.MAC{}
	if !in.Known {
		b.keepClaims()
	}
	// Later ones win where two say something about the same prefix.
	b.native()
	b.services()
	for _, c := range winners {
		b.peer(c)
	}
	b.bridges()
	b.uplinks()
	b.local()
	b.onBridges()
	b.mtu()
	b.missing(none)
	b.policies()
	if in.Facts.RoutesToStack {
		b.r.Config.Flags |= config.RoutesToStack
	}
	if in.Services {
		b.r.Config.Flags |= config.Services
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
	// holders are the links that have each address; 0: several.
	holders map[netip.Addr]uint32
	// keptDefault says of which family a default route counts that is missing.
	keptDefault FamilySet
	// unkept is how many destinations have a source address of their own for which map sources has no room.
	unkept int
	// narrowest is the uplink that the pods' MTU goes by.
	narrowest Link
}

// destination adds an entry of a family that is used. One of IPv6 that is so wide that it would contain IPv4 in the maps
// leaves that as it is.
func (b *builder) destination(p netip.Prefix, v destinations.Value) {
	if !b.used[wire.FamilyOf(p.Addr())] {
		return
	}
	b.r.Destinations[destinations.KeyFrom(p)] = v
	if all := destinations.KeyFrom(everything[wire.IPv4]); p.Contains(mapped) {
		if _, there := b.r.Destinations[all]; !there {
			b.r.Destinations[all] = destinations.Value{Kind: destinations.World}
		}
	}
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// native adds what is never masqueraded.
func (b *builder) native() {
	for _, p := range b.in.Native {
		b.destination(p, destinations.Value{Kind: destinations.Native, Uplinks: b.masks.around(p, 0) | b.masks.within(p)})
	}
}

// services adds the ranges of Services, where what is no frontend of one is nobody. A range that says more than a podCIDR in force
// would take pods from it: which of the two is wrong stands among the problems.
func (b *builder) services() {
	if !b.in.Served {
		return
	}
	inForce := slices.Concat(b.r.Standing.Own, slices.Collect(maps.Keys(b.in.Before.Claims)))
	for _, p := range b.in.Service {
		within := slices.ContainsFunc(inForce, func(pods netip.Prefix) bool { return pods.Overlaps(p) && pods.Bits() <= p.Bits() })
		if !within && p.Bits() >= widest[wire.FamilyOf(p.Addr())] {
			b.destination(p, destinations.Value{Kind: destinations.Service})
		}
	}
}

// peer adds another node: its addresses, its podCIDRs and the routes there.
func (b *builder) peer(c candidate) {
	ways := b.ways(c.internal, c.macs)
	first := b.mainFamily(c)
	peer := Peer{Name: c.name, Address: ways[first].via, Way: ways[first].kind, PodCIDRs: c.pods}
	for f, w := range ways {
		f := wire.Family(f)
		if !b.used[f] || f != first && !c.hasPods(f) {
			continue
		}
		if w.kind == destinations.None || w.kind == destinations.Tunnel && b.keptDefault[wire.FamilyOf(w.via)] && b.masks.onlyByDefault(host(w.via)) {
			b.problem(c.name, OffLink, "%s", b.whyNone(f, w, c.internal))
		}
		peer.Way = worse(peer.Way, w.kind)
		if w.via != peer.Address {
			peer.Others = append(peer.Others, w.via)
		}
	}
	b.r.Peers = append(b.r.Peers, peer)
	b.reached(c.internal, c.pods, ways)
}

// reached adds the addresses and podCIDRs of a node, each by the way of its family.
func (b *builder) reached(internal []netip.Addr, pods []netip.Prefix, ways [wire.Families]way) {
	for _, a := range internal {
		b.node(a, ways[wire.FamilyOf(a)])
	}
	for _, p := range pods {
		b.podCIDR(p, ways[wire.FamilyOf(p.Addr())])
	}
}

// node adds an address of a node. The tunnel leads to its own far end only; to the others packets go by routes,
// since a kubelet can write any address into its Node. What arrives through the tunnel may have each of them as its source.
func (b *builder) node(a netip.Addr, w way) {
	v := destinations.Value{
		Kind: destinations.Node, Node: wire.AddrFrom(w.via), Alias: wire.AddrFrom(w.alias), Uplinks: b.arrivals(a),
	}
	if a == w.via && w.kind == destinations.Tunnel {
		v.Flags, v.MTU, v.MAC = destinations.ByTunnel, w.mtu, w.mac
	} else {
		link, _ := b.reach(a)
		v.Ifindex = link.Index
	}
	b.destination(host(a), v)
}

// noUplink is the number of a mask by which no uplink is meant, as long as there are no more of them than numbers.
const noUplink = uplinks.Bits - 1

// arrivals is a mask of the uplinks by which a node with that address may send. With an empty one it might by each. So where the route leads
// over a link without Ethernet, or nowhere, it says that it is none. Wider routes of other tables count unless the former is known.
func (b *builder) arrivals(a netip.Addr) uint64 {
	bare, bits := b.notEthernet(a)
	if bare.Name == "" {
		bits = 0
	}
	mask := b.masks.around(host(a), bits)
	for _, l := range b.in.Facts.Uplinks {
		if l.Bare && l.Index != bare.Index { // wider routes of other tables lead to it, such as a VPN's default route, and its peers are anybody
			mask &^= 1 << l.Bit
		}
	}
	if mask != 0 {
		return mask
	}
	if r, known := b.route(a); bare.Name != "" || known && r.Unreachable && r.Dst.Bits() > 0 {
		return 1 << noUplink
	}
	return 0
}

// podCIDR adds the way to a podCIDR of another node. Without one the kernel
// answers that it is unreachable, instead of sending pods' packets out of the cluster.
func (b *builder) podCIDR(p netip.Prefix, w way) {
	f := wire.FamilyOf(p.Addr())
	b.r.Standing.Claims[p] = w.via
	if w.alias.IsValid() {
		b.r.Standing.Aliases[w.via] = w.alias
	}
	if w.mac != (wire.MAC{}) {
		b.r.Standing.MACs[w.via] = w.mac
	}
	if !b.used[f] {
		return
	}
	v := destinations.Value{
		Kind: destinations.PodCIDR, Node: wire.AddrFrom(w.via), Alias: wire.AddrFrom(w.alias), MTU: w.mtu,
		Uplinks: b.arrivals(w.via) | b.masks.within(p),
	}
	near := firstOf(f, []netip.Addr{w.via, w.alias}) // from which it may send directly, whatever our way is
	if near.IsValid() {
		v.Uplinks |= b.arrivals(near)
	}
	r := Route{Dst: p}
	switch w.kind {
	case destinations.Direct:
		v.Ifindex = w.index
		r.Via, r.Src, r.Index = w.via, b.r.Sources[f].Netip(), w.index
	case destinations.Tunnel:
		v.Flags, v.MAC = destinations.ByTunnel, w.mac
		if int(w.mtu) >= leastMTUOf[f] { // the kernel has no IPv6 on a device with less
			r.Src, r.Index, r.MTU = b.r.Sources[f].Netip(), w.index, w.mtu
		}
		if link, onLink := b.reach(near); onLink && f == wire.IPv4 { // the other family has no reverse path filter
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
		internal := []netip.Addr{via}
		if alias := b.in.Before.Aliases[via]; alias.IsValid() {
			internal = append(internal, alias)
		}
		var macs [wire.Families]wire.MAC
		macs[wire.FamilyOf(via)] = b.in.Before.MACs[via]
		b.reached(internal, []netip.Prefix{p}, b.ways(internal, macs))
	}
	slices.SortFunc(b.r.Routes, func(x, y Route) int { return x.Dst.Addr().Compare(y.Dst.Addr()) })
}

// local adds what is on this node: podCIDRs, pods outside them, own addresses. An address
// that was here a moment ago is nobody else's unless something says so.
func (b *builder) local() {
	for _, own := range b.r.Standing.Own {
		b.destination(own, destinations.Value{Kind: destinations.Local})
		if b.used[wire.FamilyOf(own.Addr())] && !b.leadsToBridge(own) {
			b.r.Routes = append(b.r.Routes, Route{Dst: own})
		}
	}
	for _, a := range b.in.Facts.Endpoints {
		if !Contains(b.r.Standing.Own, a) {
			b.destination(host(a), destinations.Value{Kind: destinations.Local})
		}
	}
	for _, p := range slices.Concat(b.in.Facts.Local, ofLink) {
		if _, wider := overlapsAny(p, ofLink); !wider || slices.Contains(ofLink, p) {
			b.destination(p, destinations.Value{Kind: destinations.Host, Ifindex: b.holder(p)})
		}
	}
	for _, t := range b.r.Config.Tunnel {
		if a := t.Address.Netip(); a.IsValid() {
			b.destination(host(a), destinations.Value{Kind: destinations.Host})
		}
	}
	for _, p := range b.in.Facts.Broadcast {
		b.localToo(p, 0)
	}
	for _, a := range b.in.Facts.Recent {
		// Flows end that can go on from another address.
		if b.r.Uplinks[uplinks.Key{Ifindex: a.Index}].Addresses[wire.FamilyOf(a.Addr)] == (wire.Addr{}) {
			b.localToo(host(a.Addr), a.Index)
		}
	}
}

// localToo adds a prefix of this node's unless it is something else, or wider.
func (b *builder) localToo(p netip.Prefix, index uint32) {
	_, taken := b.r.Destinations[destinations.KeyFrom(p)]
	if _, wider := overlapsAny(p, ofLink); !taken && !wider {
		b.destination(p, destinations.Value{Kind: destinations.Host, Ifindex: index})
	}
}

// holder is the uplink that has an address; 0: another link has it, or several, or it is none that packets can have as their source.
func (b *builder) holder(p netip.Prefix) uint32 {
	index := b.holders[p.Addr()]
	if _, is := b.r.Uplinks[uplinks.Key{Ifindex: index}]; !is || !p.IsSingleIP() {
		return 0
	}
	return index
}

// holdersOf are the links that have each address; 0: several.
func holdersOf(all []Address) map[netip.Addr]uint32 {
	holders := make(map[netip.Addr]uint32, len(all))
	for _, a := range all {
		if other, there := holders[a.Prefix.Addr()]; there && other != a.Index {
			a.Index = 0
		}
		holders[a.Prefix.Addr()] = a.Index
	}
	return holders
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
