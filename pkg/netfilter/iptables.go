package netfilter

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// iptables finds rules of the older iptables.
type iptables struct {
	tables *os.File // the names of its tables, kept open, since it is read all the time; nil: not there yet
}

// hasNAT reports whether there is a nat table.
func (i *iptables) hasNAT() bool {
	if i.tables == nil {
		f, err := os.Open("/proc/thread-self/net/ip_tables_names")
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
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("read iptables: %w", err)
	}
	defer unix.Close(fd)
	info := tableInfo{}
	copy(info.Name[:], "nat")
	if err := getTableInfo(fd, &info); err != nil {
		return "", fmt.Errorf("read iptables: %w", err)
	}
	if info.hasRules() {
		return "iptables table nat", nil
	}
	return "", nil
}

const (
	getInfo    = 64 // IPT_SO_GET_INFO
	nameLength = 32 // XT_TABLE_MAXNAMELEN
	maxTables  = 16 // the kernel has five
)

// tableInfo is struct ipt_getinfo.
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

func getTableInfo(fd int, info *tableInfo) error {
	size := uint32(unsafe.Sizeof(*info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, getInfo,
		uintptr(unsafe.Pointer(info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
