package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/journal"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
)

// Maps are the pinned maps of a node, open.
type Maps struct {
	Config       *config.Map
	Conntrack    *conntrack.Map
	Destinations *destinations.Map
	Devices      *devices.Map
	Drops        *drops.Map
	Endpoints    *endpoints.Map
	Fragments    *fragments.Map
	Ports        *ports.Map
	Snat         *snat.Map
	SnatReverse  *snat.Map
	Traffic      *traffic.Map
	Uplinks      *uplinks.Map
	Usage        *usage.Map

	all map[string]*ebpf.Map
}

// wrapMaps gives open maps their types.
func wrapMaps(all map[string]*ebpf.Map) (*Maps, error) {
	for _, name := range mapNames() {
		if all[name] == nil {
			return nil, fmt.Errorf("the programs have no map %s", name)
		}
	}
	m := &Maps{all: all}
	m.Config = typed.New[config.Key, config.Value](all[config.Name], config.Name)
	m.Conntrack = typed.New[conntrack.Key, conntrack.Value](all[conntrack.Name], conntrack.Name)
	m.Destinations = typed.New[destinations.Key, destinations.Value](all[destinations.Name], destinations.Name)
	m.Devices = typed.New[devices.Key, devices.Value](all[devices.Name], devices.Name)
	m.Drops = drops.Of(all[drops.Name])
	m.Endpoints = typed.New[endpoints.Key, endpoints.Value](all[endpoints.Name], endpoints.Name)
	m.Fragments = typed.New[fragments.Key, fragments.Value](all[fragments.Name], fragments.Name)
	m.Ports = typed.New[ports.Key, ports.Value](all[ports.Name], ports.Name)
	m.Snat = typed.New[snat.Key, snat.Value](all[snat.Name], snat.Name)
	m.SnatReverse = typed.New[snat.Key, snat.Value](all[snat.ReverseName], snat.ReverseName)
	m.Traffic = traffic.Of(all[traffic.Name])
	m.Uplinks = typed.New[uplinks.Key, uplinks.Value](all[uplinks.Name], uplinks.Name)
	m.Usage = typed.New[usage.Key, usage.Value](all[usage.Name], usage.Name)
	return m, nil
}

func mapNames() []string {
	return []string{
		config.Name, conntrack.Name, destinations.Name, devices.Name, drops.Name, endpoints.Name,
		fragments.Name, journal.CandidatesName, journal.ConntrackName, journal.SnatName, ports.Name, snat.Name, snat.ReverseName, traffic.Name,
		uplinks.Name, usage.Name,
	}
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
