package device

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Link describes a link.
type Link struct {
	Index     int
	Name      string
	Kind      string // veth, vxlan, dummy, bridge, ...; KindHardware for hardware and loopback
	MTU       int
	MAC       net.HardwareAddr
	Flags     net.Flags
	NoARP     bool // neighbours are not resolved
	Bare      bool // packets on it are IP without a header before that (isBare)
	Running   bool // operationally up: it carries packets
	PeerIndex int  // of a veth: its peer's index, in the peer's namespace; of others: that of the device below
	PeerNS    int  // the id that this namespace has for the peer's; negative: the peer is in this one, or there is none
	Master    int
	VXLAN     VXLAN // of a link of that kind
}

// Kinds of links: bridges, and hardware and loopback.
const (
	KindBridge   = "bridge"
	KindHardware = "device"
)

// Up reports whether the link is administratively up.
func (l Link) Up() bool { return l.Flags&net.FlagUp != 0 }

// Loopback reports whether the link is a loopback device.
func (l Link) Loopback() bool { return l.Flags&net.FlagLoopback != 0 }

// Ethernet reports whether packets on the link begin with an Ethernet header.
func (l Link) Ethernet() bool { return len(l.MAC) == 6 && !l.Bare }

// encapTypes are the hardware types that isBare knows, by what package netlink calls them.
var encapTypes = map[string]uint16{
	"none": unix.ARPHRD_NONE, "unknown519": arphrdRawIP, "ppp": unix.ARPHRD_PPP, "ipip": unix.ARPHRD_TUNNEL, "tunnel6": unix.ARPHRD_TUNNEL6,
	"sit": unix.ARPHRD_SIT, "gre": unix.ARPHRD_IPGRE, "unknown823": unix.ARPHRD_IP6GRE,
}

const arphrdRawIP = 519 // of modems

// isBare reports whether the kernel takes from a link of this hardware type, and gives to it, IP packets without a header
// (dev_is_mac_header_xmit). A tunnel without a far end of its own finds one by the host's route, so that programs cannot send to it;
// one to a group begins packets with the outer header. On IPsec's links the kernel moves the outer frame's header in front of what it has decrypted,
// so that a packet that arrives has one, and a packet that leaves has none.
func isBare(kind string, hardware uint16, flags uint32) bool {
	if slices.Contains([]string{"xfrm", "vti", "vti6"}, kind) {
		return false
	}
	switch hardware {
	case unix.ARPHRD_NONE, arphrdRawIP:
		return true
	case unix.ARPHRD_PPP:
		return flags&unix.IFF_POINTOPOINT != 0 && redirectsToPPP()
	case unix.ARPHRD_TUNNEL, unix.ARPHRD_TUNNEL6, unix.ARPHRD_SIT, unix.ARPHRD_IPGRE, unix.ARPHRD_IP6GRE:
		return flags&unix.IFF_POINTOPOINT != 0 && flags&unix.IFF_BROADCAST == 0
	}
	return false
}

// redirectsToPPP reports whether the kernel removes a header from what programs redirect to PPP, which it surely does since Linux 6.6. An
// earlier one may send it.
var redirectsToPPP = sync.OnceValue(func() bool {
	var name unix.Utsname
	var major, minor int
	if unix.Uname(&name) != nil {
		return false
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		return false
	}
	return major > 6 || major == 6 && minor >= 6
})

// AllLinks is the Index of the settings in net/ipv4/conf/all, of which forwarding is net/ipv4/ip_forward as well.
const AllLinks = -1

// Untold stands for a setting that an event does not tell of.
const Untold = math.MinInt32

// Settings are sysctls of a link, in net/ipv4/conf, as numbers.
type Settings struct {
	Index                int // negative: of all links, or of new ones
	Forwarding, RPFilter int
}

