package device

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Listener is a socket that gets packets of any peer: of TCP one that listens, of UDP one that is bound and not connected.
type Listener struct {
	// At is the address and port; the unspecified address stands for all addresses of its family.
	At netip.AddrPort
	// Both says that an IPv6 socket of all addresses gets IPv4 packets as well.
	Both bool
	// UID is the user of the process that has opened the socket.
	UID uint32
	// Ifindex is the link, or the VRF, that the socket is bound to; 0: to none.
	Ifindex uint32
}

// Of linux/inet_diag.h: the length of struct inet_diag_msg, where its user is, and the attribute of IPV6_V6ONLY.
const (
	lenSocketMessage = 72
	atSocketUID      = 64
	attributeV6Only  = 11
)

// listening are the states of sockets that get packets of any peer, as bits of struct inet_diag_req_v2.
var listening = map[byte]uint32{unix.IPPROTO_TCP: 1 << 10, unix.IPPROTO_UDP: 1 << 7}

// listenerRequest is struct inet_diag_req_v2.
type listenerRequest struct{ family, protocol byte }

func (r listenerRequest) Len() int { return 8 + lenSocketID }

func (r listenerRequest) Serialize() []byte { //nolint:misspell // the name is that of an interface
	b := binary.NativeEndian.AppendUint32([]byte{r.family, r.protocol, 0, 0}, listening[r.protocol])
	return append(b, make([]byte, lenSocketID)...)
}

// Listeners lists the listeners of TCP or UDP, of both families, in the namespace of the calling goroutine's thread.
func Listeners(protocol byte) (all []Listener, err error) {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		messages, err := dump(func() ([][]byte, error) {
			request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
			request.AddData(listenerRequest{family, protocol})
			return request.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		})
		if err != nil {
			return nil, fmt.Errorf("list listening sockets: %w", err)
		}
		for _, m := range messages {
			if len(m) < lenSocketMessage || m[0] != family {
				continue
			}
			l, err := listenerOf(m)
			if err != nil {
				return nil, err
			}
			all = append(all, l)
		}
	}
	return all, nil
}

// listenerOf reads a struct inet_diag_msg and its attributes.
func listenerOf(m []byte) (l Listener, err error) {
	id := m[lenSocketTop:]
	const src, link = 4, 36
	address := netip.AddrFrom4([4]byte(id[src:]))
	if m[0] == unix.AF_INET6 {
		address = netip.AddrFrom16([16]byte(id[src:])).Unmap()
	}
	l.At, l.UID = netip.AddrPortFrom(address, binary.BigEndian.Uint16(id)), binary.NativeEndian.Uint32(m[atSocketUID:])
	l.Ifindex = binary.NativeEndian.Uint32(id[link:])
	if !address.Is6() || !address.IsUnspecified() {
		return l, nil
	}
	attributes, err := nl.ParseRouteAttr(m[lenSocketMessage:])
	if err != nil {
		return l, fmt.Errorf("read the attributes of a socket at %s: %w", l.At, err)
	}
	l.Both = !isV6Only(attributes)
	return l, nil
}

func isV6Only(attributes []syscall.NetlinkRouteAttr) bool {
	for _, a := range attributes {
		if a.Attr.Type == attributeV6Only {
			return len(a.Value) > 0 && a.Value[0] != 0
		}
	}
	return false
}
