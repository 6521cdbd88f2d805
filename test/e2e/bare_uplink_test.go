package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	events "github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Uplinks without an Ethernet header, as VPNs, modems and PPP have. A host behind one is reached, and reaches what the node serves, as if
// it were on an Ethernet.

// bareEnds are the addresses of the two ends of such a link, the node's first. roadAddr is the far host's own, beyond the link's networks.
var (
	bareEnds = [wire.Families][2]netip.Addr{
		wire.IPv4: {netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")},
		wire.IPv6: {netip.MustParseAddr("fd00:99::1"), netip.MustParseAddr("fd00:99::2")},
	}
	roadAddr = [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("192.0.2.20"), wire.IPv6: netip.MustParseAddr("2001:db8:20::20")}
)

// roadPort is a host port.
const roadPort = 18080

// bare is a cluster whose first node has its default routes over a link without Ethernet, to the host road.
type bare struct {
	*served
	road    *lab.Namespace
	link    string // at both ends
	carried []wire.Family
}

// startBare joins the first node and the host road by links of that name at both ends, and leads the node's default routes there, before
// the agents start or, late, afterwards.
func startBare(t *testing.T, attach string, late bool, carried []wire.Family, join func(t *testing.T, node, road *lab.Namespace) (link string)) *bare {
	t.Helper()
	b := &bare{carried: carried}
	lead := func(l *lab.Lab) {
		var err error
		b.road, err = l.NewHost("road", roadAddr[wire.IPv4], roadAddr[wire.IPv6])
		must(t, err)
		b.lead(t, l.Nodes[0].Namespace, join)
	}
	before := lead
	if late {
		before = func(*lab.Lab) {}
	}
	b.served = startServedOn(t, lab.Options{Families: families, AgentFlags: []string{
		attach, "--routing-mode=vxlan", fmt.Sprintf("--service-cidr=%s,%s", lab.ServiceCIDR[wire.IPv4], lab.ServiceCIDR[wire.IPv6]),
	}}, before, drops.SpoofedSource, drops.WrongUplink, drops.NoBackend, drops.TooBig)
	if late {
		lead(b.Lab)
	}
	eventually(t, readyLimit, b.link+" is an uplink with addresses", func() bool {
		out, _ := b.Nodes[0].Ebpfctl(t.Context(), "dump", "uplinks")
		return !slices.ContainsFunc(carried, func(f wire.Family) bool { return !strings.Contains(string(out), bareEnds[f][0].String()) })
	})
	return b
}

// lead joins the hosts and leads the node's default routes to road.
func (b *bare) lead(t *testing.T, node *lab.Namespace, join func(t *testing.T, node, road *lab.Namespace) (link string)) {
	t.Helper()
	b.link = join(t, node, b.road)
	for _, f := range b.carried {
		ends := bareEnds[f]
		for i, ns := range []*lab.Namespace{node, b.road} {
			must(t, ns.SetMTU(b.link, 1450)) // as pods have
			addPeer(t, ns, b.link, ends[i], ends[1-i])
		}
		addPeer(t, b.road, "lo", roadAddr[f], netip.Addr{})
		replaceRoute(t, node, &netlink.Route{Gw: ends[1].AsSlice()}, b.link)
	}
}

// addPeer gives a link an address without a network, to a peer if there is one.
func addPeer(t *testing.T, on *lab.Namespace, name string, addr, peer netip.Addr) {
	t.Helper()
	link, err := on.Netlink().LinkByName(name)
	must(t, err)
	a := &netlink.Addr{IPNet: prefix(single(addr).String()), Flags: unix.IFA_F_NODAD}
	if peer.IsValid() {
		a.Peer = prefix(single(peer).String())
	}
	must(t, on.Netlink().AddrAdd(link, a))
}

func replaceRoute(t *testing.T, on *lab.Namespace, r *netlink.Route, name string) {
	t.Helper()
	link, err := on.Netlink().LinkByName(name)
	must(t, err)
	r.LinkIndex = link.Attrs().Index
	// The kernel makes the route to a peer of IPv6 in the background.
	eventually(t, answerLimit, "there is a "+r.String(), func() bool { err = on.Netlink().RouteReplace(r); return err == nil })
	must(t, err)
}

// upBoth sets a link up at both ends.
func upBoth(t *testing.T, name string, ends ...*lab.Namespace) {
	t.Helper()
	for _, ns := range ends {
		link, err := ns.Netlink().LinkByName(name)
		must(t, err)
		must(t, ns.Netlink().LinkSetUp(link))
	}
}

// joinTun joins them by a tun device each.
func joinTun(t *testing.T, node, road *lab.Namespace) string {
	t.Helper()
	joinBare(t, node, road)
	return "vpn0"
}

// joinEthernet joins them by a veth each, on which neither has a network.
func joinEthernet(t *testing.T, node, road *lab.Namespace) string {
	t.Helper()
	file, err := os.Open(road.Path())
	must(t, err)
	defer file.Close()
	must(t, node.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "peer0"}, PeerName: "peer0", PeerNamespace: netlink.NsFd(file.Fd())}))
	upBoth(t, "peer0", node, road)
	return "peer0"
}

