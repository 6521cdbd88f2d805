package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// The fabric is a switch with an address, and that end of the nodes' default routes answers for the world.
var (
	fabricBits = 16
	// FabricAddr is the one that the world has on the nodes' link, and speaks from.
	FabricAddr = netip.MustParseAddr("172.30.0.1")
	// WorldAddr is outside of the cluster; agnhost netexec answers there, HTTP on port 8080.
	WorldAddr = netip.MustParseAddr("203.0.113.1")
)

const switchName = "switch"

func nodeAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 30, 0, byte(11 + i)}) }

// makeMachines makes the fabric, the nodes and the links between them. Every link is born between two of the
// machines: the real one's network never sees it.
func (c *Cluster) makeMachines(ctx context.Context) (err error) {
	if c.Fabric, err = c.newMachine(ctx, "fabric", FabricAddr); err != nil {
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
	if err := configure(fabric, switchName, FabricAddr, fabricBits); err != nil {
		return err
	}
	if err := configure(fabric, "lo", WorldAddr, 32); err != nil {
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
	node, err := c.newMachine(ctx, fmt.Sprintf("node-%d", i+1), nodeAddr(i))
	if err != nil {
		return nil, err
	}
	c.Nodes = append(c.Nodes, node)
	return node, c.plug(node)
}

// startWorld has the world answer.
func (c *Cluster) startWorld(ctx context.Context) error {
	// A socket for all addresses would answer with the one that is nearest to the client.
	return c.Fabric.Start(ctx, "world", c.Program("agnhost"), "netexec", "--udp-listen-addresses="+WorldAddr.String())
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
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns.Fd())}
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
	if err := configure(inside, "eth0", node.Addr, fabricBits); err != nil {
		return err
	}
	return inside.RouteAdd(&netlink.Route{Gw: FabricAddr.AsSlice()})
}

// configure gives a link its address and sets it up.
func configure(h *netlink.Handle, name string, addr netip.Addr, bits int) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	mask := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(bits, 32)}
	if err := h.AddrAdd(link, &netlink.Addr{IPNet: mask}); err != nil {
		return fmt.Errorf("give %s its address: %w", name, err)
	}
	return h.LinkSetUp(link)
}
