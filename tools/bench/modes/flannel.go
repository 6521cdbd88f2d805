package modes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What flanneld makes of `"Backend": {"Type": "vxlan"}`. The outer UDP checksum is the kernel's default: it is there, as in our tunnel.
const (
	flannelDevice = "flannel.1"
	flannelVNI    = 1
	flannelPort   = 8472 // host byte order
)

// vtepMAC is the Ethernet address of a node's device. flanneld draws one, and an annotation tells the other nodes.
func vtepMAC(node netip.Addr) net.HardwareAddr {
	raw := node.As4()
	return append(net.HardwareAddr{0x02, 0}, raw[:]...)
}

// addFlannelDevice makes a node's device. It learns nothing: each peer's addresses are told it.
func addFlannelDevice(node *lab.Node, mtu int) error {
	nl := node.Netlink()
	uplink, err := nl.LinkByName(lab.Uplink)
	if err != nil {
		return fmt.Errorf("find the uplink of %s: %w", node.Name, err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = flannelDevice, mtu, vtepMAC(node.Addr())
	device := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: flannelVNI, Port: flannelPort, VtepDevIndex: uplink.Attrs().Index, SrcAddr: node.Addr().AsSlice(),
	}
	if err := nl.LinkAdd(device); err != nil {
		return fmt.Errorf("make %s on %s: %w", flannelDevice, node.Name, err)
	}
	// The kernel's own IPv6 multicast has no peer here, and each such packet would count as one that the device has dropped.
	if err := node.WriteSysctl("net/ipv6/conf/"+flannelDevice+"/disable_ipv6", "1"); err != nil {
		return err
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: node.PodCIDR().Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}}
	if err := errors.Join(nl.AddrAdd(device, address), nl.LinkSetUp(device)); err != nil {
		return fmt.Errorf("set %s on %s up: %w", flannelDevice, node.Name, err)
	}
	return nil
}

// flannelPeer is what a node knows of a peer behind its device: the route to its pods, its Ethernet address, and where that is.
func flannelPeer(node *lab.Node, peer lab.NodeSpec) (route *netlink.Route, neighbours []*netlink.Neigh, err error) {
	device, err := node.Netlink().LinkByName(flannelDevice)
	if err != nil {
		return nil, nil, fmt.Errorf("find %s on %s: %w", flannelDevice, node.Name, err)
	}
	index, gateway, mac := device.Attrs().Index, peer.PodCIDRs[0].Addr().AsSlice(), vtepMAC(peer.InternalIPs[0])
	route = &netlink.Route{LinkIndex: index, Dst: ipNet(peer.PodCIDRs[0]), Gw: gateway, Flags: unix.RTNH_F_ONLINK}
	return route, []*netlink.Neigh{
		{LinkIndex: index, State: netlink.NUD_PERMANENT, Type: unix.RTN_UNICAST, IP: gateway, HardwareAddr: mac},
		{LinkIndex: index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, IP: peer.InternalIPs[0].AsSlice(), HardwareAddr: mac},
	}, nil
}

// addFlannelPeer and delFlannelPeer are what flanneld does when a lease comes, and when it goes.
func addFlannelPeer(node *lab.Node, peer lab.NodeSpec) error {
	route, neighbours, err := flannelPeer(node, peer)
	for _, n := range neighbours {
		err = errors.Join(err, node.Netlink().NeighSet(n))
	}
	if err == nil {
		err = node.Netlink().RouteReplace(route)
	}
	if err != nil {
		return fmt.Errorf("add %s to %s: %w", peer.Name, node.Name, err)
	}
	return nil
}

func delFlannelPeer(node *lab.Node, peer lab.NodeSpec) error {
	route, neighbours, err := flannelPeer(node, peer)
	if err == nil {
		err = node.Netlink().RouteDel(route)
	}
	for _, n := range neighbours {
		err = errors.Join(err, node.Netlink().NeighDel(n))
	}
	if err != nil {
		return fmt.Errorf("delete %s from %s: %w", peer.Name, node.Name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
