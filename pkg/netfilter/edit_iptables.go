package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// xtablesLock is the file by which everybody who writes a table of the older iptables keeps the others away meanwhile: each
// reads the whole table and writes it anew, so that one of two at the same time would undo what the other did.
const xtablesLock = "/run/xtables.lock"

// legacyTable is a table of the older iptables.
type legacyTable struct {
	iptables
	table string
	only  []string // the chains whose rules are listed; nil: all
	lock  string   // the file that is locked while the table is edited
	blob  *blob    // as listed last
}

func (t *legacyTable) String() string { return t.name() + " table " + t.table }

// keep implements editable.
func (t *legacyTable) keep() (done func(), err error) { return lockXtables(t.lock) }

// lockXtables does as iptables does, which makes the file where there is none.
func lockXtables(file string) (unlock func(), err error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of iptables, which a container has to share with the host: %w", err)
	}
	const attempts, pause = 20, 50 * time.Millisecond
	for range attempts {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			break
		}
		time.Sleep(pause)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s, which another iptables has: %w", file, err)
	}
	return func() { _ = f.Close() }, nil
}

// list implements editable.
func (t *legacyTable) list() (l listing, err error) {
	t.end() // read it anew
	if t.blob = nil; !slices.Contains(t.has(), t.table) {
		return l, nil
	}
	if t.blob, err = t.iptables.table(t.table); err != nil {
		return l, err
	}
	for _, name := range t.blob.names {
		if !slices.Contains(hookNames, name) && name != errorTarget {
			l.chains = append(l.chains, name)
		}
	}
	for chain, entries := range t.blob.chains {
		if t.only != nil && !slices.Contains(t.only, chain) {
			continue
		}
		for _, e := range entries[:max(0, len(entries)-1)] { // the last is the chain's policy
			l.rules = append(l.rules, placed{chain, uint64(e.at), t.blob.rule(e)})
		}
	}
	slices.Sort(l.chains)
	slices.SortFunc(l.rules, func(a, b placed) int { return int(a.at) - int(b.at) })
	return l, nil
}

// apply implements editable.
func (t *legacyTable) apply(r change) error {
	next, err := t.blob.after(r)
	if err != nil {
		return err
	}
	return t.withSocket(next.write)
}

// replacement is a table that takes the place of another.
type replacement struct {
	header replaceHeader
	raw    []byte
	kept   []int // of each entry, which one of the other it was; isNew: none
}

// isNew is an entry that the other table has not.
const isNew = -1

// replaceHeader is struct ipt_replace, and struct ip6t_replace, before the entries.
type replaceHeader struct {
	Name                         [nameLength]byte
	ValidHooks, NumEntries, Size uint32
	HookEntry, Underflow         [5]uint32
	NumCounters                  uint32
	Counters                     *counters
}

// counters is struct xt_counters.
type counters struct{ packets, bytes uint64 }

// after is the table after a change.
func (b *blob) after(r change) (*replacement, error) {
	all, err := b.entries()
	if err != nil {
		return nil, err
	}
	next := &replacement{header: replaceHeader{Name: b.info.Name, ValidHooks: b.info.ValidHooks, NumCounters: uint32(len(all))}}
	// Where what was at some place is now. What is before a rule that stays leads on to that one. A chain that gets rules
	// begins with those; when it had none, it began with its policy.
	moved, policies, chain := map[int]int{}, map[int]int{}, ""
	chains, rules := setOf(r.chains), map[int]bool{}
	for _, p := range r.rules {
		rules[int(p.at)] = true
	}
	for i, e := range all {
		if e.name == errorTarget {
			chain = text(e.target[targetHeader:])
		} else if name, begins := b.names[e.at]; begins {
			chain = name
		}
		if chains[chain] {
			continue // a place that nothing may lead to any more
		}
		moved[e.at] = len(next.raw)
		if chain == r.into && b.names[e.at] == chain && e.name != errorTarget {
			next.insert(r.accepts, b.ipv6)
		}
		policies[e.at] = len(next.raw)
		if !rules[e.at] {
			next.raw, next.kept = append(next.raw, e.raw...), append(next.kept, i)
		}
	}
	moved[len(b.raw)] = len(next.raw)
	next.header.NumEntries, next.header.Size = uint32(len(next.kept)), uint32(len(next.raw))
	for hook := range b.info.HookEntry {
		next.header.HookEntry[hook] = uint32(moved[int(b.info.HookEntry[hook])])
		next.header.Underflow[hook] = uint32(policies[int(b.info.Underflow[hook])])
	}
	return next, next.lead(b.ipv6, moved)
}

