package device

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUDPSockets finds the connected ones of both families, and ends one alone.
func TestUDPSockets(t *testing.T) {
	inside(t)
	for name, peer := range map[string]string{"IPv4": "127.0.0.1:7", "IPv6": "[::1]:7", "IPv4 by an IPv6 socket": "[::ffff:127.0.0.1]:7"} {
		t.Run(name, func(t *testing.T) {
			ended, kept := connectUDP(t, peer), connectUDP(t, peer)
			cookie := cookieOf(t, ended)
			all, err := UDPSockets()
			if err != nil {
				t.Fatal(err)
			}
			found := 0
			want := netip.MustParseAddrPort(peer)
			want = netip.AddrPortFrom(want.Addr().Unmap(), want.Port())
			for _, s := range all {
				if s.Cookie != cookie {
					continue
				}
				if found++; s.Peer != want {
					t.Errorf("its peer is %v, want %v", s.Peer, want)
				}
				if err := s.End(); err != nil {
					t.Error(err)
				}
				if err := s.End(); err != nil {
					t.Errorf("once more: %v", err)
				}
			}
			if found != 1 || len(all) < 2 {
				t.Fatalf("found %d times among %v", found, all)
			}
			if _, err := unix.Read(ended, make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
				t.Errorf("who reads from the socket that was ended is told: %v", err)
			}
			if _, err := unix.Write(ended, []byte("x")); !errors.Is(err, unix.EDESTADDRREQ) {
				t.Errorf("who writes to it: %v", err)
			}
			if _, err := unix.Write(kept, []byte("x")); err != nil {
				t.Errorf("the other one: %v", err)
			}
		})
	}
}

func connectUDP(t *testing.T, peer string) int {
	t.Helper()
	to := netip.MustParseAddrPort(peer)
	family, at := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		family, at = unix.AF_INET, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Connect(fd, at); err != nil {
		t.Fatal(err)
	}
	return fd
}

func cookieOf(t *testing.T, fd int) uint64 {
	t.Helper()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	return cookie
}
