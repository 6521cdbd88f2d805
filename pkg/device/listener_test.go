package device

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestListeners finds sockets of any peer, of both families, and no connected ones.
func TestListeners(t *testing.T) {
	inside(t)
	both := func(_, _ string, c syscall.RawConn) error { // where Go itself decides that, it goes by the namespace in which it first did
		return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0) })
	}
	for _, tt := range []struct {
		network, bind string
		want          Listener
	}{
		{"tcp4", "127.0.0.1:8001", Listener{}}, {"tcp4", "0.0.0.0:8002", Listener{}}, {"tcp6", "[::1]:8003", Listener{}},
		{"tcp6", "[::]:8004", Listener{Both: true}}, {"tcp6", "[::]:8005", Listener{}},
		{"udp4", "127.0.0.1:8001", Listener{}}, {"udp4", "0.0.0.0:8002", Listener{}}, {"udp6", "[::1]:8003", Listener{}},
		{"udp6", "[::]:8004", Listener{Both: true}}, {"udp6", "[::]:8005", Listener{}},
	} {
		tt.want.At = netip.MustParseAddrPort(tt.bind)
		config := net.ListenConfig{}
		if tt.want.Both {
			config.Control = both
		}
		protocol := byte(unix.IPPROTO_UDP)
		if tt.network[:3] == "tcp" {
			protocol = unix.IPPROTO_TCP
			l, err := config.Listen(context.Background(), tt.network, tt.bind)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		} else {
			p, err := config.ListenPacket(context.Background(), tt.network, tt.bind)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close() })
		}
		all, err := Listeners(protocol)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(all, tt.want) {
			t.Errorf("%s %s: %+v are not %+v", tt.network, tt.bind, all, tt.want)
		}
	}
	mapped := connectUDP(t, "127.0.0.1:7")
	name, err := unix.Getsockname(mapped)
	if err != nil {
		t.Fatal(err)
	}
	connected := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*unix.SockaddrInet4).Port))
	all, err := Listeners(unix.IPPROTO_UDP)
	if err != nil || len(all) != 5 || slices.ContainsFunc(all, func(l Listener) bool { return l.At == connected }) {
		t.Errorf("beside a connected socket at %s: %+v, %v", connected, all, err)
	}
}

// A socket's user is the one that has opened it.
func TestListenerUser(t *testing.T) {
	m := make([]byte, lenSocketMessage)
	m[0], m[atSocketUID], m[atSocketUID+1] = unix.AF_INET, 0xe8, 3
	l, err := listenerOf(m)
	if err != nil || l.UID != 1000 {
		t.Errorf("%+v, %v", l, err)
	}
}

// A socket that is bound to a link says to which.
func TestListenerOfALink(t *testing.T) {
	inside(t)
	for index, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE, "lo") }), err)
		}}
		var (
			socket io.Closer
			err    error
		)
		if index == 0 {
			socket, err = config.Listen(context.Background(), "tcp4", "0.0.0.0:8006")
		} else {
			socket, err = config.ListenPacket(context.Background(), "udp4", "0.0.0.0:8006")
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = socket.Close() })
		all, err := Listeners(protocol)
		if want := (Listener{At: netip.MustParseAddrPort("0.0.0.0:8006"), Ifindex: 1}); err != nil || !slices.Contains(all, want) {
			t.Errorf("protocol %d: %+v, %v; want %+v", protocol, all, err, want)
		}
	}
}
