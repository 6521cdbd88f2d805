package netfilter

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// loaded is what a register of nftables' holds, as far as it is understood.
type loaded struct {
	of     subject
	ipv6   bool   // of an address
	mask   []byte // of what has been taken of it; nil: all
	set    uint32 // bits of the mark that have been added to it
	data   []byte // a constant
	proto  bool   // it is the number of the protocol
	family bool   // it is that of the family
	dport  bool   // it is the destination port
	kept   bool   // it is a connection's mark
}

// expressions reads the rules of one family's tables.
type expressions struct {
	written
	family    uint8 // of the table
	registers map[uint32]loaded
	proto     string
}

// readRule reads a rule's message.
func readRule(m []byte) rule {
	e, a := expressions{family: m[0], registers: map[uint32]loaded{}}, attributes(m)
	e.comment = commentIn(a[unix.NFTA_RULE_USERDATA])
	list, _ := nl.ParseRouteAttr(a[unix.NFTA_RULE_EXPRESSIONS])
	in := ofNft
	for _, item := range list { // iptables writes extensions, which nft does not
		name := text(nested(item.Value)[unix.NFTA_EXPR_NAME])
		if name == "match" || name == "target" {
			in = ofIptables
		}
	}
	e.in = in
	for _, item := range list {
		parts := nested(item.Value)
		e.read(text(parts[unix.NFTA_EXPR_NAME]), nested(parts[unix.NFTA_EXPR_DATA]))
	}
	return e.rule
}

// nested are the attributes within one.
func nested(raw []byte) map[uint16][]byte {
	return attributes(append(make([]byte, nl.SizeofNfgenmsg), raw...))
}

func long(raw []byte) uint32 {
	if len(raw) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(raw)
}

// read reads one expression. What is in a register that it leaves something unknown in is forgotten.
func (e *expressions) read(name string, a map[uint16][]byte) {
	switch name {
	case "payload":
		e.payload(a)
	case "meta":
		e.meta(a)
	case "fib":
		e.fib(a)
	case "bitwise":
		e.bitwise(a)
	case "cmp":
		e.compare(a)
	case "immediate":
		e.immediate(a)
	case "lookup":
		e.lookup(a)
	case "match":
		e.extension(text(a[unix.NFTA_MATCH_NAME]), long(a[unix.NFTA_MATCH_REV]), a[unix.NFTA_MATCH_INFO])
	case "target":
		e.target(text(a[unix.NFTA_TARGET_NAME]), long(a[unix.NFTA_TARGET_REV]), a[unix.NFTA_TARGET_INFO], e.family == unix.NFPROTO_IPV6)
	case "masq":
		e.does(act{does: masquerade}, "")
	case "redir":
		e.does(act{does: redirect}, "")
	case "nat":
		e.nat(a)
	case "ct":
		e.also(name)
		e.ct(a)
	case "reject":
		e.does(act{does: rejects}, "")
	case "queue":
		e.does(act{does: queues}, "")
	case "counter":
	case "log":
		e.also(name)
	default: // whatever it leaves in registers is not known
		clear(e.registers)
		e.some(name)
	}
}

func (e *expressions) payload(a map[uint16][]byte) {
	offset, length, base := long(a[unix.NFTA_PAYLOAD_OFFSET]), long(a[unix.NFTA_PAYLOAD_LEN]), long(a[unix.NFTA_PAYLOAD_BASE])
	if a[unix.NFTA_PAYLOAD_DREG] == nil {
		return // it writes
	}
	var v loaded
	ipv4 := map[uint32]subject{12: source, 16: destination}[offset] // in struct iphdr
	ipv6 := map[uint32]subject{8: source, 24: destination}[offset]  // in struct ipv6hdr
	switch {
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && e.family == unix.NFPROTO_IPV4 && length <= 4:
		v.of = ipv4
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && e.family == unix.NFPROTO_IPV6 && length <= 16:
		v.of, v.ipv6 = ipv6, true
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 2 && length == 2:
		v.dport = true
	}
	e.registers[long(a[unix.NFTA_PAYLOAD_DREG])] = v
}

