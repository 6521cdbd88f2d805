package prog

import (
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Each family is masqueraded or not, whatever the other is.
func TestMasqueradeOfOneFamily(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, func(c *config.NodeConfig) { c.Masquerade = 1 << f.Family })
		tcpFrom := func(f family) packet { return tcp(f.ip(podA).String(), 50000, f.ip(world).String(), 80, syn) }
		sent := func(f family) result {
			l := b.pods[podA]
			return b.run(wire.FromPod, l.index, tcpFrom(f).bytes(f), nil)
		}
		sent(f).is("forwarded").flow("tcp " + nodeIP + ":50000 > " + world + ":80")
		sent(f.opposite()).is("forwarded").flow("tcp " + podA + ":50000 > " + world + ":80")
		b.toUplink(tcpFrom(f).with(func(p *packet) { p.sport = 50001 })).is("stack").flow("tcp " + nodeIP + ":50001 > " + world + ":80")
		frame := tcpFrom(f.opposite()).bytes(f.opposite())
		b.leftToStack("the other family's", b.run(wire.ToUplink, b.uplink.index, frame, nil))
		b.count(2, 0)
	})
}

// The families share the tables, and no flow of one is taken for a flow of the other.
func TestFamiliesSideBySide(t *testing.T) {
	b := newBed(t, inIPv4)
	for f := range wire.Families {
		f := family{f}
		p := udp(podA, 50000, world, 53)
		out := b.run(wire.FromPod, b.pods[podA].index, p.bytes(f), nil).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
		back := answer(out, p).with(func(p *packet) { p.macTo = b.uplink.mac })
		in := b.run(wire.FromUplink, b.uplink.index, back.bytes(f), nil).is("delivered").flow("udp " + world + ":53 > " + podA + ":50000")
		if in.view().family != f {
			t.Errorf("%v came back in another family", in.view())
		}
	}
	b.count(2, 0)
}

// A pod without an address of a family sends and gets nothing in it; the other is what it was.
func TestPodOfOneFamily(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		l := b.pods[podA]
		v := b.device(podA)
		v.Addresses[f.Family] = wire.Addr{}
		must(t, b.devices.Put(devices.Key{Ifindex: uint32(l.index)}, v))
		must(t, b.endpoints.Delete(endpoints.Key{Address: f.addr(podA)}))
		for _, from := range []string{podA, "0.0.0.0"} {
			for _, to := range []string{podB, remote, world, nodeIP} {
				b.run(wire.FromPod, l.index, udp(from, 5000, to, 53).bytes(f), nil).is("drop SPOOFED_SOURCE")
			}
		}
		b.fromUplink(udp(world, 53, podA, 5000)).is("drop NO_ENDPOINT")
		b.fromPod(udp(podB, 53, podA, 5000)).is("drop NO_ENDPOINT")
		for _, to := range []string{podB, world} {
			got := b.run(wire.FromPod, l.index, udp(podA, 5000, to, 53).bytes(f.opposite()), nil).what
			if got != "delivered" && got != "forwarded" {
				t.Errorf("in the other family to %s: outcome %q", to, got)
			}
		}
	})
}

// A node that lacks a family masquerades nothing in it, and takes no address for its own podCIDR's.
func TestNodeOfOneFamily(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		v, err := b.config.Get(config.Key{})
		must(t, err)
		v.NodeAddresses[f.Family], v.PodCIDRAddresses[f.Family], v.PodCIDRLens[f.Family] = wire.Addr{}, wire.Addr{}, 0
		v.Tunnel[f.Family] = config.TunnelAddresses{}
		must(t, b.config.Put(config.Key{}, v))
		must(t, b.destinations.Delete(b.key("10.244.1.0/24")))
		key := uplinks.Key{Ifindex: uint32(b.uplink.index)}
		uplink, err := b.uplinks.Get(key)
		must(t, err)
		uplink.Addresses[f.Family] = wire.Addr{}
		must(t, b.uplinks.Put(key, uplink))

		b.fromPod(udp(podA, 5000, world, 53)).is("drop NO_SNAT_ADDRESS")
		b.toUplink(udp(podA, 5000, world, 53)).is("drop NO_SNAT_ADDRESS")
		b.leftToStack("to an address that was in its podCIDR", b.fromUplink(udp(world, 5000, noPod, 53)))
		p := udp(podA, 5000, world, 53)
		b.run(wire.FromPod, b.pods[podA].index, p.bytes(f.opposite()), nil).is("forwarded")
	})
}
