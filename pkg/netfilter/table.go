package netfilter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
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
	// Translated says that netfilter translates destinations on this node. What becomes a packet to the port by that is no
	// node's: as a pod sent it to another port, nobody minded that it got its node's address. To ask netfilter has the
	// kernel track connections, if nothing else has.
	Translated bool
}

const (
	// TableName is the name of the table of ours, which has nothing but the rules about Outer packets.
	TableName = "ebpf-cni"
	// rawPriority is before conntrack's (NF_IP_PRI_RAW), filterPriority after translation.
	rawPriority    = -300
	filterPriority = 0
)

// Table keeps the rules by which netfilter does not track Outer packets, and drops what it has translated to their port. It works
// in the network namespace of the thread that calls it first, and is for one goroutine at a time. The zero value is ready for use.
type Table struct {
	questions
	is         Outer     // what the rules are about; the zero value: nothing is known of them
	content    []byte    // of the table, as the kernel told it after they were written
	generation uint32    // of nftables at the newest look, which is never 0
	absent     time.Time // when the kernel said that it has no nftables, or does not understand the rules
	refused    error     // why it does not; nil: it has no nftables
}

// ErrNoExpression says that the kernel lacks what rules of the table are made of. It stays so until a module is loaded.
var ErrNoExpression = errors.New("the kernel lacks nft_ct, which has the expressions notrack and ct")

// Ensure writes the rules if they are not there as they should be; it reports whether it has. While nobody has changed rules
// it costs one question. Without a connection table, or without nftables, there is nothing to do. A kernel that does not
// understand the rules is asked again after a minute; until then the error stays, ErrNoExpression for one.
func (n *Table) Ensure(now time.Time, want Outer) (wrote bool, err error) {
	switch {
	case !tracksConnections():
		return false, nil
	case now.Sub(n.absent) < askAbsent:
		return false, n.refused
	}
	generation, err := n.newestGeneration()
	if noNftables(err) {
		n.absent, n.refused = now, nil
		return false, nil
	}
	if err == nil && n.is == want && (generation == n.generation || n.unchanged()) {
		n.generation = generation
		return false, nil
	}
	if err == nil {
		err = want.write()
	}
	if err != nil {
		lacks := noNftables(err) || errors.Is(err, unix.ENOENT)
		if err = explainRules(err); lacks {
			n.absent, n.refused = now, err
		}
		return false, err
	}
	n.is, n.generation, n.content = want, 0, n.read(want)
	return true, nil
}

// explainRules says what it means that the table can't be written.
func explainRules(err error) error {
	if errors.Is(err, unix.ENOENT) { // nothing else is asked for that may not be there
		err = fmt.Errorf("%w: %w", ErrNoExpression, err)
	}
	return fmt.Errorf("write nftables table %s: %w", TableName, err)
}

// unchanged reports whether the table is as it was left.
func (n *Table) unchanged() bool {
	return n.content != nil && bytes.Equal(n.content, n.read(n.is))
}

// Close closes what is kept open; the rules stay.
func (n *Table) Close() { n.close() }

// RemoveTable removes the table. It succeeds if there is none.
func RemoveTable() error {
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var b nftBatch
		b.add(unix.NFT_MSG_DELTABLE, 0, family, nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(TableName)))
		if err := b.commit(); err != nil && !errors.Is(err, unix.ENOENT) && !noNftables(err) {
			return fmt.Errorf("remove nftables table %s: %w", TableName, err)
		}
	}
	return nil
}

// read is what the kernel says of the table, its chains and rules; nothing, unless all of them are there.
func (n *Table) read(o Outer) (content []byte) {
	name := nl.ZeroTerminated(TableName)
	get := func(message, flags int, attrs ...*nl.RtAttr) bool {
		answer, err := n.ask(message, flags, o.family(), attrs...)
		for _, m := range answer {
			content = append(content, m[min(len(m), nl.SizeofNfgenmsg):]...) // the header has the generation
		}
		return err == nil
	}
	there := get(unix.NFT_MSG_GETTABLE, 0, nl.NewRtAttr(unix.NFTA_TABLE_NAME, name))
	for _, c := range o.chains() {
		there = there && get(unix.NFT_MSG_GETCHAIN, 0, namedChain(c.name)...)
	}
	if !there || !get(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, nl.NewRtAttr(unix.NFTA_RULE_TABLE, name)) {
		return nil
	}
	return content
}

// chain is one of the table, with one rule.
type chain struct {
	name     string
	hook     uint32
	priority int
	rule     []*nl.RtAttr
}

func (o Outer) chains() []chain {
	all := []chain{
		{"prerouting", unix.NF_INET_PRE_ROUTING, rawPriority, slices.Concat(o.arriving(), o.toPort(), []*nl.RtAttr{expression("notrack")})},
		{"output", unix.NF_INET_LOCAL_OUT, rawPriority, slices.Concat(o.leaving(), o.toPort(), []*nl.RtAttr{expression("notrack")})},
	}
	if o.Translated {
		all = append(all, chain{"input", unix.NF_INET_LOCAL_IN, filterPriority, slices.Concat(o.toPort(), translated(), []*nl.RtAttr{drop()})})
	}
	return all
}

// namedChain names a chain of the table, as messages about chains do.
func namedChain(name string) []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(TableName)),
		nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(name)),
	}
}

func (o Outer) family() uint8 {
	if o.Address.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

// write puts the table in the place of what there may be, in one transaction.
func (o Outer) write() error {
	var b nftBatch
	table := func() *nl.RtAttr { return nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(TableName)) }
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, o.family(), table()) // so that there is one to delete
	b.add(unix.NFT_MSG_DELTABLE, 0, o.family(), table())
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, o.family(), table())
	for _, c := range o.chains() {
		hook := nl.NewRtAttr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nil)
		hook.AddRtAttr(unix.NFTA_HOOK_HOOKNUM, nl.BEUint32Attr(c.hook))
		hook.AddRtAttr(unix.NFTA_HOOK_PRIORITY, nl.BEUint32Attr(uint32(c.priority)))
		b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, o.family(), append(namedChain(c.name), hook,
			nl.NewRtAttr(unix.NFTA_CHAIN_TYPE, nl.ZeroTerminated("filter")))...)
		rule := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
		for _, e := range c.rule {
			rule.AddChild(e)
		}
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, o.family(),
			nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(TableName)),
			nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(c.name)), rule)
	}
	return b.commit()
}

// arriving matches the destination address, leaving the mark, toPort the protocol and the destination port.
func (o Outer) arriving() []*nl.RtAttr {
	offset, address := uint32(16), o.Address.AsSlice() // of daddr in struct iphdr
	if !o.Address.Is4() {
		offset = 24 // in struct ipv6hdr
	}
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
