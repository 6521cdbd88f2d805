package netfilter

import (
	"bytes"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// findInIptables says where a rule of the older iptables translates; empty: nowhere.
// Its nat table is asked for only if it is there: the question would make it.
func findInIptables() (string, error) {
	tables, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if err != nil || !bytes.Contains(append([]byte("\n"), tables...), []byte("\nnat\n")) {
		return "", nil //nolint:nilerr // no such file: no such tables
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
