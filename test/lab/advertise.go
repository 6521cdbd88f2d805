package lab

import (
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
)

// RouterAdvertisement is what a router tells the hosts on a link of itself (RFC 4861, section 4.2).
type RouterAdvertisement struct {
	// Lifetime is how long it is a default router; 0: it is none.
	Lifetime time.Duration
	// Prefix is a network of which hosts on the link give themselves addresses; none if it is not valid.
	Prefix netip.Prefix
}

// Advertise sends a router advertisement out of a link to all hosts there, once, whether or not the sender is a router.
func (ns *Namespace) Advertise(link string, ra RouterAdvertisement) error {
	frame, err := ns.advertisement(link, ra)
	if err != nil {
		return fmt.Errorf("advertise a router on %s in %s: %w", link, ns.name, err)
	}
	return ns.SendFrame(link, frame)
}

func (ns *Namespace) advertisement(link string, ra RouterAdvertisement) ([]byte, error) {
	l, err := ns.nl.LinkByName(link)
	if err != nil {
		return nil, err
	}
	from, err := ns.LinkLocal(link)
	if err != nil {
		return nil, err
	}
	mac := l.Attrs().HardwareAddr
	ip := &layers.IPv6{
		Version: 6, HopLimit: math.MaxUint8, NextHeader: layers.IPProtocolICMPv6,
		SrcIP: from.AsSlice(), DstIP: netip.IPv6LinkLocalAllNodes().AsSlice(),
	}
	message := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(layers.ICMPv6TypeRouterAdvertisement, 0)}
	if err := message.SetNetworkLayerForChecksum(ip); err != nil {
		return nil, err
	}
	options := layers.ICMPv6Options{{Type: layers.ICMPv6OptSourceAddress, Data: mac}}
	if ra.Prefix.IsValid() {
		options = append(options, prefixOption(ra.Prefix))
	}
	buffer := gopacket.NewSerializeBuffer()
	err = gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		&layers.Ethernet{SrcMAC: mac, DstMAC: []byte{0x33, 0x33, 0, 0, 0, 1}, EthernetType: layers.EthernetTypeIPv6}, ip, message,
		&layers.ICMPv6RouterAdvertisement{HopLimit: 64, RouterLifetime: uint16(ra.Lifetime / time.Second), Options: options})
	return buffer.Bytes(), err
}

// prefixOption says that a prefix is on the link, and that hosts may take addresses of it (RFC 4861, section 4.6.2).
func prefixOption(prefix netip.Prefix) layers.ICMPv6Option {
	const onLink, autonomous, forever = 0x80, 0x40, 0xff
	data := make([]byte, 30)
	data[0], data[1] = byte(prefix.Bits()), onLink|autonomous
	for i := 2; i < 10; i++ { // both lifetimes
		data[i] = forever
	}
	copy(data[14:], prefix.Addr().AsSlice())
	return layers.ICMPv6Option{Type: layers.ICMPv6OptPrefixInfo, Data: data}
}

// LinkLocal is the link-local address of a link.
func (ns *Namespace) LinkLocal(link string) (netip.Addr, error) {
	l, err := ns.nl.LinkByName(link)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find link %s in %s: %w", link, ns.name, err)
	}
	addrs, err := RetryInterrupted(func() ([]netlink.Addr, error) { return ns.nl.AddrList(l, netlink.FAMILY_V6) })
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list addresses of %s in %s: %w", link, ns.name, err)
	}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP); ok && addr.IsLinkLocalUnicast() {
			return addr, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("link %s in %s has no link-local address", link, ns.name)
}
