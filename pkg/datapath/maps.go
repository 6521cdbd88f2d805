package datapath

import (
	"errors"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// Maps are the open pinned maps of a node. Those that the agent reads and writes are
// fields with their types.
type Maps struct {
	Backends     *backends.Map
	Bridges      *bridges.Map
	Config       *config.Map
	Destinations *destinations.Map
	Devices      *devices.Map
	Drops        *drops.Map
	Endpoints    *endpoints.Map
	HostPorts    *hostports.Map
	SetNames     *services.NamesMap
	SourceRanges *services.RangesMap
	Services     *services.Map
	Sets         *services.SetsMap
	Slots        *backends.SlotsMap
	Sockets      *sockets.Map
	Traffic      *traffic.Map
	Sources      *sources.Map
	Uplinks      *uplinks.Map
	Usage        *usage.Map

	all map[string]*ebpf.Map
}

// wrapMaps gives open maps their types.
func wrapMaps(all map[string]*ebpf.Map) *Maps {
	m := &Maps{
		Drops:   counters.Of[drops.Reason](all[drops.Name], drops.Name),
		Traffic: counters.Of[traffic.Event](all[traffic.Name], traffic.Name),
		all:     all,
	}
	wrap(&m.Backends, all, backends.Name)
	wrap(&m.Bridges, all, bridges.Name)
	wrap(&m.Config, all, config.Name)
	wrap(&m.Destinations, all, destinations.Name)
	wrap(&m.Devices, all, devices.Name)
	wrap(&m.Endpoints, all, endpoints.Name)
	wrap(&m.HostPorts, all, hostports.Name)
	wrap(&m.SetNames, all, services.NamesName)
	wrap(&m.SourceRanges, all, services.RangesName)
	wrap(&m.Services, all, services.Name)
	wrap(&m.Sets, all, services.SetsName)
	wrap(&m.Slots, all, backends.SlotsName)
	wrap(&m.Sockets, all, sockets.Name)
	wrap(&m.Sources, all, sources.Name)
	wrap(&m.Uplinks, all, uplinks.Name)
	wrap(&m.Usage, all, usage.Name)
	return m
}

func wrap[K comparable, V any](into **typed.Map[K, V], all map[string]*ebpf.Map, name string) {
	*into = typed.New[K, V](all[name], name)
}

// Capacity is how many entries the map of that name holds at most.
func (m *Maps) Capacity(name string) uint32 {
	if one := m.all[name]; one != nil {
		return one.MaxEntries()
	}
	return 0
}

// Close closes every map.
func (m *Maps) Close() error {
	var errs []error
	for _, one := range m.all {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}
