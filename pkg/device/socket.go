package device

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrNoSocketDiag is returned (wrapped) where the kernel can't list UDP sockets, or can't end them (INET_DIAG_DESTROY).
var ErrNoSocketDiag = errors.New("the kernel can't end sockets")

// Socket is a UDP socket that is connected to a peer.
type Socket struct {
	// Cookie is the kernel's number of it, which no other socket gets.
	Cookie uint64
	Peer   netip.AddrPort

	family byte
	id     [lenSocketID]byte // struct inet_diag_sockid
}

// Of linux/inet_diag.h: the lengths of struct inet_diag_sockid and of what is before it in struct inet_diag_msg, and the bit of
// the state that connected sockets have, of UDP as well.
const (
	lenSocketID  = 48
	lenSocketTop = 4
	connected    = 1 << 1
)

// socketRequest is struct inet_diag_req_v2.
type socketRequest struct {
	family byte
	id     [lenSocketID]byte
}

func (r socketRequest) Len() int { return 8 + lenSocketID }

func (r socketRequest) Serialize() []byte { //nolint:misspell // the name is that of an interface
	b := binary.NativeEndian.AppendUint32([]byte{r.family, unix.IPPROTO_UDP, 0, 0}, connected)
	return append(b, r.id[:]...)
}

// UDPSockets lists the connected UDP sockets of both families in the namespace of the calling goroutine's thread.
func UDPSockets() (all []Socket, err error) {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		messages, err := dump(func() ([][]byte, error) {
			request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
			request.AddData(socketRequest{family: family})
			return request.Execute(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		})
		if errors.Is(err, unix.ENOENT) { // no udp_diag
			return nil, fmt.Errorf("list UDP sockets: %w: %w", ErrNoSocketDiag, err)
		}
		if err != nil {
			return nil, fmt.Errorf("list UDP sockets: %w", err)
		}
		for _, m := range messages {
			if len(m) >= lenSocketTop+lenSocketID {
				all = append(all, socketOf(m))
			}
		}
	}
	return all, nil
}

// socketOf reads a struct inet_diag_msg.
func socketOf(m []byte) Socket {
	s := Socket{family: m[0], id: [lenSocketID]byte(m[lenSocketTop:])}
	const dport, dst, cookie = 2, 20, 40
	peer := netip.AddrFrom4([4]byte(s.id[dst:]))
	if s.family == unix.AF_INET6 {
		peer = netip.AddrFrom16([16]byte(s.id[dst:])).Unmap()
	}
	s.Peer = netip.AddrPortFrom(peer, binary.BigEndian.Uint16(s.id[dport:]))
	low, high := binary.NativeEndian.Uint32(s.id[cookie:]), binary.NativeEndian.Uint32(s.id[cookie+4:])
	s.Cookie = uint64(high)<<32 | uint64(low)
	return s
}

// End disconnects the socket: who reads from it is told ECONNABORTED, who writes EDESTADDRREQ. One that is closed, or connected to
// somebody else, is left alone.
func (s Socket) End() error {
	err := again(func() error {
		request := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		request.AddData(socketRequest{family: s.family, id: s.id})
		_, err := request.Execute(unix.NETLINK_INET_DIAG, 0)
		return err
	})
	switch {
	case err == nil || errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("end the UDP socket to %s: %w: %w", s.Peer, ErrNoSocketDiag, err)
	}
	return fmt.Errorf("end the UDP socket to %s: %w", s.Peer, err)
}