func (e *expressions) meta(a map[uint16][]byte) {
	key := long(a[unix.NFTA_META_KEY])
	if from := a[unix.NFTA_META_SREG]; from != nil {
		if key == unix.NFT_META_MARK {
			e.does(e.registers[long(from)].marks(), "")
		}
		return
	}
	var v loaded
	switch key {
	case unix.NFT_META_IIFNAME:
		v.of = comesBy
	case unix.NFT_META_OIFNAME:
		v.of = leavesBy
	case unix.NFT_META_MARK:
		v.of = markBits
	case unix.NFT_META_L4PROTO:
		v.proto = true
	case unix.NFT_META_NFPROTO:
		v.family = true
	}
	e.registers[long(a[unix.NFTA_META_DREG])] = v
}

// marks is what writing it into the mark does.
func (v loaded) marks() act {
	switch {
	case !v.kept:
		return act{does: setsMark, bits: v.mayMark()}
	case len(v.mask) == 4:
		return act{does: restoresMark, bits: binary.NativeEndian.Uint32(v.mask)}
	}
	return act{does: restoresMark, bits: ^uint32(0)}
}

// ct reads a value of the packet's connection, or writes the connection's mark. Bits that the packet's own mark has are not new to a connection.
func (e *expressions) ct(a map[uint16][]byte) {
	mark := long(a[unix.NFTA_CT_KEY]) == unix.NFT_CT_MARK
	if from := a[unix.NFTA_CT_SREG]; from != nil {
		if bits := e.registers[long(from)].mayMark(); mark && bits != 0 {
			e.does(act{does: keepsMark, bits: bits}, "")
		}
		return
	}
	e.registers[long(a[unix.NFTA_CT_DREG])] = loaded{kept: mark}
}

// mayMark are the bits that are set in the mark by writing it there.
func (v loaded) mayMark() uint32 {
	switch {
	case len(v.data) == 4:
		return binary.NativeEndian.Uint32(v.data)
	case v.of == markBits:
		return v.set
	}
	return ^uint32(0)
}

func (e *expressions) fib(a map[uint16][]byte) {
	var v loaded
	if long(a[unix.NFTA_FIB_RESULT]) == unix.NFT_FIB_RESULT_ADDRTYPE {
		switch flags := long(a[unix.NFTA_FIB_FLAGS]); {
		case flags&unix.NFTA_FIB_F_SADDR != 0:
			v.of = sourceLocal
		case flags&unix.NFTA_FIB_F_DADDR != 0:
			v.of = destinationLocal
		}
	}
	e.registers[long(a[unix.NFTA_FIB_DREG])] = v
}

func (e *expressions) bitwise(a map[uint16][]byte) {
	const otherwise = 6 // NFTA_BITWISE_OP: nil, or zero for mask and xor
	v := e.registers[long(a[unix.NFTA_BITWISE_SREG])]
	mask, xor := nested(a[unix.NFTA_BITWISE_MASK])[unix.NFTA_DATA_VALUE], nested(a[unix.NFTA_BITWISE_XOR])[unix.NFTA_DATA_VALUE]
	changes := len(bytes.Trim(xor, "\x00")) > 0
	switch {
	case v.data != nil || v.mask != nil || v.set != 0 || long(a[otherwise]) != 0 || len(mask) == 0:
		v = loaded{}
	case v.of == markBits && changes && len(xor) == 4:
		v.set, v.mask = binary.NativeEndian.Uint32(xor), mask
	case changes:
		v = loaded{}
	default:
		v.mask = mask
	}
	e.registers[long(a[unix.NFTA_BITWISE_DREG])] = v
}

func (e *expressions) compare(a map[uint16][]byte) {
	v, data := e.registers[long(a[unix.NFTA_CMP_SREG])], nested(a[unix.NFTA_CMP_DATA])[unix.NFTA_DATA_VALUE]
	operator := long(a[unix.NFTA_CMP_OP])
	m := match{of: v.of, not: operator == unix.NFT_CMP_NEQ}
	understood := operator == unix.NFT_CMP_EQ || m.not
	switch v.of {
	case nothing:
		if v.family && len(data) == 1 {
			e.steps = append(e.steps, step{match: match{of: familyIs, not: m.not, bits: uint32(data[0])}})
		} else {
			e.some("")
		}
		if operator == unix.NFT_CMP_EQ {
			e.remember(v, data)
		}
		return
	case source, destination:
		m.prefix = v.prefix(data)
		understood = understood && m.prefix.IsValid()
	case sourceLocal, destinationLocal:
		understood = understood && len(data) == 4 && binary.NativeEndian.Uint32(data) == unix.RTN_LOCAL && v.mask == nil
	case comesBy, leavesBy:
		m.name, m.begins = text(data), bytes.IndexByte(data, 0) < 0
		understood = understood && v.mask == nil
	case markBits:
		understood = understood && len(data) == 4 && v.set == 0
		if understood {
			m.bits = binary.NativeEndian.Uint32(data)
		}
	}
	if !understood {
		e.some("")
		return
	}
	e.asks(m)
}

