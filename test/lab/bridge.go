package lab

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// AddBridge makes a bridge on the node as Docker and the plugin bridge make one: it is the gateway of the containers behind it, in the
// networks of these addresses, by default with the first one of each of the node's podCIDRs, and the node forwards from then on. Its
// Ethernet address is its own: else it changes with its ports, and then the kernel forgets all neighbours.
func (n *Node) AddBridge(name string, mtu int, addrs ...netip.Prefix) error {
	if err := n.addBridge(name, mtu); err != nil {
		return err
	}
	if err := n.setMAC(name, net.HardwareAddr{2, 0x42, 0, 0, byte(n.Number), 1}); err != nil {
		return err
	}
	if addrs == nil {
		for _, p := range n.PodCIDRs {
			addrs = append(addrs, netip.PrefixFrom(endingIn(p, 1), p.Bits()))
		}
	}
	for _, addr := range addrs {
		if err := n.addAddresses(name, func(wire.Family) int { return addr.Bits() }, addr.Addr()); err != nil {
			return err
		}
		if err := n.WriteSysctl(Forwarding[wire.FamilyOf(addr.Addr())], "1"); err != nil {
			return err
		}
	}
	return nil
}

// endingIn is the address of a network that ends in that byte.
func endingIn(network netip.Prefix, last byte) netip.Addr {
	raw := network.Masked().Addr().AsSlice()
	raw[len(raw)-1] = last
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

// AddContainer makes a container behind a bridge of the node, with an address in each of the bridge's networks that ends in that byte.
// As Docker does it, the Ethernet address follows from that, so that the next one with these addresses has the same.
func (n *Node) AddContainer(bridge, name string, last byte) (*Namespace, error) {
	gateways, mtu, err := n.behind(bridge)
	if err != nil {
		return nil, err
	}
	ns, err := n.lab.newNamespace(fmt.Sprintf("n%d-%s", n.Number, name))
	if err != nil {
		return nil, err
	}
	if err := connect(n.Namespace, containerPort(name), ns, Uplink, mtu); err != nil {
		return nil, err
	}
	if err := ns.setMAC(Uplink, net.HardwareAddr{2, 0x42, 0, 0, byte(n.Number), last}); err != nil {
		return nil, err
	}
	if err := n.plug(containerPort(name), bridge); err != nil {
		return nil, err
	}
	for _, gateway := range gateways {
		addr := endingIn(gateway, last)
		ns.addrs = append(ns.addrs, addr)
		if err := ns.addAddresses(Uplink, func(wire.Family) int { return gateway.Bits() }, addr); err != nil {
			return nil, err
		}
		if err := ns.AddRoute(everywhere[wire.FamilyOf(addr)], gateway.Addr(), ""); err != nil {
			return nil, err
		}
	}
	return ns, nil
}

// containerPort is the name of the link, on the node, of a container behind a bridge.
func containerPort(container string) string { return "c-" + container }

// behind is what a container needs to know of its bridge: the gateways, in their networks, and the MTU in bytes.
func (n *Node) behind(bridge string) (gateways []netip.Prefix, mtu int, err error) {
	l, err := n.nl.LinkByName(bridge)
	if err != nil {
		return nil, 0, fmt.Errorf("find bridge %s in %s: %w", bridge, n.name, err)
	}
	addrs, err := RetryInterrupted(func() ([]netlink.Addr, error) { return n.nl.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, 0, fmt.Errorf("list addresses of %s in %s: %w", bridge, n.name, err)
	}
	for _, a := range addrs {
		addr, _ := netip.AddrFromSlice(a.IP)
		if addr = addr.Unmap(); !addr.IsLinkLocalUnicast() {
			ones, _ := a.Mask.Size()
			gateways = append(gateways, netip.PrefixFrom(addr, ones))
		}
	}
	return gateways, l.Attrs().MTU, nil
}

// RemoveContainer ends a container. Its link goes with it, as soon as the kernel has ended the namespace.
func (n *Node) RemoveContainer(ns *Namespace, name string) error {
	if err := n.DeleteLink(containerPort(name)); err != nil {
		return err
	}
	return n.lab.dropNamespace(ns)
}
