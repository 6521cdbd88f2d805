package prog

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/conntrack"
	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/ports"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// mark is the bit that the programs are loaded with.
const mark = 0x00800000

// bed is a node of both families with the programs loaded and the maps filled as the agent and the plugin fill them, and
// the family in which a story happens there. Nothing is pinned.
type bed struct {
	testing.TB
	family
	wires
	serviceMaps
	born     uint64 // when it was made, by the programs' clock
	programs map[wire.Direction]*ebpf.Program
	collect  datapath.Collector
	far      *ebpf.Program // calls ec_from_tunnel, with a key
	sender   *ebpf.Map     // the key
	answers  bool          // programs answer a packet with one of their own, whose sum nobody knows

	translates bool // Services are on: the stack gets packets to backends

	config       *config.Map
	endpoints    *endpoints.Map
	devices      *devices.Map
	bridges      *bridges.Map
	destinations *destinations.Map
	sources      *sources.Map
	uplinks      *uplinks.Map
	snat         *snat.Map
	reverse      *snat.Map
	conntrack    *conntrack.Map
	fragments    *fragments.Map
	usage        *usage.Map
	ports        *ports.Map
	drops        *drops.Map
	traffic      *traffic.Map
	numbers      numbers
}

// option changes the constants that the programs are loaded with.
type option func(*config.NodeConfig)

// between are the ports from low to high; none, if high is below low.
func between(low, high uint32) config.PortRange {
	return config.PortRange{First: low, Count: high - low + 1}
}

// withPorts says which ports there are to masquerade to: those from low to high.
func withPorts(low, high uint32) option { return withPortRanges(between(low, high)) }

// withPortRanges is withPorts of several pieces.
func withPortRanges(ranges ...config.PortRange) option {
	return func(c *config.NodeConfig) {
		c.SnatPorts = [config.PortRanges]config.PortRange{}
		copy(c.SnatPorts[:], ranges)
	}
}

// withHeldPorts says which ports flows of older builds may hold.
func withHeldPorts(low, high uint32) option {
	return func(c *config.NodeConfig) { c.SnatHeld = between(low, high) }
}

// withTables sets how many flows the tables hold.
func withTables(snatEntries, conntrackEntries uint32) option {
	return func(c *config.NodeConfig) { c.SnatEntries, c.ConntrackEntries = snatEntries, conntrackEntries }
}

// withPaths has the programs go by what they found out about an address for so long; without it they ask every time, so
// that what a test changes is seen at once.
func withPaths(d time.Duration) option {
	return func(c *config.NodeConfig) { c.PathLifetime = uint32(d) }
}

// withoutMasquerade turns masquerading off.
func withoutMasquerade(c *config.NodeConfig) { c.Masquerade = 0 }

// newBed makes a node in a network namespace of the calling goroutine's own.
func newBed(tb testing.TB, f family, options ...option) *bed {
	tb.Helper()
	priv.Isolate(tb)
	b := &bed{TB: tb, family: f, wires: buildNode(tb)}
	b.born = now(b)
	b.load(options)
	b.fillNode()
	for pod := range b.pods {
		b.addPod(pod)
	}
	return b
}

func (b *bed) load(options []option) {
	b.Helper()
	c := config.NodeConfig{
		Masquerade: 1<<wire.IPv4 | 1<<wire.IPv6, Mark: mark, SnatPorts: [config.PortRanges]config.PortRange{between(49152, 65535)}, SnatHeld: between(49152, 65535), SnatEntries: 4096, ConntrackEntries: 4096,
		TunnelPort: tunnelPort, TunnelVNI: vni, TunnelChecksum: 1,
	}
	for _, o := range options {
		o(&c)
	}
	b.translates = c.Services != 0
	coll := take(b, c)
	b.programs = map[wire.Direction]*ebpf.Program{
		wire.FromPod:    coll.Programs[bpf.DataplaneProgEcFromPod],
		wire.FromUplink: coll.Programs[bpf.DataplaneProgEcFromUplink],
		wire.ToUplink:   coll.Programs[bpf.DataplaneProgEcToUplink],
		wire.FromTunnel: coll.Programs[bpf.DataplaneProgEcFromTunnel],
		wire.ToTunnel:   coll.Programs[bpf.DataplaneProgEcToTunnel],
		wire.ToPod:      coll.Programs[bpf.DataplaneProgEcToPod],
	}
	b.far = b.farEnd(b.programs[wire.FromTunnel])
	b.collect = datapath.Collector{Program: coll.Programs[bpf.DataplaneProgEcCollect], Maps: coll.Maps}
	b.wrap(coll.Maps)
}

