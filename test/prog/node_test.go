package prog

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The addresses of every story, or their names (family). The node has two uplinks with an address of each family, one
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
	stated  = "198.51.100.200" // by an entry that says that it is the world's
	world2  = "203.0.113.9"    // by the second uplink
	bare    = "192.0.2.33"     // by the uplink without an address
	foreign = "198.18.0.5"     // by a link without our programs
	native  = "10.200.0.8"     // never masqueraded
	nowhere = "233.252.0.99"   // multicast

	gateway = "169.254.1.1" // every pod's
)

// mtu is that of every link; what goes through the tunnel has less.
const (
	mtu       = 1500
	tunnelMTU = mtu - 70
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
	// Without a link-local address a link is silent, and what is counted is the tests' packets alone.
	for _, name := range []string{
		"ipv4/conf/all/forwarding", "ipv4/conf/default/forwarding", "ipv6/conf/all/forwarding", "ipv6/conf/default/addr_gen_mode",
	} {
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
	w.bare = newLink(tb, "bare")
	w.foreign = newLink(tb, "foreign", "172.19.0.1/24")
	w.tunnel = newTunnel(tb)
	for i, pod := range []string{podA, podB, podC} {
		w.pods[pod] = newLink(tb, fmt.Sprintf("pod%d", i))
	}
	for f := range wire.Families {
		w.leadOut(tb, family{f})
	}
	return w
}

// leadOut gives the links neighbours and routes of a family.
func (w wires) leadOut(tb testing.TB, f family) {
	tb.Helper()
	f.neighbour(tb, w.uplink, gatewayIP)
	f.neighbour(tb, w.uplink, node2IP)
	f.neighbour(tb, w.other, otherGateIP)
	f.neighbour(tb, w.bare, "172.20.0.254")
	f.neighbour(tb, w.foreign, "172.19.0.254")
	f.route(tb, w.uplink, "0.0.0.0/0", gatewayIP)
	f.route(tb, w.uplink, "10.244.2.0/24", node2IP)
	f.route(tb, w.other, world2+"/32", otherGateIP)
	f.route(tb, w.bare, bare+"/32", "172.20.0.254")
	f.route(tb, w.foreign, "198.18.0.0/16", "172.19.0.254")
}

func newLink(tb testing.TB, name string, prefixes ...string) veth {
	tb.Helper()
	name = "ecpr" + name
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	must(tb, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name + "-p"}))
	own, err := netlink.LinkByName(name)
	must(tb, err)
	peer, err := netlink.LinkByName(name + "-p")
	must(tb, err)
	must(tb, netlink.LinkSetUp(peer))
	must(tb, netlink.LinkSetUp(own))
	for _, prefix := range prefixes {
		assign(tb, own, prefix)
	}
	return veth{index: own.Attrs().Index, mac: own.Attrs().HardwareAddr, peer: peer.Attrs().HardwareAddr}
}

// assign gives a link the addresses that a prefix with host bits stands for.
func assign(tb testing.TB, link netlink.Link, prefix string) {
	tb.Helper()
	address, _, _ := strings.Cut(prefix, "/")
	for f := range wire.Families {
		own := &net.IPNet{IP: family{f}.netIP(address), Mask: family{f}.ipNet(prefix).Mask}
		must(tb, netlink.AddrAdd(link, &netlink.Addr{IPNet: own, Flags: unix.IFA_F_NODAD}))
	}
}

// newTunnel makes the device as the agent does, and routes node 5's pods there.
func newTunnel(tb testing.TB) int {
	tb.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = "ecprtunnel", tunnelMTU, net.HardwareAddr{2, 0, 0, 0, 0, 7}
	tunnel := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: tunnelPort}
	must(tb, netlink.LinkAdd(tunnel))
	must(tb, netlink.LinkSetARPOff(tunnel))
	must(tb, netlink.LinkSetUp(tunnel))
	assign(tb, tunnel, tunnelIP+"/32")
	for f := range wire.Families {
		must(tb, netlink.RouteAdd(&netlink.Route{
			LinkIndex: tunnel.Index, Dst: family{f}.ipNet("10.244.5.0/24"), Src: family{f}.netIP(nodeIP), MTU: tunnelMTU,
			Scope: each(family{f}, netlink.SCOPE_LINK, netlink.SCOPE_UNIVERSE),
		}))
	}
	return tunnel.Index
}

// netlink is the family's number.
func (f family) netlink() int { return each(f, unix.AF_INET, unix.AF_INET6) }

func (f family) neighbour(tb testing.TB, l veth, address string) {
	tb.Helper()
	must(tb, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: l.index, State: unix.NUD_PERMANENT, IP: f.netIP(address), HardwareAddr: l.peer,
	}))
}

func (f family) route(tb testing.TB, l veth, to, via string) {
	tb.Helper()
	must(tb, netlink.RouteReplace(&netlink.Route{
		LinkIndex: l.index, Dst: f.ipNet(to), Gw: f.netIP(via), Flags: int(netlink.FLAG_ONLINK),
	}))
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
