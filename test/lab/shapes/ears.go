package shapes

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// markerPrefix begins the payload of whatever is sent, and a number follows, so that it is known again wherever it appears.
const markerPrefix = "shape"

func marker(number uint32) []byte { return binary.BigEndian.AppendUint32([]byte(markerPrefix), number) }

// numberIn finds the number of what was sent in what was received, and where.
func numberIn(received []byte) (number uint32, at int) {
	at = bytes.Index(received, []byte(markerPrefix))
	if at < 0 || at+len(markerPrefix)+4 > len(received) {
		return 0, -1
	}
	return binary.BigEndian.Uint32(received[at+len(markerPrefix):]), at
}

// heard is what somebody's stack took for its own: a packet, reassembled, or an ICMP error.
type heard struct {
	by       string // a party
	from     netip.Addr
	protocol uint8
	body     []byte // above IP's header and IPv6's extension headers
	options  []byte // IPv4's, and IPv6's extension headers as far as the kernel says them
	problem  *icmpError
}

// icmpError is an ICMP error about something that was sent.
type icmpError struct {
	lab.ICMPKind
	mtu             int
	source, quoteTo netip.Addr // as quoted
}

// ears are the raw sockets of all parties, which get whatever a stack delivers, before any protocol judges it.
type ears struct {
	mu    sync.Mutex
	heard map[uint32][]heard
}

func (e *ears) about(number uint32) []heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.heard[number]
}

var icmpOf = [wire.Families]uint8{wire.IPv4: unix.IPPROTO_ICMP, wire.IPv6: unix.IPPROTO_ICMPV6}

// listen opens the sockets of all parties, and has them in the groups, until the test ends.
func listen(t *testing.T, n Network) *ears {
	t.Helper()
	e := &ears{heard: map[uint32][]heard{}}
	var readers sync.WaitGroup
	t.Cleanup(readers.Wait)
	for name, party := range n.Parties {
		for _, family := range n.Families {
			for _, port := range []int{fromPort, toPort} {
				socket, err := openUDP(party, family, port)
				if err != nil {
					t.Fatalf("open UDP port %d at %s: %v", port, name, err)
				}
				t.Cleanup(func() { socket.Close() })
			}
			for _, protocol := range append(protocols, icmpOf[family]) {
				conn, err := open(party, family, protocol)
				if err != nil {
					t.Fatalf("listen for protocol %d at %s: %v", protocol, name, err)
				}
				t.Cleanup(func() { conn.Close() })
				readers.Go(func() { e.hear(conn, heard{by: name, protocol: protocol}, family) })
			}
		}
	}
	return e
}

// openUDP keeps a party from saying that a port is closed.
func openUDP(party *lab.Namespace, family wire.Family, port int) (conn *net.UDPConn, err error) {
	err = party.Do(func() (err error) {
		conn, err = net.ListenUDP([wire.Families]string{"udp4", "udp6"}[family], &net.UDPAddr{Port: port})
		return err
	})
	return conn, err
}

func open(party *lab.Namespace, family wire.Family, protocol uint8) (conn *net.IPConn, err error) {
	network, everywhere := "ip4:", "0.0.0.0"
	if family == wire.IPv6 {
		network, everywhere = "ip6:", "::"
	}
	err = party.Do(func() error {
		config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			failed := raw.Control(func(fd uintptr) { err = prepare(int(fd), party, family, protocol) })
			return errors.Join(failed, err)
		}}
		packets, err := config.ListenPacket(context.Background(), network+strconv.Itoa(int(protocol)), everywhere)
		if err == nil {
			conn = packets.(*net.IPConn)
		}
		return err
	})
	return conn, err
}

// prepare makes room for large datagrams, asks for IPv6's options, and joins the groups on each link.
func prepare(fd int, party *lab.Namespace, family wire.Family, protocol uint8) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20)
	if family == wire.IPv6 {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVHOPOPTS, 1),
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVDSTOPTS, 1))
	}
	if protocol != unix.IPPROTO_UDP {
		return err
	}
	links, failed := party.Netlink().LinkList()
	err = errors.Join(err, failed)
	for _, link := range links {
		if link.Type() == "vxlan" {
			continue // no multicast, not even the kernel's own, goes there
		}
		for _, group := range groups[family] {
			var failed error
			if family == wire.IPv4 {
				failed = unix.SetsockoptIPMreqn(fd, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP,
					&unix.IPMreqn{Multiaddr: group.As4(), Ifindex: int32(link.Attrs().Index)})
			} else {
				failed = unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP,
					&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(link.Attrs().Index)})
			}
			if failed != nil && !errors.Is(failed, unix.ENODEV) && !errors.Is(failed, unix.EINVAL) {
				err = errors.Join(err, fmt.Errorf("join %s on %s: %w", group, link.Attrs().Name, failed))
			}
		}
	}
	return err
}

func (e *ears) hear(conn *net.IPConn, h heard, family wire.Family) {
	received, control := make([]byte, 1<<16), make([]byte, 4096)
	for {
		n, controlled, _, sender, err := conn.ReadMsgIP(received, control)
		if err != nil {
			return // closed
		}
		h.from, _ = netip.AddrFromSlice(sender.IP)
		h.from = h.from.Unmap()
		h.body, h.options = bytes.Clone(received[:n]), bytes.Clone(control[:controlled])
		if family == wire.IPv4 {
			length := int(h.body[0]&0xf) * 4
			h.options, h.body = h.body[20:length], h.body[length:]
		}
		e.keep(h, family)
	}
}

func (e *ears) keep(h heard, family wire.Family) {
	number, at := numberIn(h.body)
	if at < 0 {
		return
	}
	h.problem = nil
	if h.protocol == icmpOf[family] {
		h.problem = icmpErrorIn(h.body, family)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard[number] = append(e.heard[number], h)
}

// icmpErrorIn reads an ICMP message about what was sent.
func icmpErrorIn(message []byte, family wire.Family) *icmpError {
	c := &icmpError{ICMPKind: lab.ICMPKind{Type: message[0], Code: message[1]}}
	quoted := message[8:]
	if family == wire.IPv4 {
		c.mtu = int(binary.BigEndian.Uint16(message[6:]))
		c.source, c.quoteTo = netip.AddrFrom4([4]byte(quoted[12:16])), netip.AddrFrom4([4]byte(quoted[16:20]))
		return c
	}
	c.mtu = int(binary.BigEndian.Uint32(message[4:]))
	c.source, c.quoteTo = netip.AddrFrom16([16]byte(quoted[8:24])), netip.AddrFrom16([16]byte(quoted[24:40]))
	return c
}
