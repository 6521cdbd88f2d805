package prog

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The addresses of every story. The node has two uplinks with an address, one
// without, a tunnel, and a link that carries none of our programs.
const (
	nodeIP    = "172.16.0.1"
	gatewayIP = "172.16.0.254"
	node2IP   = "172.16.0.2"
	silentIP  = "172.16.0.77" // a neighbour that does not resolve
	offLinkIP = "10.99.0.3"
	node5IP   = "10.99.0.5"  // by the gateway, and therefore through the tunnel
	tunnelIP  = "10.244.1.0" // this node's, on the tunnel device

	nodeOtherIP = "172.18.0.1" // on the second uplink
	otherGateIP = "172.18.0.254"

	podA   = "10.244.1.10"
	podB   = "10.244.1.11"
	podC   = "10.55.0.5"   // a pod outside the podCIDR
	noPod  = "10.244.1.99" // in the podCIDR, and nobody's
	remote = "10.244.2.20" // a pod of node 2
	lost   = "10.244.3.30" // a pod of the node that is off link
	mute   = "10.244.4.40" // a pod of the node that does not resolve
	beyond = "10.244.5.50" // a pod of node 5

	world   = "198.51.100.7"
	world2  = "203.0.113.9"  // by the second uplink
	bare    = "192.0.2.33"   // by the uplink without an address
	foreign = "198.18.0.5"   // by a link without our programs
	native  = "10.200.0.8"   // never masqueraded
	nowhere = "233.252.0.99" // multicast
)

// mtu is that of every link; what goes through the tunnel has less.
const (
	mtu       = 1500
	tunnelMTU = mtu - 50
)

// The tunnel's constants.
const (
	tunnelPort = 4789
	vni        = 4096
)

// veth is one interface of the node with the interface at its other end.
type veth struct {
	index     int
	mac, peer net.HardwareAddr
}

// wires are the node's links by what they are.
type wires struct {
	uplink, other, bare, foreign veth
	tunnel                       int
	pods                         map[string]veth
}

// buildNode wires a node in the current network namespace, so that routing and
// neighbours answer as on a real one.
func buildNode(tb testing.TB) wires {
	tb.Helper()
	// Without an IPv6 address of its own a link is silent, and what is counted is the tests' packets alone.
	for _, name := range []string{"ipv4/conf/all/forwarding", "ipv4/conf/default/forwarding", "ipv6/conf/default/addr_gen_mode"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	must(tb, err)
	must(tb, netlink.LinkSetUp(lo))
	w := wires{pods: make(map[string]veth)}
	w.uplink = newLink(tb, "up", nodeIP+"/24")
	w.other = newLink(tb, "other", nodeOtherIP+"/24")
	w.bare = newLink(tb, "bare", "")
	w.foreign = newLink(tb, "foreign", "172.19.0.1/24")
	w.tunnel = newTunnel(tb)
	for i, pod := range []string{podA, podB, podC} {
		w.pods[pod] = newLink(tb, fmt.Sprintf("pod%d", i), "")
	}
	neighbour(tb, w.uplink, gatewayIP)
	neighbour(tb, w.uplink, node2IP)
	neighbour(tb, w.other, otherGateIP)
	neighbour(tb, w.bare, "172.20.0.254")
	neighbour(tb, w.foreign, "172.19.0.254")
	route(tb, w.uplink, "0.0.0.0/0", gatewayIP)
	route(tb, w.uplink, "10.244.2.0/24", node2IP)
	route(tb, w.other, world2+"/32", otherGateIP)
	route(tb, w.bare, bare+"/32", "172.20.0.254")
	route(tb, w.foreign, "198.18.0.0/15", "172.19.0.254")
	return w
}

func newLink(tb testing.TB, name, address string) veth {
	tb.Helper()
	name = "ecpr" + name
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	must(tb, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "-p"}))
	own, err := netlink.LinkByName(name)
	must(tb, err)
	peer, err := netlink.LinkByName(name + "-p")
	must(tb, err)
	if address != "" {
		a, err := netlink.ParseAddr(address)
		must(tb, err)
		must(tb, netlink.AddrAdd(own, a))
	}
	must(tb, netlink.LinkSetUp(peer))
	must(tb, netlink.LinkSetUp(own))
	return veth{index: own.Attrs().Index, mac: own.Attrs().HardwareAddr, peer: peer.Attrs().HardwareAddr}
}

// newTunnel makes the device as the agent does, and routes node 5's pods there.
func newTunnel(tb testing.TB) int {
	tb.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = "ecprtunnel", tunnelMTU, net.HardwareAddr{2, 0, 0, 0, 0, 7}
	tunnel := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: tunnelPort}
	must(tb, netlink.LinkAdd(tunnel))
	must(tb, netlink.LinkSetARPOff(tunnel))
	a, err := netlink.ParseAddr(tunnelIP + "/32")
	must(tb, err)
	must(tb, netlink.AddrAdd(tunnel, a))
	must(tb, netlink.LinkSetUp(tunnel))
	_, pods, err := net.ParseCIDR("10.244.5.0/24")
	must(tb, err)
	must(tb, netlink.RouteAdd(&netlink.Route{LinkIndex: tunnel.Index, Dst: pods, Src: net.ParseIP(nodeIP), MTU: tunnelMTU, Scope: netlink.SCOPE_LINK}))
	return tunnel.Index
}

func neighbour(tb testing.TB, l veth, address string) {
	tb.Helper()
	must(tb, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: l.index, State: unix.NUD_PERMANENT, IP: net.ParseIP(address), HardwareAddr: l.peer,
	}))
}

func route(tb testing.TB, l veth, to, via string) {
	tb.Helper()
	_, dst, err := net.ParseCIDR(to)
	must(tb, err)
	must(tb, netlink.RouteReplace(&netlink.Route{
		LinkIndex: l.index, Dst: dst, Gw: net.ParseIP(via), Flags: int(netlink.FLAG_ONLINK),
	}))
}

// addr is the map form of an address in text.
func addr(text string) wire.Addr { return wire.AddrFrom(netip.MustParseAddr(text)) }

// tuple is the map form of one direction of a flow.
func tuple(proto wire.Protocol, src string, sport uint16, dst string, dport uint16) wire.Tuple {
	return wire.Tuple{
		Src: addr(src), Dst: addr(dst), Sport: wire.PortFrom(sport), Dport: wire.PortFrom(dport), Proto: proto,
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