// An Ethernet on which the node has only a route to its peer is an uplink as one with a network is.
func TestUplinkWithoutNetwork(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		startBare(t, attach, false, families, joinEthernet).meetAll(t)
	})
}

func TestBareUplink(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		startBare(t, attach, attach == "--attach=tcx", families, joinTun).meetAll(t)
	})
}

// meetAll is all that goes over the link.
func (b *bare) meetAll(t *testing.T) {
	node := b.Nodes[0]
	near, far := b.spec("near", b.near), b.spec("far", b.far)
	near.NodePort, far.NodePort = nodePorts, nodePorts+1
	none := b.spec("none")
	none.NodePort = nodePorts + 2
	b.set(t, near, far, none)
	web := addHosted(t, node, "web", ports(roadPort, both)...)
	serveBackend(t, b.road)
	for _, f := range b.carried {
		t.Run(f.String(), func(t *testing.T) {
			own := bareEnds[f][0]
			t.Run("out", func(t *testing.T) {
				for _, to := range []netip.Addr{roadAddr[f], bareEnds[f][1]} {
					b.assertOut(t, netip.AddrPortFrom(to, backendPort), own)
				}
			})
			t.Run("in", func(t *testing.T) {
				replaceRoute(t, b.road, &netlink.Route{Dst: prefix(single(node.AddrOf(f)).String()), Gw: bareEnds[f][0].AsSlice(), Src: roadAddr[f].AsSlice()}, b.link)
				seen := roadAddr[f]
				at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(node.AddrOf(f), port) }
				assertServedTo(t, b.road, at(nodePorts), b.near.Endpoint(f, backendPort).At, seen)
				assertServedTo(t, b.road, at(nodePorts+1), b.far.Endpoint(f, backendPort).At, node.AddrOf(f))
				assertServedTo(t, b.road, at(roadPort), web.Endpoint(f, webPort).At, seen)
				assertServedTo(t, b.road, at(backendPort), at(backendPort), seen)
				assertRefusedTo(t, b.road, at(nodePorts+2))
			})
			t.Run("forged", func(t *testing.T) { b.assertNotForged(t, f) })
		})
	}
	statusSays(t, node, "No problems")
	// A route that asks for more than programs can ask about has the host's stack forward all of it.
	replaceRoute(t, node.Namespace, &netlink.Route{Dst: prefix("198.51.100.99/32"), Tos: 0x10}, b.link)
	statusSays(t, node, "through the host's stack")
	for _, f := range b.carried {
		before := passed(t, node, wire.FromPod, events.Forwarded)
		b.assertOut(t, netip.AddrPortFrom(roadAddr[f], backendPort), bareEnds[f][0])
		if passed(t, node, wire.FromPod, events.Forwarded) != before {
			t.Errorf("%s: packets of pods did not pass the stack", f)
		}
	}
}

// assertOut has a pod of the node, and the node itself, reach a host over the link. It sees the node's address there.
func (b *bare) assertOut(t *testing.T, to netip.AddrPort, own netip.Addr) {
	t.Helper()
	for _, from := range []*lab.Namespace{b.client.Namespace, b.Nodes[0].Namespace} {
		assertReaches(t, from, to, own)
		if _, err := from.Transfer(within(t, 20*time.Second), to, 4<<20); err != nil {
			t.Errorf("%s: %v", from.Netns(), err)
		}
	}
}

// assertNotForged has the far host send to a pod as other pods, as a Service and as the node. What comes as the host itself arrives.
func (b *bare) assertNotForged(t *testing.T, f wire.Family) {
	t.Helper()
	node, to := b.Nodes[0], b.near
	replaceRoute(t, b.road, &netlink.Route{Dst: prefix(single(to.AddrOf(f)).String()), Gw: bareEnds[f][0].AsSlice()}, b.link)
	server := listenUDP(t, to.Namespace, netip.AddrPortFrom(to.AddrOf(f), 9)) // datagram's port
	for _, source := range []netip.Addr{b.client.AddrOf(f), b.far.AddrOf(f), b.at("near", f).Addr(), node.AddrOf(f)} {
		refused := func() uint64 { return dropped(t, node, drops.SpoofedSource) + dropped(t, node, drops.WrongUplink) }
		before := refused()
		must(t, b.road.SendRaw(datagram(t, source, to.AddrOf(f), "forged")))
		eventually(t, answerLimit, "what comes as "+source.String()+" is dropped", func() bool { return refused() == before+1 })
	}
	must(t, b.road.SendRaw(datagram(t, roadAddr[f], to.AddrOf(f), "true")))
	must(t, server.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))))
	got := make([]byte, 100)
	if n, from, err := server.ReadFromUDPAddrPort(got); err != nil || string(got[:n]) != "true" || from.Addr() != roadAddr[f] {
		t.Errorf("the pod got %q from %s: %v", got[:n], from, err)
	}
}
