package prog

import (
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The addresses of Services.
const (
	clusterIP  = "10.96.0.10"
	clusterIP2 = "10.96.0.11"
	externalIP = "203.0.113.80"
)

// withServices has the programs translate what pods send to Services.
func withServices(c *config.NodeConfig) { c.Services = 1 }

// serviceMaps are the maps that the agent fills with Services, and the one of what clients keep of them.
type serviceMaps struct {
	services *services.Map
	sets     *typed.Map[services.SetKey, services.Set]
	backends *backends.Map
	slots    *typed.Map[backends.SlotKey, backends.Slot]
	affinity *affinity.Map
}

func serviceMapsOf(m map[string]*ebpf.Map) serviceMaps {
	return serviceMaps{
		services: typed.New[services.Key, services.Value](m[services.Name], services.Name),
		sets:     typed.New[services.SetKey, services.Set](m[services.SetsName], services.SetsName),
		backends: typed.New[backends.Key, backends.Value](m[backends.Name], backends.Name),
		slots:    typed.New[backends.SlotKey, backends.Slot](m[backends.SlotsName], backends.SlotsName),
		affinity: typed.New[affinity.Key, affinity.Value](m[affinity.Name], affinity.Name),
	}
}

// How many sets, and backends in each, a story has room for.
const (
	maxSets = 512
	perSet  = 16
)

// shrink leaves the arrays room for what stories need of them.
func shrink(spec *ebpf.CollectionSpec) {
	spec.Maps[services.SetsName].MaxEntries = maxSets
	spec.Maps[backends.Name].MaxEntries = maxSets * perSet
	spec.Maps[backends.SlotsName].MaxEntries = maxSets * perSet
}

// published is a port of a Service at an address.
type published struct {
	address  string
	port     uint16
	proto    wire.Protocol
	about    services.Flags // what is true of the address
	flags    services.Flags // and of the port
	affinity uint32
	cluster  []string // its endpoints, such as "10.244.1.11:8080"
	local    []string // those that a local traffic policy leaves
}

// clusterPort is a port of a ClusterIP with these endpoints.
func clusterPort(proto wire.Protocol, port uint16, endpoints ...string) published {
	p := published{address: clusterIP, port: port, proto: proto, about: services.ClusterIP, cluster: endpoints}
	if len(endpoints) > 0 {
		p.about |= services.Answers
	}
	return p
}

// with returns the port after a change.
func (p published) with(change func(*published)) published {
	change(&p)
	return p
}

// backendOf is the number of a set's backend.
func backendOf(set uint32, i int) backends.Key { return backends.Key{Backend: set*perSet + uint32(i)} }

// publish writes a port of a Service as the agent does, in the order in which packets need it.
func (b *bed) publish(set uint32, p published) {
	b.Helper()
	first := set * perSet
	for i, endpoint := range append(append([]string(nil), p.cluster...), p.local...) {
		at := netip.MustParseAddrPort(endpoint)
		v := backends.Value{
			Address: b.addr(at.Addr().String()), Port: wire.PortFrom(at.Port()), Proto: p.proto, Flags: backends.Serving,
			Generation: 1, Set: set,
		}
		if at.Addr().String() != world {
			v.Flags |= backends.OnNode
		}
		must(b, b.backends.Put(backendOf(set, i), v))
		must(b, b.slots.Put(backends.SlotKey{Slot: first + uint32(i)}, backends.Slot{Backend: backendOf(set, i).Backend}))
	}
	block := services.BlockOf(first, uint32(len(p.cluster)), uint32(len(p.local)))
	must(b, b.sets.Put(services.SetKey{Set: set}, services.Set{Block: block, Affinity: p.affinity}))
	must(b, b.services.Put(services.Key{Address: b.addr(p.address)}, services.Value{Flags: p.about}))
	must(b, b.services.Put(
		services.Key{Address: b.addr(p.address), Port: wire.PortFrom(p.port), Proto: p.proto},
		services.Value{Set: set, Flags: p.flags}))
}

// changeBackend changes a backend's record.
func (b *bed) changeBackend(set uint32, i int, change func(*backends.Value)) {
	b.Helper()
	v, err := b.backends.Get(backendOf(set, i))
	must(b, err)
	change(&v)
	must(b, b.backends.Put(backendOf(set, i), v))
}
