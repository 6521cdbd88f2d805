package netfilter

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// iptables finds rules of the older iptables, or of the older ip6tables.
type iptables struct {
	family uint8
	tables *os.File // the names of its tables, kept open, since it is read all the time; nil: not there yet
}

// ipv6 says that it is about ip6tables.
func (i *iptables) ipv6() bool { return i.family == unix.AF_INET6 }

func (i *iptables) namesPath() string {
	if i.ipv6() {
		return "/proc/thread-self/net/ip6_tables_names"
	}
	return "/proc/thread-self/net/ip_tables_names"
}

// hasNAT reports whether there is a nat table.
func (i *iptables) hasNAT() bool {
	if i.tables == nil {
		f, err := os.Open(i.namesPath())
		if err != nil {
			return false // no such file: no such tables
		}
		i.tables = f
	}
	names := append([]byte("\n"), make([]byte, maxTables*nameLength)...)
	n, err := i.tables.ReadAt(names[1:], 0)
	if err != nil && err != io.EOF {
		i.close() // the module is gone
		return false
	}
	return bytes.Contains(names[:1+n], []byte("\nnat\n"))
}

func (i *iptables) close() {
	if i.tables != nil {
		_ = i.tables.Close()
		i.tables = nil
	}
}

// find says where a rule translates; empty: nowhere. The nat table is asked for only if it is there: the question would
// make it.
func (i *iptables) find() (string, error) {
	if !i.hasNAT() {
		return "", nil
	}
	// A raw socket, as iptables has it, takes CAP_NET_RAW; any socket of the family does.
	fd, err := unix.Socket(int(i.family), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("read iptables: %w", err)
	}
	defer unix.Close(fd)
	info := tableInfo{}
	copy(info.Name[:], "nat")
	name, level := "iptables", unix.SOL_IP
	if i.ipv6() {
		name, level = "ip6tables", unix.SOL_IPV6
	}
	if err := getTableInfo(fd, level, &info); err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	if info.hasRules() {
		return name + " table nat", nil
	}
	return "", nil
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

func getTableInfo(fd, level int, info *tableInfo) error {
	size := uint32(unsafe.Sizeof(*info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
