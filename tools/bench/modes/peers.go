package modes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	vxlanName = "flannel.1"
	vxlanPort = 8472 // the kernel's own, older than IANA's
)

// addVXLAN makes the device that flannel's vxlan backend makes: VNI 1, no learning, bound to the uplink, and the first
// address of the podCIDR. Checksums and offloads are the kernel's defaults, which are flannel's too.
func addVXLAN(node *lab.Node, mtu int) error {
	nl := node.Netlink()
	uplink, err := nl.LinkByName(lab.Uplink)
	if err != nil {
		return fmt.Errorf("find the uplink of %s: %w", node.Name, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = vxlanName, mtu, vtepOf(node)
	device := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 1, VtepDevIndex: uplink.Attrs().Index,
		SrcAddr: node.Addr().AsSlice(), Port: vxlanPort, Learning: false,
	}
	if err := nl.LinkAdd(device); err != nil {
		return fmt.Errorf("make %s on %s: %w", vxlanName, node.Name, err)
	}
	// The network is one of IPv4: a device that asks for IPv6 neighbours finds none, and counts that as dropped.
	if err := node.WriteSysctl("net/ipv6/conf/"+vxlanName+"/disable_ipv6", "1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	address := netip.PrefixFrom(node.PodCIDR.Addr(), 32)
	if err := nl.AddrAdd(device, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
		return fmt.Errorf("give %s on %s its address: %w", vxlanName, node.Name, err)
	}
	if err := nl.LinkSetUp(device); err != nil {
		return fmt.Errorf("set %s on %s up: %w", vxlanName, node.Name, err)
	}
	return nil
}

// vtepOf is the Ethernet address of a node's VXLAN device.
func vtepOf(node *lab.Node) net.HardwareAddr {
	return net.HardwareAddr{0x0e, 0, 0, 0, 0, byte(node.Number)}
}

// addPeer tells a node of another: what flannel does for each lease, kindnetd for each Node. host-gw and kindnet: one
// route. vxlan: a route by the peer's device, whose Ethernet address and node are written down, so that nothing is asked.
func (c *classical) addPeer(node *lab.Node, peer aFarNode) error {
	route, err := c.peerRoute(node, peer)
	if err != nil {
		return err
	}
	nl := node.Netlink()
	if c.vxlan() {
		for _, neighbour := range vxlanNeighbours(route.LinkIndex, peer) {
			if err := nl.NeighSet(neighbour); err != nil {
				return fmt.Errorf("write %s of %s down on %s: %w", neighbour.HardwareAddr, peer.name, node.Name, err)
			}
		}
	}
	if err := nl.RouteReplace(route); err != nil {
		return fmt.Errorf("add the route to %s on %s: %w", peer.name, node.Name, err)
	}
	return nil
}

func (c *classical) removePeer(node *lab.Node, peer aFarNode) error {
	route, err := c.peerRoute(node, peer)
	if err != nil {
		return err
	}
	nl := node.Netlink()
	failed := []error{nl.RouteDel(route)}
	if c.vxlan() {
		for _, neighbour := range vxlanNeighbours(route.LinkIndex, peer) {
			failed = append(failed, nl.NeighDel(neighbour))
		}
	}
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("forget %s on %s: %w", peer.name, node.Name, err)
	}
	return nil
}

func (c *classical) peerRoute(node *lab.Node, peer aFarNode) (*netlink.Route, error) {
	device, via, flags := lab.Uplink, peer.addr, 0
	if c.vxlan() {
		device, via, flags = vxlanName, peer.podCIDR.Addr(), int(netlink.FLAG_ONLINK)
	}
	link, err := node.Netlink().LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("find %s on %s: %w", device, node.Name, err)
	}
	return &netlink.Route{Dst: ipNet(peer.podCIDR), Gw: via.AsSlice(), LinkIndex: link.Attrs().Index, Flags: flags}, nil
}

// vxlanNeighbours are the peer's device behind its address, and its node behind the device.
func vxlanNeighbours(index int, peer aFarNode) []*netlink.Neigh {
	return []*netlink.Neigh{
		{
			LinkIndex: index, State: netlink.NUD_PERMANENT, Type: unix.RTN_UNICAST,
			IP: peer.podCIDR.Addr().AsSlice(), HardwareAddr: peer.vtep,
		},
		{
			LinkIndex: index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
			IP: peer.addr.AsSlice(), HardwareAddr: peer.vtep,
		},
	}
}

func (c *classical) setNodes(ctx context.Context, k int) error {
	want := k - len(c.lab.Nodes)
	for ; c.far < want; c.far++ {
		if err := errors.Join(ctx.Err(), c.forAll(c.addPeer, farNode(c.far))); err != nil {
			return err
		}
	}
	for ; c.far > want; c.far-- {
		if err := errors.Join(ctx.Err(), c.forAll(c.removePeer, farNode(c.far-1))); err != nil {
			return err
		}
	}
	return nil
}

func (c *classical) forAll(do func(*lab.Node, aFarNode) error, peer aFarNode) error {
	for _, node := range c.lab.Nodes {
		if err := do(node, peer); err != nil {
			return err
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
