package device

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestNeighbours(t *testing.T) {
	p := newPair(t)
	for _, a := range []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")} {
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macB))
		must(t, p.pod.ReplaceNeighbour(p.peer.Index, a, macA))
		if !hasNeighbour(t, p, a) {
			t.Errorf("no permanent neighbour %s", a)
		}
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		must(t, p.pod.DeleteNeighbour(p.peer.Index, a))
		if hasNeighbour(t, p, a) {
			t.Errorf("neighbour %s survived its deletion", a)
		}
	}
}

func hasNeighbour(t *testing.T, p pair, a netip.Addr) bool {
	t.Helper()
	list, err := p.pod.Neighbours(p.peer.Index)
	must(t, err)
	for _, n := range list {
		if n.Is(a, macA) {
			return true
		}
	}
	return false
}

// A bridge says which port an Ethernet address is behind, of those that it has learnt.
func TestBridgePort(t *testing.T) {
	for _, vlans := range []bool{false, true} {
		p := newPair(t)
		made := netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}
		if vlans {
			made.VlanFiltering = &vlans
		}
		err := p.host.nl.LinkAdd(&made)
		if vlans && errors.Is(err, unix.EOPNOTSUPP) { // CONFIG_BRIDGE_VLAN_FILTERING
			continue
		}
		must(t, err)
		bridge, err := p.host.LinkByName("br")
		must(t, err)
		must(t, p.host.nl.LinkSetMasterByIndex(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: p.link.Index}}, bridge.Index))
		learnt := netlink.Neigh{
			LinkIndex: p.link.Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER, State: netlink.NUD_NOARP, HardwareAddr: net.HardwareAddr{2, 0xec, 0, 0, 0, 3},
		}
		if vlans {
			learnt.Vlan = defaultVLAN
		}
		must(t, p.host.nl.NeighAppend(&learnt))
		for _, c := range []struct {
			bridge int
			mac    net.HardwareAddr
			want   int
		}{{bridge.Index, learnt.HardwareAddr, p.link.Index}, {bridge.Index, macB, 0}, {bridge.Index, p.link.MAC, 0}, {bridge.Index + 1000, learnt.HardwareAddr, 0}} {
			if got, err := p.host.BridgePort(c.bridge, c.mac); err != nil || got != c.want {
				t.Errorf("bridge %d, with VLANs %t, knows %s behind %d, %v; want %d", c.bridge, vlans, c.mac, got, err, c.want)
			}
		}
	}
}
