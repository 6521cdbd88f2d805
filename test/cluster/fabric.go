package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The fabric is a switch with addresses, and that end of the nodes' default routes answers for the world.
const switchName = "switch"

// makeMachines makes the fabric, the nodes and the links between them. Every link is born between two of the
// machines: the real one's network never sees it.
func (c *Cluster) makeMachines(ctx context.Context) (err error) {
	if c.Fabric, err = c.newMachine(ctx, "fabric", c.addresses(worldNumber)); err != nil {
		return err
	}
	fabric, err := c.Fabric.netlink()
	if err != nil {
		return err
	}
	defer fabric.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = switchName
	// Of its own: else it is one of the links', and becomes another when that link goes.
	attrs.HardwareAddr = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x01}
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := fabric.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make the switch: %w", err)
	}
	if err := configure(fabric, switchName, onLink(c.Fabric.Addrs)); err != nil {
		return err
	}
	if err := configure(fabric, "lo", c.worldPrefixes()); err != nil {
		return err
	}
	for range c.Options.Nodes {
		if _, err := c.makeNode(ctx); err != nil {
			return err
		}
	}
	return nil
}

// makeNode makes the machine of the next node.
func (c *Cluster) makeNode(ctx context.Context) (*Machine, error) {
	i := len(c.Nodes)
	node, err := c.newMachine(ctx, fmt.Sprintf("node-%d", i+1), c.addresses(byte(firstNode+i)))
	if err != nil {
		return nil, err
	}
	c.Nodes = append(c.Nodes, node)
	return node, c.plug(node)
}

// startWorld has the world answer.
func (c *Cluster) startWorld(ctx context.Context) error {
	var addrs []string
	for _, prefix := range c.worldPrefixes() {
		addrs = append(addrs, prefix.Addr().String())
	}
	// A socket for all addresses would answer with the one that is nearest to the client.
	return c.Fabric.Start(ctx, "world", c.Program("agnhost"), "netexec", "--udp-listen-addresses="+strings.Join(addrs, ","))
}

// netlink speaks to the kernel about the machine's network.
func (m *Machine) netlink() (*netlink.Handle, error) {
	ns, err := netns.GetFromPid(m.pid)
	if err != nil {
		return nil, fmt.Errorf("find the network of %s: %w", m.Name, err)
	}
	defer ns.Close()
	return netlink.NewHandleAt(ns)
}

// card is the Ethernet address of a node's eth0, which outlives a reboot. With another one, those who knew the node would
// send to the former for as long as the kernel trusts what it knows, in IPv6 some 50 s.
func (m *Machine) card() net.HardwareAddr {
	address := m.Addr.AsSlice()
	return net.HardwareAddr{0x02, 0, 0, 0, 0x01, address[len(address)-1]}
}

// plug gives a node its eth0.
func (c *Cluster) plug(node *Machine) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("connect %s with the fabric: %w", node.Name, err)
		}
	}()
	fabric, err := c.Fabric.netlink()
	if err != nil {
		return err
	}
	defer fabric.Close()
	bridge, err := fabric.LinkByName(switchName)
	if err != nil {
		return err
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", node.pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = node.Name
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns.Fd()), PeerHardwareAddr: node.card()}
	if err := fabric.LinkAdd(veth); err != nil {
		return err
	}
	if err := fabric.LinkSetMaster(veth, bridge); err != nil {
		return err
	}
	if err := fabric.LinkSetUp(veth); err != nil {
		return err
	}
	inside, err := node.netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	if err := configure(inside, "eth0", onLink(node.Addrs)); err != nil {
		return err
	}
	// A node that was there before the cluster had another family has fewer.
	for _, gateway := range c.Fabric.Addrs[:len(node.Addrs)] {
		if err := inside.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("add the route by %s: %w", gateway, err)
		}
	}
	return nil
}

// onLink are addresses with the length of the fabric's prefix.
func onLink(addrs []netip.Addr) (all []netip.Prefix) {
	for _, addr := range addrs {
		all = append(all, netip.PrefixFrom(addr, networks[FamilyOf(addr)].fabric.Bits()))
	}
	return all
}

func (c *Cluster) worldPrefixes() (all []netip.Prefix) {
	for _, family := range c.Options.Families {
		world := networks[family].world
		all = append(all, netip.PrefixFrom(world, world.BitLen()))
	}
	return all
}

// configure sets a link up and gives it addresses, which can be used at once: nobody else could have them.
func configure(h *netlink.Handle, name string, addrs []netip.Prefix) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	for _, prefix := range addrs {
		addr := prefix.Addr()
		one := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(prefix.Bits(), addr.BitLen())}}
		if addr.Is6() {
			one.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(link, one); err != nil {
			return fmt.Errorf("give %s %s: %w", name, prefix, err)
		}
	}
	return nil
}
