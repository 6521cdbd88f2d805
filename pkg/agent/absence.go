package agent

import (
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// uplinkGrace is how long an uplink may be without routes, or without the address that flows are masqueraded to, before
// it is no uplink any more: a DHCP client renews its lease, a network service starts again.
const uplinkGrace = time.Minute

// absences remembers what uplinks had a moment ago. Their programs stay attached meanwhile, flows keep their address, and
// new ones are refused, until all is back or the grace is over. An interface that is gone takes everything along at once.
type absences struct {
	grace time.Duration
	now   func() time.Time
	log   *slog.Logger
	// uplinks says when an interface was last seen to lead out, addresses when one to masquerade to was last seen.
	uplinks   map[int]time.Time
	addresses map[netip.Addr]lastSeen
	away      map[int]bool // those that the log has a line about
}

type lastSeen struct {
	index int
	at    time.Time
}

func newAbsences(log *slog.Logger) *absences {
	return &absences{
		grace: uplinkGrace, now: time.Now, log: log,
		uplinks: map[int]time.Time{}, addresses: map[netip.Addr]lastSeen{}, away: map[int]bool{},
	}
}

// recall counts as seen just now what an earlier agent has left in force.
func (a *absences) recall(entries map[uplinks.Key]uplinks.Value, exceptions map[sources.Key]sources.Value) {
	for k := range entries {
		a.uplinks[int(k.Ifindex)] = a.now()
	}
	a.noteAddresses(entries, exceptions)
}

// noteAddresses notes the addresses that new flows get from now on.
func (a *absences) noteAddresses(entries map[uplinks.Key]uplinks.Value, exceptions map[sources.Key]sources.Value) {
	for k, v := range exceptions {
		a.noteAddress(v.Address.Netip(), k.Ifindex)
	}
	for k, v := range entries {
		for _, addr := range v.Addresses.All() {
			a.noteAddress(addr, k.Ifindex)
		}
	}
}

// noteAddress notes an address. Until the link that has it is known, that is the uplink.
func (a *absences) noteAddress(addr netip.Addr, uplink uint32) {
	seen, known := a.addresses[addr]
	if !known {
		seen.index = int(uplink)
	}
	a.addresses[addr] = lastSeen{seen.index, a.now()}
}

// addAbsent adds to a view what is missing only for a moment; of uplinks that are named, only addresses.
func (a *absences) addAbsent(v *view, named bool) {
	now, leads := a.now(), map[int]bool{}
	for _, l := range v.uplinks {
		a.uplinks[int(l.Index)], leads[int(l.Index)] = now, true
		if a.away[int(l.Index)] {
			a.log.Info("uplink leads out again", "interface", l.Name)
			delete(a.away, int(l.Index))
		}
	}
	for index, seen := range a.uplinks {
		switch l := v.links[index]; {
		case leads[index]:
		case named || !leadsOut(l) || v.isPort(l) || now.Sub(seen) >= a.grace:
			delete(a.uplinks, index)
			delete(a.away, index)
		default:
			if !a.away[index] {
				a.log.Warn("no route leads out over this uplink any more; its programs stay for the grace period", "interface", l.Name, "grace", a.grace)
				a.away[index] = true
			}
			away := v.uplink(l)
			away.Away = true
			v.uplinks, v.away = append(v.uplinks, away), v.away+1
		}
	}
	slices.SortFunc(v.uplinks, func(a, b plan.Link) int { return int(a.Index) - int(b.Index) })
	a.keepAddresses(v, now)
}

// isPort says that a link is part of a bridge, a bond or a team, which leads out in its place: what arrives meets the
// link's programs first, and no route leads over it any more.
func (v *view) isPort(l device.Link) bool {
	return l.Master != 0 && v.links[l.Master].Kind != "vrf"
}

// keepAddresses keeps for this node the addresses that it has lost just now.
func (a *absences) keepAddresses(v *view, now time.Time) {
	links := map[netip.Addr]int{}
	for _, address := range v.addresses {
		links[address.Prefix.Addr()] = address.Index
	}
	for addr, seen := range a.addresses {
		if index, has := links[addr]; has {
			seen.index = index
		}
		_, there := v.links[seen.index]
		switch {
		case slices.Contains(v.local, netip.PrefixFrom(addr, addr.BitLen())):
			a.addresses[addr] = lastSeen{seen.index, now}
		case !there || now.Sub(seen.at) >= a.grace:
			delete(a.addresses, addr)
		default:
			v.recent = append(v.recent, plan.Recent{Addr: addr, Index: uint32(seen.index)})
		}
	}
	slices.SortFunc(v.recent, func(a, b plan.Recent) int { return a.Addr.Compare(b.Addr) })
}

// nextEnd is how long it takes until the first absence in a view is over, at most longest.
func (a *absences) nextEnd(v *view, longest time.Duration) time.Duration {
	now := a.now()
	for index := range a.away {
		longest = min(longest, a.grace-now.Sub(a.uplinks[index]))
	}
	for _, r := range v.recent {
		longest = min(longest, a.grace-now.Sub(a.addresses[r.Addr].at))
	}
	return max(longest, passDelay)
}
