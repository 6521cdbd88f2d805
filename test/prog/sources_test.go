package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// bit gives an uplink its number in the masks of destinations.
func (b *bed) bit(l veth, n uint32) {
	b.Helper()
	key := uplinks.Key{Ifindex: uint32(l.index)}
	v, err := b.uplinks.Get(key)
	must(b, err)
	v.Bit = n
	must(b, b.uplinks.Put(key, v))
}

// leadsBy has the way to another node's prefix be by one uplink and by no other.
func (b *bed) leadsBy(prefix string, kind destinations.Kind, l veth) {
	b.Helper()
	b.bit(l, 1)
	must(b, b.destinations.Put(b.key(prefix),
		destinations.Value{Kind: kind, Ifindex: uint32(l.index), Node: b.addr(node2IP), MTU: mtu, Uplinks: 1 << 1}))
}

// What the host would forward is not the cluster's unless it comes from there: others take this node's word for it. Where the
// kernel sees to that itself (IPv4: its own addresses, and the reverse path filter) it is left to it.
func TestFromUplinkForwarded(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.leadsBy(node2IP+"/32", destinations.Node, b.uplink)
		b.leadsBy("10.244.2.0/24", destinations.PodCIDR, b.uplink)
		for _, to := range []string{beyond, node5IP, remote, node2IP, world2} {
			for from, why := range map[string]string{
				nodeIP: "SPOOFED_SOURCE", tunnelIP: "SPOOFED_SOURCE", podA: "SPOOFED_SOURCE", noPod: "SPOOFED_SOURCE",
				node2IP: "WRONG_UPLINK", remote: "WRONG_UPLINK",
			} {
				b.arrive(b.other, udp(from, 4000, to, 53)).is(each(f, "stack", "drop "+why))
				later := udp(from, 4000, to, 53).with(func(p *packet) { p.fragment = 100 })
				b.arrive(b.other, later).is(each(f, "drop FRAG_NOT_FOUND", "drop "+why))
			}
			b.leftToStack("the world's", b.arrive(b.other, udp(world, 4000, to, 53)))
			b.leftToStack("by its uplink", b.arrive(b.uplink, udp(node2IP, 4000, to, 53)))
		}
		b.leftToStack("to the node", b.arrive(b.other, udp(node2IP, 4000, nodeIP, 53)))
		link := []string{"169.254.0.7", "fe80::7"}
		b.leftToStack("on the link", b.arrive(b.uplink, udp(each(f, link...), 4000, each(f, link...), 53)))
		b.empty()
	})
}

// What the cluster's own addresses send arrives by an uplink that has a route to them, and by no other.
func TestFromUplinkSourceOfEachUplink(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		b.bit(b.uplink, 0)
		b.bit(b.other, 63)
		const first, last = 1, 1 << 63
		for _, c := range []struct {
			name     string
			ifindex  int
			uplinks  uint64
			up, over string // what becomes of a packet by the first uplink, and by the other
		}{
			{"the next hop's uplink", b.uplink.index, first, "delivered", "drop WRONG_UPLINK"},
			{"the next hop's uplink, before the mask follows", b.uplink.index, last, "delivered", "delivered"},
			{"both", b.uplink.index, first | last, "delivered", "delivered"},
			{"no next hop, the first", 0, first, "delivered", "drop WRONG_UPLINK"},
			{"no next hop, the other", 0, last, "drop WRONG_UPLINK", "delivered"},
			{"neither", 0, 2, "drop WRONG_UPLINK", "drop WRONG_UPLINK"},
			{"an agent that knew no masks", b.uplink.index, 0, "delivered", "delivered"},
		} {
			for source, d := range map[string]struct {
				prefix string
				kind   destinations.Kind
			}{
				remote:  {"10.244.2.0/24", destinations.PodCIDR},
				node2IP: {node2IP + "/32", destinations.Node},
				native:  {"10.200.0.0/16", destinations.Native},
			} {
				must(t, b.destinations.Put(b.key(d.prefix), destinations.Value{
					Kind: d.kind, Ifindex: uint32(c.ifindex), Node: b.addr(node2IP), MTU: mtu, Uplinks: c.uplinks,
				}))
				p := udp(source, 4000, podA, 80)
				if up, over := b.arrive(b.uplink, p).what, b.arrive(b.other, p).what; up != c.up || over != c.over {
					t.Errorf("%s, %v: %q and %q, want %q and %q", c.name, d.kind, up, over, c.up, c.over)
				}
			}
		}
		b.arrive(b.other, udp(world, 4000, podA, 80)).is("delivered") // the world may be anywhere
		must(t, b.uplinks.Delete(uplinks.Key{Ifindex: uint32(b.other.index)}))
		b.arrive(b.other, udp(remote, 4000, podA, 80)).is("delivered") // of an agent that knew no masks
		must(t, b.destinations.Put(b.key(node2IP+"/32"),
			destinations.Value{Kind: destinations.Node, Uplinks: last}))
		b.arrive(b.other, udp(node2IP, 4000, podA, 80)).is("drop WRONG_UPLINK")
	})
}

// A source that no host can have is dropped before anything is remembered of it.
func TestFromUplinkMartians(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, source := range each(f, []string{
			"0.0.0.0", "0.255.255.255", "127.0.0.1", "127.255.255.255", "224.0.0.1", nowhere, "239.255.255.255", "240.0.0.1", "255.255.255.255",
		}, []string{"::", "::1", "ff00::", "ff02::1", nowhere, "ffff::1", "fe80::2", "febf:ffff::1"}) {
			b.fromUplink(udp(source, 4000, podA, 80)).is("drop SPOOFED_SOURCE")
			b.fromUplink(tcp(source, 4000, podA, 80, syn)).is("drop SPOOFED_SOURCE")
		}
		b.empty()
		for _, source := range each(f, []string{"1.0.0.0", "126.255.255.255", "128.0.0.1", "223.255.255.255"},
			[]string{"::2", "64:ff9b::1", "fe7f:ffff::1", "fec0::1", "feff::1"}) {
			b.fromUplink(udp(source, 4000, podA, 80)).is("delivered")
		}
	})
}

// What the stack forwards with a pod's address is the pod's only if it came by the pod's link, or by none: then the host
// writes in the pod's name.
func TestToUplinkSourceOfEachLink(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		p := udp(podA, 50000, world, 53)
		by := func(ifindex int) result {
			return b.run(wire.ToUplink, b.uplink.index, p.bytes(b.family), map[int]uint32{skbIngressIfindex: uint32(ifindex)})
		}
		by(b.pods[podA].index).is("stack")
		by(0).is("stack")
		for _, other := range []int{b.uplink.index, b.pods[podB].index} {
			by(other).is("drop SPOOFED_SOURCE")
		}
		b.count(1, 0)
	})
}
