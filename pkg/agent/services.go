package agent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// serviceChain is a chain that kube-proxy makes in its iptables mode, and
// serviceTable the table of its nftables mode.
const (
	serviceChain = "KUBE-SERVICES"
	serviceTable = "kube-proxy"
)

// findServiceRules says where rules stand that translate Services' addresses;
// empty: nowhere. It runs no program.
func findServiceRules() (string, error) {
	where, err := findInNftables()
	if where != "" {
		return where, nil
	}
	legacy, legacyErr := findInIptables()
	return legacy, errors.Join(err, legacyErr)
}

// findInNftables lists the chains of nftables, which holds the rules of the
// newer iptables as well.
func findInNftables() (string, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil // a kernel without nftables
	}
	if err != nil {
		return "", fmt.Errorf("list nftables chains: %w", err)
	}
	for _, m := range messages {
		if where := serviceChainIn(m); where != "" {
			return where, nil
		}
	}
	return "", nil
}

// serviceChainIn reads one chain's message.
func serviceChainIn(m []byte) string {
	if len(m) < nl.SizeofNfgenmsg {
		return ""
	}
	attrs, err := nl.ParseRouteAttr(m[nl.SizeofNfgenmsg:])
	if err != nil {
		return ""
	}
	var table, chain string
	for _, a := range attrs {
		switch a.Attr.Type & nl.NLA_TYPE_MASK {
		case unix.NFTA_CHAIN_TABLE:
			table = unix.ByteSliceToString(a.Value)
		case unix.NFTA_CHAIN_NAME:
			chain = unix.ByteSliceToString(a.Value)
		}
	}
	if chain == serviceChain || table == serviceTable {
		return fmt.Sprintf("nftables table %s, chain %s", table, chain)
	}
	return ""
}

// findInIptables looks through the nat table of the older iptables.
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
	rules, err := natRules(fd)
	if err != nil {
		return "", fmt.Errorf("read iptables: %w", err)
	}
	if bytes.Contains(rules, []byte(serviceChain+"\x00")) {
		return "iptables table nat, chain " + serviceChain, nil
	}
	return "", nil
}

const (
	getInfo    = 64 // IPT_SO_GET_INFO
	getEntries = 65 // IPT_SO_GET_ENTRIES
	nameLength = 32 // XT_TABLE_MAXNAMELEN
)

// tableInfo is struct ipt_getinfo.
type tableInfo struct {
	Name                  [nameLength]byte
	ValidHooks            uint32
	HookEntry, Underflow  [5]uint32
	NumEntries, TotalSize uint32
}

// natRules returns the rules of the nat table as the kernel keeps them; the names
// of chains stand in them as text.
func natRules(fd int) ([]byte, error) {
	info := tableInfo{}
	copy(info.Name[:], "nat")
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info))
	if err := getsockopt(fd, getInfo, raw); err != nil {
		return nil, err
	}
	// struct ipt_get_entries: name, size, padding, the entries.
	const header = nameLength + 8
	buf := make([]byte, header+int(info.TotalSize))
	copy(buf, "nat")
	*(*uint32)(unsafe.Pointer(&buf[nameLength])) = info.TotalSize
	if err := getsockopt(fd, getEntries, buf); err != nil {
		return nil, err
	}
	return buf[header:], nil
}

func getsockopt(fd, option int, buf []byte) error {
	size := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_IP, uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
