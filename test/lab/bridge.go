package lab

import (
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Bridge is a bridge of a node with containers behind it, as Docker and the plugin bridge make one.
type Bridge struct {
	lab  *Lab
	host *Namespace
	name string
	mtu  int
	// addrs are the containers' gateways, in their network.
	addrs []netip.Prefix
}

// AddBridge makes a bridge on the node, which forwards from then on, with an address in the network of its containers, or one of each family.
func (n *Node) AddBridge(name string, mtu int, addrs ...netip.Prefix) (*Bridge, error) {
	if err := n.addBridge(name, mtu); err != nil {
		return nil, err
	}
	b := &Bridge{lab: n.lab, host: n.Namespace, name: name, mtu: mtu, addrs: addrs}
	for _, addr := range addrs {
		family := wire.FamilyOf(addr.Addr())
		if err := n.addAddresses(name, func(wire.Family) int { return addr.Bits() }, addr.Addr()); err != nil {
			return nil, err
		}
		if err := n.WriteSysctl(Forwarding[family], "1"); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// AddContainer makes a namespace behind the bridge, called name in the lab, with addresses in the bridge's networks.
func (b *Bridge) AddContainer(name string, addrs ...netip.Addr) (*Namespace, error) {
	container, err := b.lab.NewHost(name, addrs[0])
	if err != nil {
		return nil, err
	}
	container.addrs = addrs
	if err := connect(b.host, name, container, Uplink, b.mtu); err != nil {
		return nil, err
	}
	if err := b.host.plug(name, b.name); err != nil {
		return nil, err
	}
	for _, addr := range addrs {
		gateway, err := b.gatewayOf(addr)
		if err != nil {
			return nil, err
		}
		if err := container.addAddresses(Uplink, func(wire.Family) int { return gateway.Bits() }, addr); err != nil {
			return nil, err
		}
		if err := container.AddRoute(everywhere[wire.FamilyOf(addr)], gateway.Addr(), ""); err != nil {
			return nil, err
		}
	}
	return container, nil
}

func (b *Bridge) gatewayOf(addr netip.Addr) (netip.Prefix, error) {
	for _, gateway := range b.addrs {
		if gateway.Masked().Contains(addr) {
			return gateway, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("add a container with %s to bridge %s: it has %v", addr, b.name, b.addrs)
}
