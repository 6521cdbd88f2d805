package netfilter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hookNames are the chains that packets come to, by their hook.
var hookNames = []string{hookPrerouting: "PREROUTING", hookInput: "INPUT", hookForward: "FORWARD", hookOutput: "OUTPUT", hookPostrouting: "POSTROUTING"}

// blob is a table of the older iptables as the kernel gives it.
type blob struct {
	info   tableInfo
	ipv6   bool
	raw    []byte
	names  map[int]string     // of chains, by where their first rule is
	chains map[string][]entry // with the rules of each
}

// entryLayout says where things are in struct ipt_entry, or struct ip6t_entry.
type entryLayout struct {
	address                         int // the length of one: source, destination and their masks come first
	links, proto, inverted, offsets int
	elements                        int
}

var entryLayouts = map[bool]entryLayout{
	false: {address: 4, links: 16, proto: 80, inverted: 83, offsets: 88, elements: 112},
	true:  {address: 16, links: 64, proto: 128, inverted: 132, offsets: 140, elements: 168},
}

const (
	getEntries = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES
	// errorTarget is what an entry that begins a chain has, and the last one.
	errorTarget  = "ERROR"
	commentMatch = "comment"
	targetHeader = 32 // struct xt_entry_target, and struct xt_entry_match
	nameAt       = 2
	revisionAt   = 31

	// The bits of invflags in both structs.
	invertedIn, invertedOut, invertedSource, invertedDestination = 1, 2, 8, 16
)

var errMalformed = errors.New("the kernel's answer is malformed")