// remember keeps what is said for people alone, and of which family packets of a table of both are.
func (e *expressions) remember(v loaded, data []byte) {
	switch {
	case v.family && len(data) == 1:
		e.family = data[0]
	case v.proto && len(data) == 1:
		e.proto = map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[data[0]]
		if e.in == ofIptables && e.proto != "" {
			e.also("-p " + e.proto)
		}
	case v.dport && len(data) == 2 && e.in == ofIptables:
		e.also(fmt.Sprintf("--dport %d", binary.BigEndian.Uint16(data)))
	case v.dport && len(data) == 2:
		e.also(fmt.Sprintf("%s dport %d", e.proto, binary.BigEndian.Uint16(data)))
	}
}

// prefix is that of the addresses of which what is in the register is data.
func (v loaded) prefix(data []byte) netip.Prefix {
	length, whole := 8*len(data), 4
	if v.ipv6 {
		whole = 16
	}
	if len(data) == 0 || len(data) > whole || v.mask != nil && len(v.mask) != len(data) {
		return netip.Prefix{}
	}
	if v.mask != nil {
		if length = prefixLength(v.mask); length < 0 {
			return netip.Prefix{}
		}
	}
	address, _ := netip.AddrFromSlice(append(bytes.Clone(data), make([]byte, whole-len(data))...))
	return netip.PrefixFrom(address, length)
}

// prefixLength is that of a mask; negative: the mask is none of a prefix's.
func prefixLength(mask []byte) (length int) {
	for i, b := range mask {
		ones := bits.LeadingZeros8(^b)
		if b<<ones != 0 || ones > 0 && length < 8*i {
			return -1
		}
		length += ones
	}
	return length
}

// immediate is a verdict, or a constant.
func (e *expressions) immediate(a map[uint16][]byte) {
	to := long(a[unix.NFTA_IMMEDIATE_DREG])
	data := nested(a[unix.NFTA_IMMEDIATE_DATA])
	if to != unix.NFT_REG_VERDICT {
		e.registers[to] = loaded{data: data[unix.NFTA_DATA_VALUE]}
		return
	}
	verdict := nested(data[unix.NFTA_DATA_VERDICT])
	code := int32(long(verdict[unix.NFTA_VERDICT_CODE]))
	if chain := text(verdict[unix.NFTA_VERDICT_CHAIN]); chain != "" {
		e.does(act{does: jumps, chain: chain, goes: code == unix.NFT_GOTO}, "")
	} else if does, ends := map[int32]deed{0: drops, 1: accepts, 3: queues, unix.NFT_RETURN: returns}[code]; ends {
		e.does(act{does: does}, "")
	}
}

// lookup asks a set, or has a map say where to go, or what the register then holds.
func (e *expressions) lookup(a map[uint16][]byte) {
	set, to := text(a[unix.NFTA_LOOKUP_SET]), a[unix.NFTA_LOOKUP_DREG]
	switch {
	case to == nil:
		e.some("@" + set)
	case long(to) == unix.NFT_REG_VERDICT:
		e.does(act{does: jumpsToAny}, " @"+set)
	default:
		e.registers[long(to)] = loaded{}
	}
}

func (e *expressions) nat(a map[uint16][]byte) {
	const isSource = 0 // NFT_NAT_SNAT
	does := translateDestination
	if long(a[unix.NFTA_NAT_TYPE]) == isSource {
		does = translateSource
	}
	address := func(kind uint16) netip.Addr {
		if a[kind] == nil {
			return netip.Addr{}
		}
		found, _ := netip.AddrFromSlice(e.registers[long(a[kind])].data)
		return found
	}
	port := ""
	if raw := e.registers[long(a[unix.NFTA_NAT_REG_PROTO_MIN])].data; a[unix.NFTA_NAT_REG_PROTO_MIN] != nil && len(raw) == 2 {
		port = fmt.Sprintf(":%d", binary.BigEndian.Uint16(raw))
	}
	to := addresses{address(unix.NFTA_NAT_REG_ADDR_MIN), address(unix.NFTA_NAT_REG_ADDR_MAX)}
	if !to.last.IsValid() {
		to.last = to.first
	}
	e.does(act{does: does, to: to}, port)
}