// Address is an address of a link.
type Address struct {
	Index  int
	Prefix netip.Prefix
	Host   bool // scope host
	Link   bool // scope link
	// Secondary is set for an address that is not its subnet's first.
	Secondary bool
	// Deprecated is set for an address of IPv6 that new connections should not get while there is another.
	Deprecated bool
	// Temporary is set for an address of IPv6 that hides the host from its peers (RFC 8981).
	Temporary bool
	// Unproven is set for one that may be somebody else's: it is tentative, or turned out to be (RFC 4862, section 5.4).
	Unproven bool
}

// Veth describes a pair to create. Both ends get the MTU.
type Veth struct {
	Name     string
	MAC      net.HardwareAddr
	PeerName string
	PeerMAC  net.HardwareAddr
	PeerNS   *NetNS
	MTU      int
}

// CheckName returns why no link can have that name, nil if one can. The kernel replaces "%d" by a number, refuses every
// other "%", and takes the byte 0xa0 for white space; "all" and "default" are directories of sysctls for all links.
func CheckName(name string) error {
	if name == "" || len(name) >= unix.IFNAMSIZ {
		return fmt.Errorf("must be 1 to %d bytes long", unix.IFNAMSIZ-1)
	}
	if slices.Contains([]string{".", "..", "all", "default"}, name) {
		return errors.New("is reserved")
	}
	for _, b := range []byte(name) {
		if b <= ' ' || b == 0x7f || b == 0xa0 || strings.IndexByte("/:%", b) >= 0 {
			return fmt.Errorf("must not contain the byte %q", b)
		}
	}
	return nil
}

// CreateVeth creates the pair in one request, the peer directly in PeerNS, so that it never appears elsewhere. Both ends
// are down. The error matches unix.EEXIST when one of the names is taken.
func (h *Handle) CreateVeth(v Veth) (Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = v.Name, v.MTU, v.MAC
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerMTU, pair.PeerHardwareAddr = v.PeerName, uint32(v.MTU), v.PeerMAC
	pair.PeerNamespace = netlink.NsFd(v.PeerNS.FD())
	if err := again(func() error { return h.nl.LinkAdd(pair) }); err != nil {
		return Link{}, fmt.Errorf("create veth %s with peer %s in %s: %w", v.Name, v.PeerName, v.PeerNS.Path(), err)
	}
	return h.LinkByName(v.Name)
}

// LinkByName finds a link. The error matches ErrNotFound.
func (h *Handle) LinkByName(name string) (Link, error) {
	return h.link("link "+name, func() (netlink.Link, error) { return h.nl.LinkByName(name) })
}

// LinkByIndex finds a link. The error matches ErrNotFound.
func (h *Handle) LinkByIndex(index int) (Link, error) {
	return h.link(fmt.Sprintf("link %d", index), func() (netlink.Link, error) { return h.nl.LinkByIndex(index) })
}

// Peer is the other end of a veth pair, by the end in this namespace. The kernel tells it without the caller entering the
// peer's namespace, if the caller has CAP_NET_ADMIN over that. The error matches ErrNotFound where there is no such peer.
func (h *Handle) Peer(l Link) (Link, error) {
	var peers []Link
	var err error
	if l.PeerNS >= 0 {
		head := nl.NewIfInfomsg(unix.AF_UNSPEC)
		head.Index = int32(l.PeerIndex)
		peers, err = ask(h, unix.RTM_GETLINK, 0, head, decodeLink,
			withoutStatistics(), nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(l.PeerNS))))
	}
	// The id may have become another namespace's since.
	gone := len(peers) != 1 || peers[0].Kind != l.Kind || peers[0].PeerIndex != l.Index
	switch {
	case err != nil && !isErrno(err, unix.ENODEV, unix.EINVAL):
		return Link{}, fmt.Errorf("find the peer of link %s: %w", l.Name, err)
	case gone:
		return Link{}, fmt.Errorf("peer of link %s: %w", l.Name, ErrNotFound)
	}
	return peers[0], nil
}

