package netfilter

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Outer are the outer packets of a tunnel, which need no entry in netfilter's connection table. They are known by
// the UDP port that they are sent to and, as others may use the same number for something else, by the address of this node
// at which they arrive, and by the bit of the skb mark that those have that leave.
type Outer struct {
	Address netip.Addr
	Port    uint16 // host byte order
	Mark    uint32
	// Device is the name of the tunnel's, by which its outer packets come.
	Device string
	// Translated says that netfilter translates destinations on this node. What becomes a packet to the port by that is no
	// node's: as a pod sent it to another port, nobody minded that it got its node's address. To ask netfilter has the
	// kernel track connections, if nothing else has.
	Translated bool
}

const (
	// TableName is the name of the table of ours, which has nothing but the rules about Outer packets.
	TableName = "ebpf-cni"
	// rawPriority is before conntrack's (NF_IP_PRI_RAW), filterPriority after translation of destinations, lastPriority after that of
	// sources.
	rawPriority    = -300
	filterPriority = 0
	lastPriority   = 300
)

// Table keeps the rules by which netfilter does not track Outer packets, and drops what it has translated to their port. It works
// in the network namespace of the thread that calls it first, and is for one goroutine at a time. The zero value is ready for use.
type Table struct {
	kept
	is Outer // what the rules are about; the zero value: nothing is known of them
}

// ErrNoExpression says that the kernel lacks what rules of the table are made of. It stays so until a module is loaded.
var ErrNoExpression = errors.New("the kernel lacks nft_ct, which has the expressions notrack and ct")

// Ensure writes the rules if they are not there as they should be; it reports whether it has. While nobody has changed rules
// it costs one question. Without a connection table, or without nftables, there is nothing to do. A kernel that does not
// understand the rules is asked again after a minute; until then the error stays, ErrNoExpression for one.
func (n *Table) Ensure(now time.Time, want Outer) (wrote bool, err error) {
	if !tracksConnections() {
		return false, nil
	}
	if n.is != want {
		n.content, n.is = nil, want
	}
	wrote, err = n.ensure(now, layout{want.family(), TableName, want.chains()}, ErrNoExpression)
	if errors.Is(err, ErrNoNftables) {
		return false, nil
	}
	return wrote, err
}

// Close closes what is kept open; the rules stay.
func (n *Table) Close() { n.close() }

// RemoveTable removes the table. It succeeds if there is none.
func RemoveTable() error { return removeOwn(TableName, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6) }

func (o Outer) family() uint8 {
	if o.Address.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

func (o Outer) chains() []chain {
	all := []chain{
		{"prerouting", filterChain, unix.NF_INET_PRE_ROUTING, rawPriority, slices.Concat(o.arriving(), o.toPort(), []*nl.RtAttr{expression("notrack")})},
		{"output", filterChain, unix.NF_INET_LOCAL_OUT, rawPriority, slices.Concat(o.leaving(), o.toPort(), []*nl.RtAttr{expression("notrack")})},
		{"postrouting", filterChain, unix.NF_INET_POST_ROUTING, lastPriority, slices.Concat(o.forged(), o.toPort(), []*nl.RtAttr{drop()})},
	}
	if o.Translated {
		all = append(all, chain{"input", filterChain, unix.NF_INET_LOCAL_IN, filterPriority, slices.Concat(o.toPort(), translated(), []*nl.RtAttr{drop()})})
	}
	return all
}

// arriving matches the destination address, leaving the mark, toPort the protocol and the destination port.
func (o Outer) arriving() []*nl.RtAttr {
	if !o.Address.Is4() {
		return o.addressAt(24) // daddr in struct ipv6hdr
	}
	return o.addressAt(16) // daddr in struct iphdr
}

// forged matches what is forwarded with this node's address as its source over a link without Ethernet, where no program of ours may drop
// it: others would take it for this node's. Its own comes by the tunnel's device, or from nowhere.
func (o Outer) forged() []*nl.RtAttr {
	source := o.addressAt(12) // saddr in struct iphdr
	if !o.Address.Is4() {
		source = o.addressAt(8) // in struct ipv6hdr
	}
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, o.Device)
	return slices.Concat(
		[]*nl.RtAttr{meta(unix.NFT_META_IIF), compare(unix.NFT_CMP_NEQ, make([]byte, 4))},
		[]*nl.RtAttr{meta(unix.NFT_META_IIFNAME), compare(unix.NFT_CMP_NEQ, name)},
		[]*nl.RtAttr{meta(unix.NFT_META_OIFTYPE), compare(unix.NFT_CMP_NEQ, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER))},
		source,
	)
}

// addressAt matches the address at an offset of the IP header.
func (o Outer) addressAt(offset uint32) []*nl.RtAttr {
	address := o.Address.AsSlice()
	return []*nl.RtAttr{payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(len(address))), compare(unix.NFT_CMP_EQ, address)}
}

func (o Outer) leaving() []*nl.RtAttr {
	return append([]*nl.RtAttr{meta(unix.NFT_META_MARK)}, anyBit(o.Mark)...)
}

// translated matches what netfilter has given another destination.
func translated() []*nl.RtAttr {
	const dstNAT = 1 << 5 // IPS_DST_NAT of enum ip_conntrack_status
	status := expression("ct", number(unix.NFTA_CT_KEY, unix.NFT_CT_STATUS), number(unix.NFTA_CT_DREG, register))
	return append([]*nl.RtAttr{status}, anyBit(dstNAT)...)
}

func (o Outer) toPort() []*nl.RtAttr {
	const offset, length = 2, 2 // of the destination port in struct udphdr
	return []*nl.RtAttr{
		meta(unix.NFT_META_L4PROTO), compare(unix.NFT_CMP_EQ, []byte{unix.IPPROTO_UDP}),
		payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, length), compare(unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, o.Port)),
	}
}
