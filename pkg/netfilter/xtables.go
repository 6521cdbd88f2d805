package netfilter

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// Extensions of iptables, which both of its variants hand to the kernel in the same form: structs of the machine's byte order.

const localType = 1 << 2 // XT_ADDRTYPE_LOCAL

// extension reads a match.
func (w *written) extension(name string, revision uint32, info []byte) {
	word := func(at int) uint32 { return binary.NativeEndian.Uint32(info[at:]) }
	short := func(at int) uint16 { return binary.NativeEndian.Uint16(info[at:]) }
	switch {
	case name == "addrtype" && len(info) >= 8: // struct xt_addrtype_info_v1, or struct xt_addrtype_info
		inverted := [2]bool{word(4)&1 != 0, word(4)&2 != 0}
		if revision == 0 && len(info) >= 12 {
			inverted = [2]bool{word(4) != 0, word(8) != 0}
		}
		for i, of := range []subject{sourceLocal, destinationLocal} {
			switch kinds := short(2 * i); {
			case kinds == localType:
				w.asks(match{of: of, not: inverted[i]})
			case kinds != 0:
				w.some(fmt.Sprintf("%s %#x", words[of][ofIptables], kinds))
			}
		}
	case name == "mark" && revision == 1 && len(info) >= 9: // struct xt_mark_mtinfo1
		w.asks(match{of: markBits, bits: word(0) & word(4), not: info[8] != 0})
	case (name == "tcp" || name == "udp") && len(info) >= 8 && (short(4) != 0 || short(6) != 0xffff): // struct xt_tcp, struct xt_udp
		w.some(fmt.Sprintf("-m %s --dport %s", name, ports(short(4), short(6))))
	case name == commentMatch:
		w.comment = text(info)
		w.also("-m " + name)
	default:
		w.some("-m " + name)
	}
}

func ports(first, last uint16) string {
	if first == last {
		return fmt.Sprint(first)
	}
	return fmt.Sprintf("%d:%d", first, last)
}

// Verdicts of rules in tables of iptables.
const acceptedByXtables = -2 // -NF_ACCEPT - 1

var verdictsOfXtables = map[int32]deed{-1: drops, acceptedByXtables: accepts, -4: queues, -5: returns}

// harmless are targets that translate nothing.
var harmless = []string{
	"LOG", "NFLOG", "ULOG", "TRACE", "CONNSECMARK", "SECMARK", "CLASSIFY", "SET", "NOTRACK", "CT", "TCPMSS", "AUDIT", "DSCP", "TOS",
	"TTL", "HL", "CHECKSUM", "TEE", "IDLETIMER", "LED", "RATEEST", "TPROXY", "TCPOPTSTRIP", "SYNPROXY",
}

// target reads a target of a family's table.
func (w *written) target(name string, revision uint32, info []byte, ipv6 bool) {
	switch name {
	case "REJECT":
		w.does(act{does: rejects}, "")
	case "NFQUEUE":
		w.does(act{does: queues}, "")
	case "MASQUERADE":
		w.does(act{does: masquerade}, "")
	case "REDIRECT":
		w.does(act{does: redirect}, "")
	case "SNAT":
		to, port := natRange(revision, info, ipv6)
		w.does(act{does: translateSource, to: to}, port)
	case "DNAT":
		to, port := natRange(revision, info, ipv6)
		w.does(act{does: translateDestination, to: to}, port)
	case "MARK":
		w.does(act{does: setsMark, bits: markOf(revision, info)}, "")
	case "CONNMARK":
		w.does(connmarkOf(revision, info), "")
	default:
		if slices.Contains(harmless, name) {
			w.also("-j " + name)
		} else {
			w.does(act{does: translateUnknown}, " "+name)
		}
	}
}

// natRange reads what addresses become, and the port for people.
func natRange(revision uint32, info []byte, ipv6 bool) (to addresses, port string) {
	const mapsAddresses, mapsPorts = 1, 2 // NF_NAT_RANGE_MAP_IPS, NF_NAT_RANGE_PROTO_SPECIFIED
	flags, first, length, step, portAt := 0, 4, 4, 16, 36
	if ipv6 {
		length = 16
	}
	if revision == 0 && !ipv6 { // struct nf_nat_ipv4_multi_range_compat
		flags, first, step, portAt = 4, 8, 4, 16
	}
	if len(info) < portAt+2 {
		return addresses{}, ""
	}
	bits := binary.NativeEndian.Uint32(info[flags:])
	if bits&mapsPorts != 0 {
		port = fmt.Sprintf(":%d", binary.BigEndian.Uint16(info[portAt:]))
	}
	if bits&mapsAddresses == 0 {
		return addresses{}, port
	}
	to.first, _ = netip.AddrFromSlice(info[first : first+length])
	to.last, _ = netip.AddrFromSlice(info[first+step : first+step+length])
	return to, port
}

// markOf are the bits that MARK may set.
func markOf(revision uint32, info []byte) uint32 {
	if revision == 2 && len(info) >= 8 { // struct xt_mark_tginfo2
		return binary.NativeEndian.Uint32(info)
	}
	return ^uint32(0)
}

// connmarkOf is what CONNMARK does: it sets a connection's mark, or restores a packet's from there. That it saves what a packet has is
// nothing new.
func connmarkOf(revision uint32, info []byte) act {
	const sets, saves = 0, 1                       // XT_CONNMARK_SET, XT_CONNMARK_SAVE
	mode := map[uint32]int{1: 12, 2: 14}[revision] // in struct xt_connmark_tginfo1, struct xt_connmark_tginfo2
	if mode == 0 || len(info) <= mode {
		return act{does: setsMark, bits: ^uint32(0)}
	}
	switch info[mode] {
	case sets:
		return act{does: keepsMark, bits: binary.NativeEndian.Uint32(info)}
	case saves:
		return act{}
	}
	return act{does: restoresMark, bits: binary.NativeEndian.Uint32(info[4:])}
}
