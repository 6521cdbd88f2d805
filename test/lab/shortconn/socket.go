package shortconn

import (
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// turn is the longest that a loop waits for events.
const turn = 10 // ms

// poller is an epoll instance.
type poller struct {
	fd     int
	events [256]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w", err)
	}
	return &poller{fd: fd}, nil
}

// add watches fd for something to read; the tag comes back with its events.
func (p *poller) add(fd, tag int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(tag)})
}

// wait returns the events, none after a turn.
func (p *poller) wait() []unix.EpollEvent {
	n, err := unix.EpollWait(p.fd, p.events[:], turn)
	if err != nil {
		return nil
	}
	return p.events[:n]
}

func newSocket(to netip.AddrPort, w Way) (int, error) {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	if w == Question {
		kind = unix.SOCK_DGRAM
	}
	return unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
}

// lingerNot makes close send RST, also on the sockets that a listener accepts.
func lingerNot(fd int) error {
	return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// accept returns a connection, or EAGAIN.
func accept(listener int) (int, error) {
	fd, _, errno := unix.Syscall6(unix.SYS_ACCEPT4, uintptr(listener), 0, 0, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// echo answers one datagram, or returns EAGAIN.
func echo(fd int, buffer []byte) error {
	var name [unix.SizeofSockaddrInet6]byte
	length := uint32(len(name))
	n, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)), 0,
		uintptr(unsafe.Pointer(&name[0])), uintptr(unsafe.Pointer(&length)))
	if errno == 0 {
		_, _, errno = unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), n, 0, uintptr(unsafe.Pointer(&name[0])), uintptr(length))
	}
	if errno != 0 {
		return errno
	}
	return nil
}
