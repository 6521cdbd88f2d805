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

// Untracked are packets that need no entry in netfilter's connection table: the outer ones of a tunnel. They are known by
// the UDP port that they are sent to and, as others may use the same number for something else, by the address of this node
// at which they arrive, and by the bit of the skb mark that those have that leave.
type Untracked struct {
	Address netip.Addr
	Port    uint16 // host byte order
	Mark    uint32
}

const (
	// NotrackTable is the name of the table of ours, which has nothing but the rules of Untracked.
	NotrackTable = "ebpf-cni"
	// rawPriority is before conntrack's (NF_IP_PRI_RAW).
	rawPriority = -300
)

// Notrack keeps the rules by which netfilter does not track what is Untracked. It works in the network namespace of the
// thread that calls it first, and is for one goroutine at a time. The zero value is ready for use.
type Notrack struct {
	questions
	is         Untracked // what the rules are about; the zero value: nothing is known of them
	content    []byte    // of the table, as the kernel told it after they were written
	generation uint32    // of nftables at the newest look, which is never 0
	absent     time.Time // when the kernel said that it has no nftables, or no expression that is needed
}

// Ensure writes the rules if they are not there as they should be; it reports whether it has. While nobody has changed rules
// it costs one question. Without a connection table, or without nftables, there is nothing to do.
func (n *Notrack) Ensure(now time.Time, want Untracked) (wrote bool, err error) {
	if now.Sub(n.absent) < askAbsent || !tracksConnections() {
		return false, nil
	}
	generation, err := n.newestGeneration()
	if err == nil && n.is == want && (generation == n.generation || n.unchanged()) {
		n.generation = generation
		return false, nil
	}
	if err == nil {
		err = want.write()
	}
	if noNftables(err) || errors.Is(err, unix.ENOENT) { // without the table, or without an expression
		n.absent = now
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("write nftables table %s: %w", NotrackTable, err)
	}
	n.is, n.generation, n.content = want, 0, n.read(want.family())
	return true, nil
}

// unchanged reports whether the table is as it was left.
func (n *Notrack) unchanged() bool {
	return n.content != nil && bytes.Equal(n.content, n.read(n.is.family()))
}

// Close closes what is kept open; the rules stay.
func (n *Notrack) Close() { n.close() }

// RemoveNotrack removes the table. It succeeds if there is none.
func RemoveNotrack() error {
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var b nftBatch
		b.add(unix.NFT_MSG_DELTABLE, 0, family, nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(NotrackTable)))
		if err := b.commit(); err != nil && !errors.Is(err, unix.ENOENT) && !noNftables(err) {
			return fmt.Errorf("remove nftables table %s: %w", NotrackTable, err)
		}
	}
	return nil
}

// read is what the kernel says of the table, its chains and rules; nothing, unless all of them are there.
func (n *Notrack) read(family uint8) (content []byte) {
	name := nl.ZeroTerminated(NotrackTable)
	for _, ask := range []struct {
		message, flags int
		attrs          []*nl.RtAttr
	}{
		{unix.NFT_MSG_GETTABLE, 0, []*nl.RtAttr{nl.NewRtAttr(unix.NFTA_TABLE_NAME, name)}},
		{unix.NFT_MSG_GETCHAIN, 0, notrackChain("prerouting")},
		{unix.NFT_MSG_GETCHAIN, 0, notrackChain("output")},
		{unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, []*nl.RtAttr{nl.NewRtAttr(unix.NFTA_RULE_TABLE, name)}},
	} {
		answer, err := n.ask(ask.message, ask.flags, family, ask.attrs...)
		if err != nil {
			return nil
		}
		for _, m := range answer {
			content = append(content, m[min(len(m), nl.SizeofNfgenmsg):]...) // the header has the generation
		}
	}
	return content
}

// notrackChain names a chain of the table, as messages about chains do.
func notrackChain(name string) []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(NotrackTable)),
		nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(name)),
	}
}

func (u Untracked) family() uint8 {
	if u.Address.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

// write puts the table in the place of what there may be, in one transaction.
func (u Untracked) write() error {
	var b nftBatch
	table := func() *nl.RtAttr { return nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(NotrackTable)) }
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, u.family(), table()) // so that there is one to delete
	b.add(unix.NFT_MSG_DELTABLE, 0, u.family(), table())
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, u.family(), table())
	for _, chain := range []struct {
		name  string
		hook  uint32
		match []*nl.RtAttr
	}{
		{"prerouting", unix.NF_INET_PRE_ROUTING, u.arriving()},
		{"output", unix.NF_INET_LOCAL_OUT, u.leaving()},
	} {
		hook := nl.NewRtAttr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nil)
		hook.AddRtAttr(unix.NFTA_HOOK_HOOKNUM, nl.BEUint32Attr(chain.hook))
		priority := rawPriority
		hook.AddRtAttr(unix.NFTA_HOOK_PRIORITY, nl.BEUint32Attr(uint32(priority)))
		b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, u.family(), append(notrackChain(chain.name), hook,
			nl.NewRtAttr(unix.NFTA_CHAIN_TYPE, nl.ZeroTerminated("filter")))...)
		rule := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
		for _, e := range slices.Concat(chain.match, u.toPort(), []*nl.RtAttr{expression("notrack")}) {
			rule.AddChild(e)
		}
		b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, u.family(),
			nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated(NotrackTable)),
			nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated(chain.name)), rule)
	}
	return b.commit()
}

// arriving matches the destination address, leaving the mark, toPort the protocol and the destination port.
func (u Untracked) arriving() []*nl.RtAttr {
	offset, address := uint32(16), u.Address.AsSlice() // of daddr in struct iphdr
	if !u.Address.Is4() {
		offset = 24 // in struct ipv6hdr
	}
	return []*nl.RtAttr{payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(len(address))), compare(unix.NFT_CMP_EQ, address)}
}

func (u Untracked) leaving() []*nl.RtAttr {
	mask := binary.NativeEndian.AppendUint32(nil, u.Mark)
	none := make([]byte, len(mask))
	return []*nl.RtAttr{
		meta(unix.NFT_META_MARK),
		expression("bitwise", number(unix.NFTA_BITWISE_SREG, register), number(unix.NFTA_BITWISE_DREG, register),
			number(unix.NFTA_BITWISE_LEN, uint32(len(mask))), value(unix.NFTA_BITWISE_MASK, mask), value(unix.NFTA_BITWISE_XOR, none)),
		compare(unix.NFT_CMP_NEQ, none),
	}
}

func (u Untracked) toPort() []*nl.RtAttr {
	const offset, length = 2, 2 // of the destination port in struct udphdr
	return []*nl.RtAttr{
		meta(unix.NFT_META_L4PROTO), compare(unix.NFT_CMP_EQ, []byte{unix.IPPROTO_UDP}),
		payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset, length), compare(unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, u.Port)),
	}
}