func (h *Handle) link(what string, find func() (netlink.Link, error)) (Link, error) {
	var l netlink.Link
	err := again(func() (err error) {
		l, err = find()
		return err
	})
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing), isErrno(err, unix.ENODEV):
		return Link{}, fmt.Errorf("%s: %w", what, ErrNotFound)
	case err != nil:
		return Link{}, fmt.Errorf("find %s: %w", what, err)
	}
	return convert(l), nil
}

func convert(l netlink.Link) Link {
	a := l.Attrs()
	out := Link{
		Index: a.Index, Name: a.Name, Kind: l.Type(), MTU: a.MTU, MAC: a.HardwareAddr, Flags: a.Flags,
		NoARP: a.RawFlags&unix.IFF_NOARP != 0, Bare: isBare(l.Type(), encapTypes[a.EncapType], a.RawFlags), Running: a.OperState == netlink.OperUp,
		PeerIndex: a.ParentIndex, PeerNS: a.NetNsID, Master: a.MasterIndex,
	}
	if v, ok := l.(*netlink.Vxlan); ok {
		out.VXLAN = VXLAN{Port: uint16(v.Port), FlowBased: v.FlowBased}
	}
	return out
}

// SetUp sets a link up.
func (h *Handle) SetUp(index int) error {
	if err := again(func() error { return h.nl.LinkSetUp(byIndex(index)) }); err != nil {
		return fmt.Errorf("set link %d up: %w", index, err)
	}
	return nil
}

// WaitRunning waits until a link that has been set up carries packets, or ctx ends. The kernel activates a link some time
// after it has a carrier, and until then silently drops whatever is sent. Since Linux 6.8 the lookup activates it.
func (h *Handle) WaitRunning(ctx context.Context, index int) error {
	for {
		l, err := h.LinkByIndex(index)
		if err != nil {
			return err
		}
		if l.Running {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for link %s to run: %w", l.Name, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// SetMAC changes a link's Ethernet address. The kernel then deletes the link's neighbours, permanent ones included.
func (h *Handle) SetMAC(index int, mac net.HardwareAddr) error {
	if err := again(func() error { return h.nl.LinkSetHardwareAddr(byIndex(index), mac) }); err != nil {
		return fmt.Errorf("give link %d the Ethernet address %s: %w", index, mac, err)
	}
	return nil
}

// SetDown sets a link down.
func (h *Handle) SetDown(index int) error {
	if err := again(func() error { return h.nl.LinkSetDown(byIndex(index)) }); err != nil {
		return fmt.Errorf("set link %d down: %w", index, err)
	}
	return nil
}

// DeleteLink deletes a link, a veth with its peer. It succeeds if the link is gone.
func (h *Handle) DeleteLink(index int) error {
	err := again(func() error { return h.nl.LinkDel(byIndex(index)) })
	if err != nil && !isErrno(err, unix.ENODEV) {
		return fmt.Errorf("delete link %d: %w", index, err)
	}
	return nil
}

// AddAddress adds an address, without duplicate address detection. It succeeds if the link has the address already.
func (h *Handle) AddAddress(index int, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	err := again(func() error { return h.nl.AddrAdd(byIndex(index), a) })
	if err != nil && !isErrno(err, unix.EEXIST) {
		return fmt.Errorf("add address %s to link %d: %w", p, index, err)
	}
	return nil
}

// DeleteAddress deletes an address. It succeeds if the address, or the link, is gone.
func (h *Handle) DeleteAddress(index int, p netip.Prefix) error {
	err := again(func() error { return h.nl.AddrDel(byIndex(index), &netlink.Addr{IPNet: ipNet(p)}) })
	if err != nil && !isErrno(err, unix.EADDRNOTAVAIL, unix.ENODEV) {
		return fmt.Errorf("delete address %s from link %d: %w", p, index, err)
	}
	return nil
}

// byIndex is a link by its index alone, for requests.
func byIndex(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}
