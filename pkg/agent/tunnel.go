package agent

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// tunnelName is the name of the tunnel device.
const tunnelName = "ec-vxlan"

// tunnelController owns the tunnel: its device, with address, settings and programs, and the rules by which netfilter does not
// track its outer packets, and drops what it has translated to their port. There is one in every routing mode, so that a node understands those
// that send through the tunnel whatever its own mode is.
type tunnelController struct {
	*node
	sysctl device.Sysctl
	// index is the device's as it was last seen; 0: never.
	index int
	// former is the index that the device of an agent before had; 0: there was none.
	former int
	mac    net.HardwareAddr // the device's; nil: not looked for yet
	// addresses are the device's, as found by the newest look and as written since.
	addresses []netip.Prefix
	// given are those that were given to the device as it is.
	given [wire.Families]netip.Prefix
	// failed says why the device does not work, as the newest look found; nil: it does.
	failed error
	unset  error         // why not all of it is as it should be; most packets pass nevertheless
	logged string        // of what is no failure, the text that the log has
	wished device.Tunnel // as the newest look has made it
	// tables are for outer packets of each family, outer is what they were last written for.
	tables [wire.Families]netfilter.Table
	outer  [wire.Families]netfilter.Outer
	mode   *modeController
}

// complete makes or mends the device, and adds it to a view.
func (c *tunnelController) complete(v *view) {
	link, err := c.ensure(v)
	c.failed, c.addresses = err, nil
	if link.VXLAN.FlowBased { // else it is somebody else's
		v.takeTunnel(link)
	}
	if err != nil {
		return
	}
	v.tunnel = link.Index
	for _, a := range v.addresses {
		if a.Index == link.Index {
			c.addresses = append(c.addresses, a.Prefix)
		}
	}
}

// ensure returns the device as it is now. It works unless there is an error.
func (c *tunnelController) ensure(v *view) (device.Link, error) {
	if c.mac == nil {
		if err := c.recall(); err != nil {
			return device.Link{}, err
		}
	}
	wish := device.Tunnel{
		Name: tunnelName, Index: cmp.Or(c.index, c.former), Port: c.cfg.VXLANPort, MAC: c.mac, MTU: plan.TunnelMTU(v.uplinks),
	}
	link, changed, err := c.host.EnsureTunnel(wish)
	c.unset = nil
	if err != nil && link.Up() && link.VXLAN.FlowBased && link.VXLAN.Port == wish.Port {
		c.unset, err = err, nil
	}
	if err != nil {
		return link, c.explainPort(err)
	}
	resized := wish.MTU != c.wished.MTU // since the uplinks are
	if c.wished = wish; changed || !link.Up() {
		c.given = [wire.Families]netip.Prefix{}
	}
	if link.Index != c.index {
		c.log.Info("tunnel device", "interface", link.Name, "ifindex", link.Index, "port", c.cfg.VXLANPort, "vni", c.cfg.VXLANVNI)
	}
	known := c.index == link.Index && !changed
	if c.index != 0 && (changed && !resized || !link.Up()) && c.failed == nil {
		c.status.repaired(repairedTunnel, 1)
		c.log.Warn("tunnel device mended", "interface", link.Name, "ifindex", link.Index)
	}
	c.index = link.Index
	c.unset = errors.Join(c.unset, c.set(v.used, known))
	// What arrives before there are programs would be taken for a packet from anywhere.
	if err := c.dp.AttachTunnel(link.Index); err != nil {
		return link, err
	}
	if link.Up() {
		return link, nil
	}
	return link, c.explainPort(c.host.StartTunnel(link))
}

