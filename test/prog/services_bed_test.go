package prog

import (
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The addresses of Services: ClusterIPs, and one that is also somewhere in the world.
const (
	vip      = "10.96.0.10"
	vip2     = "10.96.0.11"
	vip3     = "10.96.0.12"
	external = "198.51.100.99"
)

// withServices has the programs translate.
func withServices(c *config.NodeConfig) { c.Services = 1 }

// serviceMaps are the maps that the agent fills with Services, and the one of what clients keep of them.
type serviceMaps struct {
	services *services.Map
	sets     *typed.Map[services.SetKey, services.Set]
	backends *backends.Map
	slots    *typed.Map[backends.SlotKey, backends.Slot]
	affinity *affinity.Map
	clients  *typed.Map[affinity.ClientKey, affinity.Client]
	ranges   *typed.Map[services.RangeKey, services.Range]

	hostPorts *hostports.Map
}

func serviceMapsOf(m map[string]*ebpf.Map) serviceMaps {
	return serviceMaps{
		services: typed.New[services.Key, services.Value](m[services.Name], services.Name),
		sets:     typed.New[services.SetKey, services.Set](m[services.SetsName], services.SetsName),
		backends: typed.New[backends.Key, backends.Value](m[backends.Name], backends.Name),
		slots:    typed.New[backends.SlotKey, backends.Slot](m[backends.SlotsName], backends.SlotsName),
		affinity: typed.New[affinity.Key, affinity.Value](m[affinity.Name], affinity.Name),
		clients:  typed.New[affinity.ClientKey, affinity.Client](m[affinity.ClientsName], affinity.ClientsName),
		ranges:   typed.New[services.RangeKey, services.Range](m[services.RangesName], services.RangesName),

		hostPorts: typed.New[hostports.Key, hostports.Value](m[hostports.Name], hostports.Name),
	}
}

// shrink leaves the arrays room for what stories need of them, so that they are emptied quickly.
func shrink(spec *ebpf.CollectionSpec) {
	for _, name := range []string{services.SetsName, backends.Name, backends.SlotsName} {
		spec.Maps[name].MaxEntries = 1024
	}
}

// fillServices writes what the agent writes before any Service: the holder of the world's flows, and the addresses on which
// NodePorts answer.
func (b *bed) fillServices() {
	b.Helper()
	must(b, b.devices.Put(devices.Key{}, devices.Value{}))
	for _, own := range []string{nodeIP, nodeOtherIP} {
		for _, a := range both(own) {
			must(b, b.services.Put(services.Key{Address: a}, services.Value{Flags: services.Node | services.Own}))
		}
	}
}

// numbers are the last ones that Services of a bed have got.
type numbers struct{ set, backend, slot uint32 }

// served is a port of a Service in the maps.
type served struct {
	b     *bed
	set   uint32
	proto wire.Protocol
	key   services.Key
	all   []uint32
}

// serve writes a ClusterIP's port with its backends, such as "10.244.1.11:8080": what they are on decides the flags.
func (b *bed) serve(address string, port uint16, proto wire.Protocol, ends ...string) *served {
	b.Helper()
	s := b.declare(address, port, proto, services.ClusterIP|services.Answers)
	s.swap(ends...)
	return s
}

// declare writes the two entries of a frontend, with these flags of the address, and no backends.
func (b *bed) declare(address string, port uint16, proto wire.Protocol, flags services.Flags) *served {
	b.Helper()
	b.numbers.set++
	s := &served{b: b, set: b.numbers.set, proto: proto}
	s.key = services.Key{Address: b.addr(address), Port: wire.PortFrom(port), Proto: b.family.proto(proto)}
	must(b, b.services.Put(services.Key{Address: s.key.Address}, services.Value{Flags: flags}))
	must(b, b.services.Put(s.key, services.Value{Set: s.set}))
	return s
}

// anyOwn stands for all addresses on which NodePorts answer.
const anyOwn = "0.0.0.0"

// also has the port answer at another frontend as well, with these flags.
func (s *served) also(address string, port uint16, flags services.Flags) *served {
	s.b.Helper()
	at := services.Key{Address: s.b.addr(address), Port: wire.PortFrom(port), Proto: s.b.family.proto(s.proto)}
	must(s.b, s.b.services.Put(at, services.Value{Set: s.set, Flags: flags}))
	return s
}

// nodePort has it answer on the node's addresses.
func (s *served) nodePort(port uint16, flags services.Flags) *served {
	return s.also(anyOwn, port, flags)
}

// loadBalancer has it answer at an address that the node does not have.
func (s *served) loadBalancer(address string, port uint16, flags services.Flags) *served {
	s.b.Helper()
	must(s.b, s.b.services.Put(services.Key{Address: s.b.addr(address)}, services.Value{Flags: services.Answers}))
	return s.also(address, port, flags)
}

// hostPort gives a pod a port of an address of the node's, or of all of them, as the plugin does.
func (b *bed) hostPort(address string, port uint16, proto wire.Protocol, pod string) {
	b.Helper()
	must(b, b.hostPorts.Put(b.hostPortKey(address, port, proto), hostports.Value{
		PodAddress: b.addr(pod), PodPort: wire.PortFrom(8080), Ifindex: uint32(b.pods[pod].index),
	}))
}

func (b *bed) hostPortKey(address string, port uint16, proto wire.Protocol) hostports.Key {
	return hostports.KeyFrom(b.ip(address), port, b.family.proto(proto))
}

// swap gives the port other backends, in a new block: what is not among them any more serves no more.
func (s *served) swap(ends ...string) *served {
	s.b.Helper()
	for _, n := range s.all {
		s.set1(n, func(v *backends.Value) { v.Flags &^= backends.Serving })
	}
	s.all = nil
	for _, end := range ends {
		s.all = append(s.all, s.add(end))
	}
	s.block(s.all, nil)
	return s
}

// restrict has pods use the set Local, of which these are the backends.
func (s *served) restrict(local ...uint32) *served {
	s.b.Helper()
	s.block(s.all, local)
	must(s.b, s.b.services.Put(s.key, services.Value{Set: s.set, Flags: services.Local}))
	return s
}

// keeps has each client keep its backend for so many seconds.
func (s *served) keeps(seconds uint32) *served {
	s.b.Helper()
	v, err := s.b.sets.Get(services.SetKey{Set: s.set})
	must(s.b, err)
	v.Affinity = seconds
	must(s.b, s.b.sets.Put(services.SetKey{Set: s.set}, v))
	return s
}

// add writes a backend.
func (s *served) add(end string) uint32 {
	s.b.Helper()
	s.b.numbers.backend++
	at := netip.MustParseAddrPort(end)
	v := backends.Value{
		Address: s.b.addr(at.Addr().String()), Port: wire.PortFrom(at.Port()), Proto: s.b.family.proto(s.proto),
		Flags: backends.Serving | backends.OnNode, Set: s.set, Generation: 1,
	}
	if isWorld(s.b.family, at.Addr().String()) {
		v.Flags = backends.Serving
	}
	must(s.b, s.b.backends.Put(backends.Key{Backend: s.b.numbers.backend}, v))
	return s.b.numbers.backend
}

// block writes a set's block and then the word that names it.
func (s *served) block(cluster, local []uint32) {
	s.b.Helper()
	first := s.b.numbers.slot
	for _, n := range slices.Concat(cluster, local) {
		must(s.b, s.b.slots.Put(backends.SlotKey{Slot: s.b.numbers.slot}, backends.Slot{Backend: n}))
		s.b.numbers.slot++
	}
	v, err := s.b.sets.Get(services.SetKey{Set: s.set})
	must(s.b, err)
	v.Block = services.BlockOf(first, uint32(len(cluster)), uint32(len(local)))
	must(s.b, s.b.sets.Put(services.SetKey{Set: s.set}, v))
}

// set1 changes a backend's record.
func (s *served) set1(number uint32, change func(*backends.Value)) {
	s.b.Helper()
	v, err := s.b.backends.Get(backends.Key{Backend: number})
	must(s.b, err)
	change(&v)
	must(s.b, s.b.backends.Put(backends.Key{Backend: number}, v))
}

// linger has a backend be in none of the port's sets, though it answers: others are nearer, or it terminates beside others.
func (s *served) linger(number uint32) {
	s.b.Helper()
	s.set1(number, func(v *backends.Value) { v.Flags |= backends.Answers })
}

// stop has all backends serve no more, though they live: not ready, or terminating.
func (s *served) stop() *served {
	s.b.Helper()
	s.swap()
	return s
}

// gone has a backend be in no EndpointSlice any more.
func (s *served) gone(number uint32) {
	s.b.Helper()
	s.set1(number, func(v *backends.Value) { v.Generation, v.Flags = v.Generation+1, 0 })
}

// withdraw deletes the port, and its address.
func (s *served) withdraw() {
	s.b.Helper()
	must(s.b, s.b.services.Delete(s.key))
	must(s.b, s.b.services.Delete(services.Key{Address: s.key.Address}))
}
