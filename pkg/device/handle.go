package device

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrNotFound is returned when a link that was asked for does not exist.
var ErrNotFound = errors.New("not found")

// maxDumps bounds how often an interrupted dump is repeated. On a node where links come and go all the time a few
// interruptions in a row are normal; this many are not.
const maxDumps = 20

// Handle is a netlink socket in one network namespace. Several goroutines may call its methods.
type Handle struct {
	nl    *netlink.Handle
	lists *nl.SocketHandle // for lists
}

// Open returns a Handle in the namespace of the calling goroutine's thread.
func Open() (*Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	lists, err := openStrict()
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open netlink socket for lists: %w", err)
	}
	return &Handle{nl: h, lists: lists}, nil
}

// OpenIn returns a Handle in the namespace ns, which may be closed afterwards.
func OpenIn(ns *NetNS) (*Handle, error) {
	var h *Handle
	err := ns.Do(func() (err error) {
		h, err = Open()
		return err
	})
	return h, err
}

// Close closes the sockets.
func (h *Handle) Close() {
	h.nl.Close()
	h.lists.Close()
}

// dump repeats list while the kernel reports that entries changed meanwhile.
func dump[T any](list func() ([]T, error)) ([]T, error) {
	var (
		items []T
		err   error
	)
	for range maxDumps {
		items, err = list()
		if !interrupted(err) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return items, nil
}

// again repeats a request that a signal has interrupted.
func again(request func() error) error {
	var err error
	for range maxDumps {
		if err = request(); !interrupted(err) {
			break
		}
	}
	return err
}

func interrupted(err error) bool {
	return errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EINTR)
}

func isErrno(err error, errnos ...syscall.Errno) bool {
	for _, errno := range errnos {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// prefix converts n, which may be nil: then the result is invalid.
func prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(addr(n.IP), ones)
}

func addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

func family(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}
