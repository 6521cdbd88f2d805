package agent

import (
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func (c *uplinkController) exceptions() (typed.Sync[sources.Key, sources.Value], error) {
	have, err := c.dp.Maps.Sources.Content()
	return typed.Sync[sources.Key, sources.Value]{Map: c.dp.Maps.Sources, Have: have}, err
}

// choices are the addresses to masquerade to, by uplink and destination.
func choices(main map[uplinks.Key]uplinks.Value, exceptions map[sources.Key]sources.Value) map[sources.Key]wire.Addr {
	all := make(map[sources.Key]wire.Addr, 2*len(main)+len(exceptions))
	for k, v := range main {
		for f, everything := range map[wire.Family]netip.Prefix{
			wire.IPv4: netip.PrefixFrom(netip.IPv4Unspecified(), 0), wire.IPv6: netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		} {
			all[sources.KeyFrom(k.Ifindex, everything)] = v.Addresses[f]
		}
	}
	for k, v := range exceptions {
		all[k] = v.Address
	}
	return all
}

// tellChanges says in the log to which other addresses an uplink masquerades from now on: firewalls elsewhere may go by them.
func (c *uplinkController) tellChanges(v *view, have, want map[sources.Key]wire.Addr) {
	told := 0
	for k, address := range want {
		old, known := have[k]
		if !known {
			old = have[mainOf(k)]
		}
		if address == old || old == (wire.Addr{}) || address == (wire.Addr{}) {
			continue
		}
		if told++; told <= mostLines {
			c.log.Info("masquerading to another address", "interface", v.links[int(k.Ifindex)].Name, "destination", k.Netip(), "old", old.Netip(), "new", address.Netip())
		}
	}
	if told > mostLines {
		c.log.Info("masquerading to other addresses", "destinations", told-mostLines)
	}
}

// mainOf is the key of the address that an uplink masquerades to unless there is an exception.
func mainOf(k sources.Key) sources.Key {
	all := netip.IPv6Unspecified()
	if k.Netip().Addr().Is4() {
		all = netip.IPv4Unspecified()
	}
	return sources.KeyFrom(k.Ifindex, netip.PrefixFrom(all, 0))
}
