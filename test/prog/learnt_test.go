package prog

import (
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// leastMTU is what the kernel believes at least, whoever tells it.
func (f family) leastMTU() int { return each(f, 552, 1280) }

// learns has somebody tell the node that the way to an address carries no more.
func (b *bed) learns(to string, mtu int) {
	b.Helper()
	quote := ping(to, 7, nodeIP).replied() // no socket of the node's has to know it
	if b.family == inIPv6 {
		quote = ping(nodeIP, 7, to)
	}
	e := icmpError(world, nodeIP, 3, 4, quote.bytes(b.family), 8)
	e.rest, e.macTo, e.macFrom = uint16(mtu), b.uplink.mac, b.uplink.peer
	far, frame := b.linkTo("ecprup-p"), e.bytes(b.family)
	deadline := time.Now().Add(priv.Patience(5 * time.Second))
	for tries := 0; ; tries++ {
		// A link that has just come up may lose a frame.
		if tries%100 == 0 {
			far.send(frame)
		}
		routes, err := netlink.RouteGet(b.netIP(to))
		must(b, err)
		if len(routes) > 0 && routes[0].MTU == mtu {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("the node has not learnt that the way to %s carries %d: %v", to, mtu, routes)
		}
		time.Sleep(time.Millisecond)
	}
}

// What somebody has told the node of a way is not for pods: it may be forged, and the
// stack does not forward IPv4 by it.
func TestTooBigForTheNodeAlone(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		for _, to := range []string{world, native, node2IP} {
			b.learns(to, f.leastMTU())
			p := f.whole(udp(podA, 5000, to, 53))
			b.fromPod(f.sized(p, f.leastMTU())).is("forwarded")
			b.leftToStack("more, to "+to, b.fromPod(f.sized(p, f.leastMTU()+1)))
			b.leftToStack("as much as the link carries, to "+to, b.fromPod(f.sized(p, mtu)))
			b.answers = true
			b.fromPod(f.sized(p, mtu+1)).tells(podA, mtu)
			b.answers = false
		}
	})
}

// By what the kernel has learnt of the way to a far end over IPv6 it sends outer packets, for as long as it knows that, so the
// pod is told on either way into the tunnel, though an uplink may be a host's (that the node forwards is for all to say).
func TestTooBigForTheFarEnd(t *testing.T) {
	b := newBed(t, inIPv6)
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/ecprup/forwarding", []byte("0"), 0))
	const learnt = 1280 - (mtu - tunnelMTU)
	p := udp(podA, 5000, node5IP, 53)
	for _, by := range []func(*bed, packet) result{(*bed).fromPod, (*bed).toUplink} {
		by(b, b.sized(p, learnt+1)).is("forwarded")
		inIPv6.route(t, b.uplink, node5IP+"/32", gatewayIP)
		b.learns(node5IP, 1280)
		b.outlast(150 * time.Millisecond)
		by(b, b.sized(p, learnt)).is("forwarded")
		b.answers = true
		by(b, b.sized(p, learnt+1)).tells(podA, learnt)
		b.answers = false
		// What has been learnt goes with the route.
		must(t, netlink.RouteDel(&netlink.Route{LinkIndex: b.uplink.index, Dst: b.ipNet(node5IP + "/32")}))
		b.outlast(150 * time.Millisecond)
	}
}

// What the stack sends through the tunnel, for its own sockets or translated for a pod, comes back to it.
func TestTooBigFromTheStack(t *testing.T) {
	b := newBed(t, inIPv6)
	const learnt = 1280 - (mtu - tunnelMTU)
	inIPv6.route(t, b.uplink, node5IP+"/32", gatewayIP)
	for _, from := range []string{nodeIP, podA} {
		b.answers = false
		b.toTunnel(b.sized(udp(from, 5000, beyond, 53), tunnelMTU)).is("stack")
	}
	b.learns(node5IP, 1280)
	b.outlast(150 * time.Millisecond)
	for _, from := range []string{nodeIP, podA} {
		p := udp(from, 5000, beyond, 53)
		b.answers = false
		b.toTunnel(b.sized(p, learnt)).is("stack")
		b.answers = true
		b.toTunnel(b.sized(p, learnt+1)).returns(learnt)
	}
}

// Anybody could shut the tunnel to IPv6 for minutes with one error about a packet that the kernel can't verify.
func TestNobodyShutsTheTunnel(t *testing.T) {
	b := newBed(t, inIPv6)
	const least = 1280 + mtu - tunnelMTU
	about := map[string]packet{
		"an outer packet": udp(nodeIP, 50000, node5IP, tunnelPort), "a ping": ping(nodeIP, 7, node5IP), "another protocol": {src: nodeIP, dst: node5IP, proto: 253},
	}
	told := func(p packet, mtu int) packet {
		e := icmpError(world, nodeIP, 3, 4, p.with(func(p *packet) { p.payload = make([]byte, 64) }).bytes(b.family), 64)
		e.rest = uint16(mtu)
		return e
	}
	for name, p := range about {
		b.fromUplink(told(p, least-1)).is("drop FORGED_ERROR")
		b.fromUplink(told(p, least-1).with(func(p *packet) { p.fragment = moreFragments })).is("drop FORGED_ERROR")
		b.leftToStack(name+", with room for IPv6", b.fromUplink(told(p, least)))
	}
	b.leftToStack("TCP", b.fromUplink(told(tcp(nodeIP, 50000, node5IP, 10250, ack), 1280)))
	b.leftToStack("a node that no tunnel leads to", b.fromUplink(told(ping(nodeIP, 7, node2IP), 1280)))
	b.leftToStack("another error", b.fromUplink(icmpError(world, nodeIP, 3, 1, about["a ping"].bytes(b.family), 64)))

	v, err := b.config.Get(config.Key{})
	must(t, err)
	v.PodCIDRLens[wire.IPv6] = 0
	must(t, b.config.Put(config.Key{}, v))
	b.leftToStack("pods have no IPv6", b.fromUplink(told(about["a ping"], 1280)))
}