// readBlob reads a table.
func readBlob(fd, level int, table string, info *tableInfo) (*blob, error) {
	const header = nameLength + 8 // struct ipt_get_entries, struct ip6t_get_entries
	buffer := make([]byte, header+int(info.TotalSize))
	copy(buffer, table)
	binary.NativeEndian.PutUint32(buffer[nameLength:], info.TotalSize)
	size := uint32(len(buffer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getEntries,
		uintptr(unsafe.Pointer(&buffer[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return nil, errno
	}
	b := &blob{info: *info, ipv6: level == unix.SOL_IPV6, raw: buffer[header:], names: map[int]string{}, chains: map[string][]entry{}}
	return b, b.parse()
}

// entry is one rule, or the head of a chain.
type entry struct {
	at     int
	raw    []byte // the whole
	target []byte
	name   string // of the target
}

// entries cuts the table.
func (b *blob) entries() (all []entry, err error) {
	l := entryLayouts[b.ipv6]
	for at := 0; at < len(b.raw); {
		rest := b.raw[at:]
		if len(rest) < l.elements {
			return nil, errMalformed
		}
		target, next := int(binary.NativeEndian.Uint16(rest[l.offsets:])), int(binary.NativeEndian.Uint16(rest[l.offsets+2:]))
		if next > len(rest) || target < l.elements || target+targetHeader > next {
			return nil, errMalformed
		}
		e := entry{at: at, raw: rest[:next], target: rest[target:next]}
		e.name = text(e.target[nameAt:revisionAt])
		all = append(all, e)
		at += next
	}
	return all, nil
}

// parse finds the chains, whose names stand in entries before them.
func (b *blob) parse() error {
	all, err := b.entries()
	if err != nil {
		return err
	}
	for hook, name := range hookNames {
		if b.info.ValidHooks&(1<<hook) != 0 {
			b.names[int(b.info.HookEntry[hook])] = name
		}
	}
	for _, e := range all {
		if e.name == errorTarget { // struct xt_error_target
			b.names[e.at+len(e.raw)] = text(e.target[targetHeader:])
		}
	}
	chain := ""
	for _, e := range all {
		if name, begins := b.names[e.at]; begins {
			chain = name
		}
		if e.name != errorTarget {
			b.chains[chain] = append(b.chains[chain], e)
		}
	}
	return nil
}

// policyDrops says that the policy of a chain is to drop: its last entry.
func (b *blob) policyDrops(chain string) bool {
	entries := b.chains[chain]
	if len(entries) == 0 || len(entries[len(entries)-1].target) < targetHeader+4 {
		return false
	}
	return verdictsOfXtables[int32(binary.NativeEndian.Uint32(entries[len(entries)-1].target[targetHeader:]))] == drops
}

// rules reads those of a chain.
func (b *blob) rules(chain string) (all []rule) {
	for _, e := range b.chains[chain] {
		all = append(all, b.rule(e))
	}
	return all
}

// rule reads one.
func (b *blob) rule(e entry) rule {
	w := &written{in: ofIptables}
	l := entryLayouts[b.ipv6]
	inverted := e.raw[l.inverted]
	for i, of := range []subject{source, destination} {
		not := inverted&(invertedSource<<i) != 0
		if p := b.prefix(e.raw[i*l.address:], e.raw[(2+i)*l.address:]); p.IsValid() && p.Bits() > 0 {
			w.asks(match{of: of, not: not, prefix: p})
		}
	}
	for i, of := range []subject{comesBy, leavesBy} {
		link, mask := e.raw[l.links+i*unix.IFNAMSIZ:][:unix.IFNAMSIZ], e.raw[l.links+(2+i)*unix.IFNAMSIZ:][:unix.IFNAMSIZ]
		name := text(link)
		compared := bytes.Count(mask, []byte{0xff}) // without the plus that stands for the rest, or with the byte that ends the name
		if compared > 0 && name != "" {
			w.asks(match{of: of, not: inverted&(invertedIn<<i) != 0, name: name[:min(len(name), compared)], begins: compared <= len(name)})
		}
	}
	if proto := binary.NativeEndian.Uint16(e.raw[l.proto:]); proto != 0 {
		w.some(map[uint16]string{unix.IPPROTO_TCP: "-p tcp", unix.IPPROTO_UDP: "-p udp"}[proto])
	}
	const fragments, goes = 1, 2 // IPT_F_FRAG, IPT_F_GOTO; in IPv6 the first has another meaning, and IP6T_F_GOTO is twice as much
	flags := e.raw[l.inverted-1]
	if flags&fragments != 0 && !b.ipv6 {
		w.some("-f")
	}
	w.goes = flags&goes != 0 && !b.ipv6 || flags&(2*goes) != 0 && b.ipv6
	for _, m := range e.matches(b.ipv6) {
		w.extension(text(m[nameAt:revisionAt]), uint32(m[revisionAt]), m[targetHeader:])
	}
	b.target(w, e)
	return w.rule
}

// matches are its extensions, each with its header. What is left out can only make the packets fewer.
func (e entry) matches(ipv6 bool) (all [][]byte) {
	for rest := e.raw[entryLayouts[ipv6].elements : len(e.raw)-len(e.target)]; len(rest) >= targetHeader; {
		size := int(binary.NativeEndian.Uint16(rest))
		if size < targetHeader || size > len(rest) {
			break
		}
		all, rest = append(all, rest[:size]), rest[size:]
	}
	return all
}

// target reads what a rule does: by a name that is empty, a verdict or a jump.
func (b *blob) target(w *written, e entry) {
	info := e.target[targetHeader:]
	if e.name != "" {
		w.target(e.name, uint32(e.target[revisionAt]), info, b.ipv6)
		return
	}
	if len(info) < 4 {
		return
	}
	to := int32(binary.NativeEndian.Uint32(info))
	switch name := b.names[int(to)]; {
	case to < 0:
		w.does(act{does: verdictsOfXtables[to]}, "")
	case name != "":
		w.does(act{does: jumps, chain: name}, "")
	case int(to) != e.at+len(e.raw): // else it goes on, as a rule without a target
		w.does(act{does: translateUnknown}, fmt.Sprintf(" %d", to))
	}
}

// prefix is that of an address and a mask; invalid: the mask is none of a prefix's.
func (b *blob) prefix(address, mask []byte) netip.Prefix {
	length := entryLayouts[b.ipv6].address
	a, _ := netip.AddrFromSlice(address[:length])
	ones := prefixLength(mask[:length])
	if ones < 0 {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, ones)
}