// set sets sysctls of the device, which end with it. known says that they were as they should be when it was last seen.
func (c *tunnelController) set(used plan.FamilySet, known bool) error {
	type sysctl struct{ name, value string }
	all := []sysctl{
		{forwardingOf(tunnelName), "1"},
		// While only one of two nodes sends through the tunnel, the way back of what arrives leads over another interface.
		{rpFilterOf(tunnelName), strconv.Itoa(looseRPFilter)},
	}
	if ofIPv6 := "net/ipv6/conf/" + tunnelName; used[wire.IPv6] {
		// Nobody would answer what the kernel sends on a new link by itself, and nobody is to be listened to.
		all = append(all, sysctl{ofIPv6 + "/addr_gen_mode", "1"}, sysctl{acceptRAOf(tunnelName), "0"}, sysctl{ofIPv6 + "/disable_ipv6", "0"})
	} else {
		all = append(all, sysctl{ofIPv6 + "/disable_ipv6", "1"})
	}
	var errs []error
	for _, s := range all {
		wrote, err := c.sysctl.Set(s.name, s.value)
		if !errors.Is(err, fs.ErrNotExist) { // without IPv6, or the device is gone
			errs = append(errs, err)
		}
		if wrote && known {
			c.status.repaired(repairedTunnel, 1)
			c.log.Debug("sysctl of the tunnel device restored", "name", s.name, "value", s.value) // often along with the one of all links
		}
	}
	return errors.Join(errs...)
}

func (c *tunnelController) explainPort(err error) error {
	switch {
	case !errors.Is(err, device.ErrPortTaken):
	case c.cfg.Registry != nil:
		return fmt.Errorf("tunnel device %s: %w: free it; a device that flanneld has left goes by ip link delete flannel.%d", tunnelName, err, c.cfg.VXLANVNI)
	default:
		return fmt.Errorf("tunnel device %s: %w: free it, or set another --vxlan-port on every node", tunnelName, err)
	}
	return err
}

// recall finds what an earlier agent has left. A device keeps its MAC address. It is random: none of ours needs to know it, since
// ec_from_tunnel makes every packet this host's, and flanneld reads it in the lease; without that program only who guesses it would reach the stack; and the
// kernel drops what has the receiving device's own address as its source, so no two nodes may have the same.
func (c *tunnelController) recall() error {
	had, err := c.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		return err
	}
	link, err := c.host.LinkByName(tunnelName)
	if err != nil && !errors.Is(err, device.ErrNotFound) {
		return err
	}
	c.former, c.mac = int(had.TunnelIfindex), link.MAC
	if !link.VXLAN.FlowBased || !isLocalMAC(link.MAC) {
		c.mac = randomMAC()
	}
	return nil
}

// The lowest bits of a MAC address' first octet (IEEE 802): nobody has assigned it, and it is a group's.
const localMAC, groupMAC = 0x02, 0x01

func isLocalMAC(mac net.HardwareAddr) bool {
	return len(mac) > 0 && mac[0]&(localMAC|groupMAC) == localMAC
}

func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac) // which never fails
	mac[0] = mac[0]&^groupMAC | localMAC
	return mac
}

// takeTunnel puts the device as it is now in the place of what a look found. Its addresses are in the podCIDR, and are none
// by which anything else than the programs' configuration may go.
func (v *view) takeTunnel(l device.Link) {
	for index, old := range v.links {
		if old.Name == tunnelName && index != l.Index {
			delete(v.links, index)
		}
	}
	v.links[l.Index] = l
	for _, a := range v.addresses {
		if a.Index == l.Index {
			v.local = slices.DeleteFunc(v.local, func(p netip.Prefix) bool { return p == netip.PrefixFrom(a.Prefix.Addr(), a.Prefix.Addr().BitLen()) })
		}
	}
	if l.Up() {
		return
	}
	// Made anew with the number that it had, or set down: what the look found on it is gone.
	v.routes = slices.DeleteFunc(v.routes, func(r device.Route) bool { return r.Index == l.Index })
	v.addresses = slices.DeleteFunc(v.addresses, func(a device.Address) bool { return a.Index == l.Index })
}

