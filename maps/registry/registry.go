// Package registry lists the definitions of all maps. Code that loads, moves, shows
// or tests maps walks it, so a new map is its package and a line here.
package registry

import (
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// All returns every map, in the order in which they are shown.
func All() []typed.Definition {
	return []typed.Definition{
		endpoints.Definition,
		devices.Definition,
		bridges.Definition,
		destinations.Definition,
		services.Definition,
		services.Sets,
		services.Names,
		services.SourceRanges,
		backends.Definition,
		backends.Slots,
		hostports.Definition,
		affinity.Definition,
		affinity.Clients,
		sockets.Definition,
		uplinks.Definition,
		sources.Definition,
		snat.Definition,
		snat.Reverse,
		conntrack.Definition,
		fragments.Definition,
		drops.Definition,
		traffic.Definition,
		config.Definition,
		usage.Definition,
		ports.Definition,
		ports.Given,
		journal.Snat,
		journal.Conntrack,
		journal.Candidates,
		{Name: "paths", Content: typed.Private},    // cached for a moment on each CPU
		{Name: "refusals", Content: typed.Private}, // likewise: confirmed refusals of a port
		{Name: "scratch", Content: typed.Private},  // what the steps of one packet's walk share, on each CPU
	}
}

// Pinned returns the maps that outlive the programs of one load.
func Pinned() []typed.Definition {
	return slices.DeleteFunc(All(), func(d typed.Definition) bool { return d.Content == typed.Private })
}
