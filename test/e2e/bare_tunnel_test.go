package e2e

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Uplinks that the kernel makes of an Ethernet beneath: what such a device wants of the packets that programs give it, and how those look
// that it delivers, is its own.

// beneath are the addresses of the two ends on that Ethernet.
var beneath = [2]netip.Addr{netip.MustParseAddr("10.98.0.1"), netip.MustParseAddr("10.98.0.2")}

func TestWireGuardUplink(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		needKind(t, &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}})
		startBare(t, attach, false, families, joinWireGuard).meetAll(t)
	})
}

func TestIPIPUplink(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		needKind(t, &netlink.Iptun{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}, Local: beneath[0].AsSlice(), Remote: beneath[1].AsSlice()})
		startBare(t, attach, false, []wire.Family{wire.IPv4}, joinIPIP).meetAll(t)
	})
}

// needKind skips a test where the kernel lacks a kind of links.
func needKind(t *testing.T, link netlink.Link) {
	t.Helper()
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	err := l.Nodes[0].Netlink().LinkAdd(link)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this kernel has no %s", link.Type())
	}
	must(t, err)
}

// wireBeneath joins the hosts by an Ethernet on which each has its address beneath.
func wireBeneath(t *testing.T, node, road *lab.Namespace) {
	t.Helper()
	file, err := os.Open(road.Path())
	must(t, err)
	defer file.Close()
	must(t, node.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "under0"}, PeerName: "under0", PeerNamespace: netlink.NsFd(file.Fd())}))
	upBoth(t, "under0", node, road)
	for i, ns := range []*lab.Namespace{node, road} {
		addPeer(t, ns, "under0", beneath[i], beneath[1-i])
	}
}

func joinIPIP(t *testing.T, node, road *lab.Namespace) string {
	t.Helper()
	wireBeneath(t, node, road)
	for i, ns := range []*lab.Namespace{node, road} {
		must(t, ns.Netlink().LinkAdd(&netlink.Iptun{LinkAttrs: netlink.LinkAttrs{Name: "vpn0"}, Local: beneath[i].AsSlice(), Remote: beneath[1-i].AsSlice()}))
	}
	upBoth(t, "vpn0", node, road)
	return "vpn0"
}

// What of linux/wireguard.h is needed.
const (
	wgSetDevice = 1

	wgDeviceName, wgDeviceKey, wgDevicePort, wgDevicePeers = 2, 3, 6, 8
	wgPeerKey, wgPeerEndpoint, wgPeerAllowed               = 1, 4, 9
	wgAllowedFamily, wgAllowedAddress, wgAllowedBits       = 1, 2, 3

	wgPort = 51820
)

func joinWireGuard(t *testing.T, node, road *lab.Namespace) string {
	t.Helper()
	wireBeneath(t, node, road)
	var keys [2]*ecdh.PrivateKey
	for i := range keys {
		var err error
		keys[i], err = ecdh.X25519().GenerateKey(rand.Reader)
		must(t, err)
	}
	for i, ns := range []*lab.Namespace{node, road} {
		must(t, ns.Netlink().LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "vpn0"}}))
		must(t, setWireGuard(ns, "vpn0", keys[i], keys[1-i].PublicKey(), netip.AddrPortFrom(beneath[1-i], wgPort)))
	}
	upBoth(t, "vpn0", node, road)
	return "vpn0"
}

// setWireGuard gives a device its key and one peer, which has all addresses.
func setWireGuard(on *lab.Namespace, name string, key *ecdh.PrivateKey, peer *ecdh.PublicKey, at netip.AddrPort) error {
	family, err := on.Netlink().GenlFamilyGet("wireguard")
	if err != nil {
		return err
	}
	endpoint := binary.NativeEndian.AppendUint16(nil, unix.AF_INET)
	endpoint = append(binary.BigEndian.AppendUint16(endpoint, at.Port()), at.Addr().AsSlice()...)
	nested := func(kind int) *nl.RtAttr { return nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil) }
	peers := nested(wgDevicePeers)
	one := peers.AddRtAttr(unix.NLA_F_NESTED, nil)
	one.AddRtAttr(wgPeerKey, peer.Bytes())
	one.AddRtAttr(wgPeerEndpoint, append(endpoint, make([]byte, 8)...)) // struct sockaddr_in
	allowed := one.AddRtAttr(wgPeerAllowed|unix.NLA_F_NESTED, nil)
	for number, length := range map[uint16]int{unix.AF_INET: 4, unix.AF_INET6: 16} {
		every := allowed.AddRtAttr(unix.NLA_F_NESTED, nil)
		every.AddRtAttr(wgAllowedFamily, nl.Uint16Attr(number))
		every.AddRtAttr(wgAllowedAddress, make([]byte, length))
		every.AddRtAttr(wgAllowedBits, nl.Uint8Attr(0))
	}
	return on.Do(func() error {
		req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		req.AddData(&nl.Genlmsg{Command: wgSetDevice, Version: 1})
		req.AddData(nl.NewRtAttr(wgDeviceName, nl.ZeroTerminated(name)))
		req.AddData(nl.NewRtAttr(wgDeviceKey, key.Bytes()))
		req.AddData(nl.NewRtAttr(wgDevicePort, nl.Uint16Attr(wgPort)))
		req.AddData(peers)
		_, err := req.Execute(unix.NETLINK_GENERIC, 0)
		return err
	})
}