// configure gives the device its address, writes the rules, and reports what keeps it from working: where pods of other nodes are to be
// reached through it, no pod can be carried; in mode direct it is only worth a line in the log.
func (c *tunnelController) configure(s *state) error {
	if c.failed == nil {
		c.logged = ""
		return errors.Join(c.unset, c.writeAddresses(s), c.writeRules(s))
	}
	switch {
	case c.cfg.RoutingMode == plan.RouteDirect:
		if text := c.failed.Error(); text != c.logged {
			c.log.Warn("nodes that send through the tunnel are not understood", "error", text)
			c.logged = text
		}
		return nil
	case slices.ContainsFunc(s.plan.Peers, func(p plan.Peer) bool { return p.Way == destinations.None && len(p.PodCIDRs) > 0 }):
		return hinder(c.failed)
	}
	return c.failed
}

// writeAddresses gives the device its address of each family, and takes others from it.
func (c *tunnelController) writeAddresses(s *state) error {
	for f := range wire.Families {
		var want netip.Prefix
		if a := s.plan.Config.Tunnel[f].Address.Netip(); a.IsValid() {
			want = netip.PrefixFrom(a, a.BitLen())
		}
		if want.IsValid() && !slices.Contains(c.addresses, want) {
			if err := c.host.AddAddress(c.index, want); err != nil {
				return err
			}
			c.addresses = append(c.addresses, want)
			if c.given[f] == want {
				c.status.repaired(repairedTunnel, 1)
				c.log.Warn("address of the tunnel device restored", "address", want.Addr())
			}
		}
		c.given[f] = want
	}
	for _, p := range slices.Clone(c.addresses) {
		if slices.Contains(c.given[:], p) || !s.view.of(p.Addr()) {
			continue
		}
		if err := c.host.DeleteAddress(c.index, p); err != nil {
			return err
		}
		c.addresses = slices.DeleteFunc(c.addresses, func(q netip.Prefix) bool { return q == p })
	}
	return nil
}

// describe is what people are told of how packets get to other nodes.
func (c *tunnelController) describe() string {
	mode := string(c.cfg.RoutingMode)
	switch {
	case c.failed != nil:
		return mode + ", no tunnel: " + c.failed.Error()
	case c.index == 0:
		return mode
	}
	return fmt.Sprintf("%s, tunnel %s by UDP port %d, VNI %d", mode, tunnelName, c.cfg.VXLANPort, c.cfg.VXLANVNI)
}

// inspect attaches again what has been taken off the device, and looks after the rules.
func (c *tunnelController) inspect(s *state) error {
	if c.failed != nil {
		return nil
	}
	var errs []error
	for _, hook := range attach.TunnelHooks() {
		errs = append(errs, c.attachAgain(c.index, tunnelName, hook, repairedTunnel))
	}
	return errors.Join(append(errs, c.writeRules(s))...)
}

// writeRules writes the rules for netfilter, for outer packets of each family that the node has an address of.
func (c *tunnelController) writeRules(s *state) error {
	var errs []error
	for f := range wire.Families {
		a := s.plan.Standing.NodeIP(f)
		if !a.IsValid() || !s.view.used[f] {
			continue
		}
		want := netfilter.Outer{Address: a, Port: c.cfg.VXLANPort, Mark: c.cfg.Mark, Device: tunnelName, Translated: c.mode.found > netfilter.Nothing}
		wrote, err := c.tables[f].Ensure(time.Now(), want)
		switch {
		case errors.Is(err, netfilter.ErrNoExpression) && !want.Translated: // nobody gets in; netfilter's table of connections has more to hold
			continue
		case wrote && want == c.outer[f]:
			c.status.repaired(repairedTunnel, 1)
			c.log.Warn("rules by which netfilter does not track the tunnel's packets restored", "table", netfilter.TableName)
		case wrote:
			c.log.Info("netfilter does not track the tunnel's packets", "table", netfilter.TableName)
			c.outer[f] = want
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *tunnelController) closeTables() {
	for f := range c.tables {
		c.tables[f].Close()
	}
}