func (b *bed) wrap(m map[string]*ebpf.Map) {
	b.endpoints = typed.New[endpoints.Key, endpoints.Value](m[endpoints.Name], endpoints.Name)
	b.devices = typed.New[devices.Key, devices.Value](m[devices.Name], devices.Name)
	b.bridges = typed.New[bridges.Key, bridges.Value](m[bridges.Name], bridges.Name)
	b.destinations = typed.New[destinations.Key, destinations.Value](m[destinations.Name], destinations.Name)
	b.sources = typed.New[sources.Key, sources.Value](m[sources.Name], sources.Name)
	b.uplinks = typed.New[uplinks.Key, uplinks.Value](m[uplinks.Name], uplinks.Name)
	b.snat = typed.New[snat.Key, snat.Value](m[snat.Name], snat.Name)
	b.reverse = typed.New[snat.Key, snat.Value](m[snat.ReverseName], snat.ReverseName)
	b.conntrack = typed.New[conntrack.Key, conntrack.Value](m[conntrack.Name], conntrack.Name)
	b.fragments = typed.New[fragments.Key, fragments.Value](m[fragments.Name], fragments.Name)
	b.usage = typed.New[usage.Key, usage.Value](m[usage.Name], usage.Name)
	b.ports = typed.New[ports.Key, ports.Value](m[ports.Name], ports.Name)
	b.drops = counters.Of[drops.Reason](m[drops.Name], drops.Name)
	b.traffic = counters.Of[traffic.Event](m[traffic.Name], traffic.Name)
	b.config = typed.New[config.Key, config.Value](m[config.Name], config.Name)
	b.serviceMaps = serviceMapsOf(m)
	b.configure(0)
}

// configure writes the node's one record, with these flags.
func (b *bed) configure(flags config.Flags) {
	v := config.Value{
		Layout: wire.LayoutVersion, NodeAddresses: both(nodeIP), PodCIDRAddresses: both("10.244.1.0"), Flags: flags,
		TunnelIfindex: uint32(b.tunnel),
	}
	for f := range wire.Families {
		v.PodCIDRLens[f] = uint32(family{f}.prefix("10.244.1.0/24").Bits())
		v.Tunnel[f] = config.TunnelAddresses{Source: family{f}.addr(nodeIP), Address: family{f}.addr(tunnelIP)}
	}
	must(b, b.config.Put(config.Key{}, v))
}

// fillNode writes what the agent knows of the cluster, and that it sweeps the tables.
func (b *bed) fillNode() {
	for table := range usage.Tables {
		must(b, b.usage.Put(usage.Key{Table: table}, usage.Value{Swept: now(b) + uint64(2*day)}))
	}
	b.uplink1(nodeIP)
	must(b, b.uplinks.Put(uplinks.Key{Ifindex: uint32(b.other.index)}, uplinks.Value{Addresses: both(nodeOtherIP)}))
	must(b, b.uplinks.Put(uplinks.Key{Ifindex: uint32(b.bare.index)}, uplinks.Value{}))
	for f := range wire.Families {
		b.fillDestinations(family{f})
	}
	if b.translates {
		b.fillServices()
	}
}

