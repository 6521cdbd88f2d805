package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// up sets the named link up.
func (ns *Namespace) up(link string) error {
	l, err := ns.nl.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s in %s: %w", link, ns.name, err)
	}
	if err := ns.nl.LinkSetUp(l); err != nil {
		return fmt.Errorf("set link %s in %s up: %w", link, ns.name, err)
	}
	return nil
}

// addAddresses gives the named link addresses, each in a network of the prefix length that its family has, usable from then on.
func (ns *Namespace) addAddresses(link string, bits func(wire.Family) int, addrs ...netip.Addr) error {
	l, err := ns.nl.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s in %s: %w", link, ns.name, err)
	}
	for _, addr := range addrs {
		prefix := netip.PrefixFrom(addr, bits(wire.FamilyOf(addr)))
		if err := ns.nl.AddrAdd(l, &netlink.Addr{IPNet: ipNet(prefix), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("add %s to %s in %s: %w", prefix, link, ns.name, err)
		}
	}
	return nil
}

// skipDAD has a link's IPv6 addresses be usable at once, the link-local one too, without which a host that forwards
// cannot look for neighbours: nothing looks for somebody else who has them.
func (ns *Namespace) skipDAD(link string) error {
	if !slices.Contains(ns.families, wire.IPv6) {
		return nil
	}
	return ns.WriteSysctl("net/ipv6/conf/"+link+"/accept_dad", "0")
}

// tentative are the addresses that can't be used yet.
func (ns *Namespace) tentative() (some []*net.IPNet, err error) {
	addrs, err := RetryInterrupted(func() ([]netlink.Addr, error) { return ns.nl.AddrList(nil, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", ns.name, err)
	}
	for _, addr := range addrs {
		if addr.Flags&unix.IFA_F_TENTATIVE != 0 {
			some = append(some, addr.IPNet)
		}
	}
	return some, nil
}

// AddRoute adds a route through a gateway, or on the given link when the gateway is the zero address.
func (ns *Namespace) AddRoute(to netip.Prefix, via netip.Addr, link string) error {
	route := &netlink.Route{Dst: ipNet(to)}
	if via.IsValid() {
		route.Gw = via.AsSlice()
	}
	if link != "" {
		l, err := ns.nl.LinkByName(link)
		if err != nil {
			return fmt.Errorf("find link %s in %s: %w", link, ns.name, err)
		}
		route.LinkIndex = l.Attrs().Index
	}
	if err := ns.nl.RouteAdd(route); err != nil {
		return fmt.Errorf("add route to %s via %s in %s: %w", to, via, ns.name, err)
	}
	return nil
}

// SetMTU changes the MTU of a link.
func (ns *Namespace) SetMTU(link string, mtu int) error {
	return ns.change(link, fmt.Sprintf("set MTU to %d", mtu), func(l netlink.Link) error { return ns.nl.LinkSetMTU(l, mtu) })
}

// DeleteLink deletes a link of the namespace.
func (ns *Namespace) DeleteLink(link string) error { return ns.change(link, "delete", ns.nl.LinkDel) }

// setMAC changes the Ethernet address of a link.
func (ns *Namespace) setMAC(link string, mac net.HardwareAddr) error {
	return ns.change(link, "set address to "+mac.String(), func(l netlink.Link) error { return ns.nl.LinkSetHardwareAddr(l, mac) })
}

// change does to a link of the namespace what it says.
func (ns *Namespace) change(link, what string, do func(netlink.Link) error) error {
	l, err := ns.nl.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s in %s: %w", link, ns.name, err)
	}
	if err := do(l); err != nil {
		return fmt.Errorf("%s: link %s in %s: %w", what, link, ns.name, err)
	}
	return nil
}

// connect makes a veth pair between two namespaces, both ends up. Neither end is ever seen by the machine.
func connect(a *Namespace, aLink string, b *Namespace, bLink string, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = aLink, mtu
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: bLink, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(b.file.Fd())}
	if err := a.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("connect %s in %s with %s in %s: %w", aLink, a.name, bLink, b.name, err)
	}
	for _, end := range []struct {
		*Namespace
		link string
	}{{a, aLink}, {b, bLink}} {
		if err := end.skipDAD(end.link); err != nil {
			return err
		}
		if err := end.up(end.link); err != nil {
			return err
		}
	}
	return nil
}

// addBridge makes a plain switch. It forwards at layer 2 only: what the machine's br_netfilter would do with the
// frames is turned off in this namespace.
func (ns *Namespace) addBridge(name string, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	noSnooping := false
	if err := ns.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &noSnooping}); err != nil {
		return fmt.Errorf("make bridge %s in %s: %w", name, ns.name, err)
	}
	for _, table := range []string{"iptables", "ip6tables", "arptables"} {
		err := ns.WriteSysctl("net/bridge/bridge-nf-call-"+table, "0")
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := ns.skipDAD(name); err != nil {
		return err
	}
	return ns.up(name)
}

// plug puts a link of the namespace into its bridge.
func (ns *Namespace) plug(link, bridge string) error {
	b, err := ns.nl.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("find bridge %s in %s: %w", bridge, ns.name, err)
	}
	return ns.change(link, "plug into "+bridge, func(l netlink.Link) error { return ns.nl.LinkSetMaster(l, b) })
}

// RetryInterrupted repeats a netlink listing that the kernel says was torn by a change while it ran.
func RetryInterrupted[T any](list func() ([]T, error)) ([]T, error) {
	for try := 0; ; try++ {
		items, err := list()
		torn := errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR)
		if !torn || try == 5 {
			return items, err
		}
	}
}

// Links names the links of the namespace.
func (ns *Namespace) Links() ([]string, error) {
	links, err := RetryInterrupted(ns.nl.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links of %s: %w", ns.name, err)
	}
	names := make([]string, len(links))
	for i, l := range links {
		names[i] = l.Attrs().Name
	}
	return names, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Forwarding is the sysctl that makes a router of a host.
var Forwarding = [wire.Families]string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}
