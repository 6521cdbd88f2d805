package netfilter

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// iptables has the rules of the older iptables, or of the older ip6tables.
type iptables struct {
	family uint8
	tables *os.File         // the names of its tables, kept open, since it is read all the time; nil: not there yet
	newest tableInfo        // of the nat table now
	info   tableInfo        // and at the newest look
	read   time.Time        // when that was
	blobs  map[string]*blob // the tables of this look
}

// natTable is the one that translates.
const natTable = "nat"

// ipv6 says that it is about ip6tables.
func (i *iptables) ipv6() bool { return i.family == unix.AF_INET6 }

func (i *iptables) namesPath() string {
	if i.ipv6() {
		return "/proc/thread-self/net/ip6_tables_names"
	}
	return "/proc/thread-self/net/ip_tables_names"
}

func (i *iptables) name() string {
	if i.ipv6() {
		return "ip6tables"
	}
	return "iptables"
}

// has are the names of the tables that are there. Others are not asked for: the question would make them.
func (i *iptables) has() []string {
	if i.tables == nil {
		f, err := os.Open(i.namesPath())
		if err != nil {
			return nil // no such file: no such tables
		}
		i.tables = f
	}
	names := make([]byte, maxTables*nameLength)
	n, err := i.tables.ReadAt(names, 0)
	if err != nil && err != io.EOF {
		i.close() // the module is gone
		return nil
	}
	return strings.Fields(string(names[:n]))
}

func (i *iptables) close() {
	if i.tables != nil {
		_ = i.tables.Close()
		i.tables = nil
	}
}

// Of a small table the rules are read each time. A large one has changed if its size has, or is read after readLarge: the
// kernel has no better sign.
const (
	smallTable = 1 << 16
	readLarge  = 30 * time.Second
)

// changed implements ruleset. It looks at the nat table.
func (i *iptables) changed(now time.Time) (bool, error) {
	i.newest = tableInfo{}
	if slices.Contains(i.has(), natTable) {
		if err := i.withSocket(func(fd, level int) error { return getTableInfo(fd, level, natTable, &i.newest) }); err != nil {
			return false, fmt.Errorf("read %s: %w", i.name(), err)
		}
	}
	return i.newest != i.info || i.newest.hasRules() && (i.newest.isSmall() || now.Sub(i.read) >= readLarge), nil
}

// pause implements ruleset.
func (i *iptables) pause() time.Duration {
	if i.newest.isSmall() {
		return lookAgain
	}
	return readLarge
}

// begin implements ruleset.
func (i *iptables) begin(now time.Time) { i.info, i.read = i.newest, now }

// end implements ruleset.
func (i *iptables) end() { i.blobs = nil }

// withSocket lends a socket that the tables are asked for by. A raw one, as iptables has it, takes CAP_NET_RAW; any socket
// of the family does.
func (i *iptables) withSocket(do func(fd, level int) error) error {
	fd, err := unix.Socket(int(i.family), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if i.ipv6() {
		return do(fd, unix.SOL_IPV6)
	}
	return do(fd, unix.SOL_IP)
}

// bases implements ruleset.
func (i *iptables) bases(families []int, all bool) (found []base, err error) {
	if !slices.Contains(families, int(i.family)) {
		return nil, nil
	}
	for _, table := range i.has() {
		if table != natTable && !all {
			continue
		}
		b, err := i.table(table)
		if err != nil {
			return nil, err
		}
		for hook, name := range hookNames {
			if b.info.ValidHooks&(1<<hook) != 0 {
				found = append(found, base{chainID{i.name(), i.family, table, name}, uint32(hook), table == natTable, b.policyDrops(name)})
			}
		}
	}
	return found, nil
}

// rules implements ruleset.
func (i *iptables) rules(c chainID) ([]rule, error) {
	b, err := i.table(c.table)
	if err != nil {
		return nil, err
	}
	return b.rules(c.name), nil
}

// siblings implements ruleset: nothing leads to more than one chain.
func (i *iptables) siblings(chainID) ([]chainID, error) { return nil, nil }

// table reads a table once a look.
func (i *iptables) table(name string) (*blob, error) {
	if b := i.blobs[name]; b != nil {
		return b, nil
	}
	var b *blob
	err := i.withSocket(func(fd, level int) (err error) {
		for range 5 { // EAGAIN: the table has changed in between
			var info tableInfo
			if err = getTableInfo(fd, level, name, &info); err == nil {
				b, err = readBlob(fd, level, name, &info)
			}
			if !errors.Is(err, unix.EAGAIN) {
				break
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read %s table %s: %w", i.name(), name, err)
	}
	if i.blobs == nil {
		i.blobs = map[string]*blob{}
	}
	i.blobs[name] = b
	return b, nil
}

const (
	getInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	nameLength = 32 // XT_TABLE_MAXNAMELEN
	maxTables  = 16 // the kernel has five
)

// tableInfo is struct ipt_getinfo, and struct ip6t_getinfo.
type tableInfo struct {
	Name                  [nameLength]byte
	ValidHooks            uint32
	HookEntry, Underflow  [5]uint32
	NumEntries, TotalSize uint32
}

func (i *tableInfo) isSmall() bool { return i.TotalSize <= smallTable }

// hasRules says whether a chain that packets come to begins with anything but its
// policy. Other chains are for rules to jump to.
func (i *tableInfo) hasRules() bool {
	for hook := range i.HookEntry {
		if i.ValidHooks&(1<<hook) != 0 && i.HookEntry[hook] != i.Underflow[hook] {
			return true
		}
	}
	return false
}

func getTableInfo(fd, level int, table string, info *tableInfo) error {
	copy(info.Name[:], table)
	size := uint32(unsafe.Sizeof(*info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