// behind is another node's podCIDR by an uplink, or by none.
func (f family) behind(node string, via int) destinations.Value {
	return destinations.Value{Kind: destinations.PodCIDR, Ifindex: uint32(via), Node: f.addr(node), Alias: f.opposite().addr(node), MTU: mtu}
}

// node is another node's address.
func (f family) node(address string) destinations.Value {
	return destinations.Value{Kind: destinations.Node, Node: f.addr(address), Alias: f.opposite().addr(address)}
}

// byTunnel is how node 5, behind the tunnel, or its pods, are reached.
func (f family) byTunnel(kind destinations.Kind) destinations.Value {
	return destinations.Value{
		Kind: kind, Node: f.addr(node5IP), Alias: f.opposite().addr(node5IP), MTU: tunnelMTU, Flags: destinations.ByTunnel,
	}
}

// fillDestinations writes what a family's addresses are.
func (b *bed) fillDestinations(f family) {
	b.Helper()
	for prefix, v := range map[string]destinations.Value{
		"10.244.1.0/24":     {Kind: destinations.Local},
		podC + "/32":        {Kind: destinations.Local},
		"10.244.2.0/24":     f.behind(node2IP, b.uplink.index),
		"10.244.3.0/24":     f.behind(offLinkIP, 0),
		"10.244.4.0/24":     f.behind(silentIP, b.uplink.index),
		nodeIP + "/32":      {Kind: destinations.Host},
		nodeOtherIP + "/32": {Kind: destinations.Host},
		"169.254.20.10/32":  {Kind: destinations.Host},
		node2IP + "/32":     f.node(node2IP),
		node5IP + "/32":     f.byTunnel(destinations.Node),
		"10.244.5.0/24":     f.byTunnel(destinations.PodCIDR),
		tunnelIP + "/32":    {Kind: destinations.Host},
		"10.200.0.0/16":     {Kind: destinations.Native},
		"10.96.0.0/16":      {Kind: destinations.Service},
		stated + "/32":      {Kind: destinations.World},
	} {
		must(b, b.destinations.Put(f.key(prefix), v))
	}
}

// uplink1 gives the first uplink its address to masquerade to.
func (b *bed) uplink1(address string) {
	must(b, b.uplinks.Put(uplinks.Key{Ifindex: uint32(b.uplink.index)}, uplinks.Value{Addresses: both(address)}))
}

// addPod writes what the plugin writes at ADD.
func (b *bed) addPod(pod string) { b.addPodAs(pod, pod) }

// addPodAs does so for a pod that gets another address, of each family.
func (b *bed) addPodAs(pod, address string) {
	l := b.pods[pod]
	podMAC, hostMAC := wire.MAC(l.peer), wire.MAC(l.mac)
	must(b, b.devices.Put(devices.Key{Ifindex: uint32(l.index)},
		devices.Value{Addresses: both(address), PodMAC: podMAC, HostMAC: hostMAC}))
	for _, a := range both(address) {
		must(b, b.endpoints.Put(endpoints.Key{Address: a}, endpoints.Value{Ifindex: uint32(l.index), PodMAC: podMAC, HostMAC: hostMAC}))
	}
}

// deletePod removes what the plugin removes at DEL.
func (b *bed) deletePod(pod string) {
	for _, a := range both(pod) {
		must(b, b.endpoints.Delete(endpoints.Key{Address: a}))
	}
	must(b, b.devices.Delete(devices.Key{Ifindex: uint32(b.pods[pod].index)}))
}

// device returns a pod's record with its counters.
func (b *bed) device(pod string) devices.Value {
	b.Helper()
	v, err := b.devices.Get(devices.Key{Ifindex: uint32(b.pods[pod].index)})
	must(b, err)
	return v
}

// giveAway deletes the pod of an address and gives the address to the pod that
// has another's interface, whose own address goes.
func (b *bed) giveAway(address, to string) {
	b.deletePod(address)
	b.deletePod(to)
	b.addPodAs(to, address)
}