// insert appends accepts, each with its comment.
func (n *replacement) insert(accepts []accept, ipv6 bool) {
	const comment, verdict = targetHeader + 256, targetHeader + 8 // struct xt_comment_info; struct xt_standard_target, with what fills it up
	l := entryLayouts[ipv6]
	for _, a := range accepts {
		raw := make([]byte, l.elements+comment+verdict)
		at := l.address * map[subject]int{source: 0, destination: 1}[a.of]
		copy(raw[at:], a.pods.Addr().AsSlice())
		copy(raw[at+2*l.address:], net.CIDRMask(a.pods.Bits(), 8*l.address))
		binary.NativeEndian.PutUint16(raw[l.offsets:], uint16(l.elements+comment))
		binary.NativeEndian.PutUint16(raw[l.offsets+2:], uint16(len(raw)))
		match, target := raw[l.elements:], raw[l.elements+comment:]
		binary.NativeEndian.PutUint16(match, comment)
		copy(match[nameAt:], commentMatch)
		copy(match[targetHeader:], ForwardComment)
		binary.NativeEndian.PutUint16(target, verdict)
		accepted := int32(acceptedByXtables)
		binary.NativeEndian.PutUint32(target[targetHeader:], uint32(accepted))
		n.raw, n.kept = append(n.raw, raw...), append(n.kept, isNew)
	}
}

// lead has what leads somewhere lead to where that is now.
func (n *replacement) lead(ipv6 bool, moved map[int]int) error {
	entries, err := (&blob{ipv6: ipv6, raw: n.raw}).entries()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.name != "" || len(e.target) < targetHeader+4 {
			continue
		}
		verdict := e.target[targetHeader:] // of struct xt_standard_target
		to := int32(binary.NativeEndian.Uint32(verdict))
		if to < 0 {
			continue
		}
		now, there := moved[int(to)]
		if !there {
			return errors.New("a rule that stays leads to a chain that goes")
		}
		binary.NativeEndian.PutUint32(verdict, uint32(now))
	}
	return nil
}

const (
	replaceTable = 64 // IPT_SO_SET_REPLACE, IP6T_SO_SET_REPLACE
	addCounters  = 65 // IPT_SO_SET_ADD_COUNTERS, IP6T_SO_SET_ADD_COUNTERS
)

// write puts the table in the place of the other, and then adds what was counted to its rules.
func (n *replacement) write(fd, level int) error {
	counted := make([]counters, n.header.NumCounters)
	if len(counted) == 0 || len(n.raw) > math.MaxInt32 {
		return errMalformed
	}
	var pins runtime.Pinner // the kernel writes there
	defer pins.Unpin()
	pins.Pin(&counted[0])
	n.header.Counters = &counted[0]
	header := unsafe.Slice((*byte)(unsafe.Pointer(&n.header)), unsafe.Sizeof(n.header))
	err := setOption(fd, level, replaceTable, append(slices.Clone(header), n.raw...))
	if errors.Is(err, unix.EAGAIN) { // it has another number of entries
		return errChanged
	}
	if err != nil {
		return err
	}
	const first = 40 // of the counters in struct xt_counters_info
	info := make([]byte, first, first+16*len(n.kept))
	copy(info, n.header.Name[:])
	binary.NativeEndian.PutUint32(info[nameLength:], uint32(len(n.kept)))
	for _, was := range n.kept {
		var c counters
		if was != isNew {
			c = counted[was]
		}
		info = binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(info, c.packets), c.bytes)
	}
	if err := setOption(fd, level, addCounters, info); err != nil {
		return fmt.Errorf("keep what rules have counted: %w", err)
	}
	return nil
}

func setOption(fd, level, option int, value []byte) error {
	_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&value[0])), uintptr(len(value)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
