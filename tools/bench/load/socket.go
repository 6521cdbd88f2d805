package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calls that may wait are made without telling Go's scheduler (RawSyscall): it has nothing else to run on that CPU, and its monitor would wake up every
// 20 us to see what became of them.

// mmsghdr is the kernel's struct of that name.
type mmsghdr struct {
	header unix.Msghdr
	length uint32
	_      uint32
}

// name is a socket address as the kernel reads it, with room for one of either family.
type name [unix.SizeofSockaddrInet6]byte

func encode(to netip.AddrPort) (n name) {
	at := 4
	if to.Addr().Is6() {
		at = 8 // the flow's label comes before it
	}
	binary.NativeEndian.PutUint16(n[:], uint16(domain(to.Addr())))
	binary.BigEndian.PutUint16(n[2:], to.Port())
	copy(n[at:], to.Addr().AsSlice())
	return n
}

// domain is that of an address's sockets.
func domain(address netip.Addr) int {
	if address.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// batch is a number of datagrams that are sent or received by one system call.
type batch struct {
	messages []mmsghdr
	names    []name
	payload  []byte
	vectors  []unix.Iovec
}

// newBatch makes a batch of n datagrams with room for size bytes each. All share the same bytes: nobody looks at them.
func newBatch(n, size int) *batch {
	b := &batch{
		messages: make([]mmsghdr, n), names: make([]name, n),
		payload: make([]byte, size), vectors: make([]unix.Iovec, n),
	}
	for i := range b.messages {
		b.vectors[i].Base = &b.payload[0]
		b.vectors[i].SetLen(size)
		b.messages[i].header.Iov = &b.vectors[i]
		b.messages[i].header.SetIovlen(1)
	}
	return b
}

// named makes the batch carry addresses: where each datagram goes, or where it came from.
func (b *batch) named() *batch {
	for i := range b.messages {
		b.messages[i].header.Name = &b.names[i][0]
		b.messages[i].header.Namelen = uint32(len(b.names[i]))
	}
	return b
}

// send gives datagrams to the kernel, which may take them in parts.
func send(fd int, messages []mmsghdr) error {
	for len(messages) > 0 {
		n, err := mmsg(unix.SYS_SENDMMSG, fd, messages, 0)
		if err != nil {
			return err
		}
		messages = messages[n:]
	}
	return nil
}

// receive takes what is there, at most the size of the batch, and does not wait. 0 means that there was nothing.
func (b *batch) receive(fd int) (int, error) {
	if b.messages[0].header.Name != nil {
		b.named()
	}
	n, err := mmsg(unix.SYS_RECVMMSG, fd, b.messages, unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) {
		return 0, nil
	}
	return n, err
}

func mmsg(call uintptr, fd int, messages []mmsghdr, flags int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&messages[0])), uintptr(len(messages)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// read ends with EAGAIN when nothing has come for a long nap.
func read(fd int, buffer []byte) (int, error) { return transfer(unix.SYS_READ, fd, buffer) }

func write(fd int, buffer []byte) (int, error) { return transfer(unix.SYS_WRITE, fd, buffer) }

// transfer makes an interrupted call again.
func transfer(call uintptr, fd int, buffer []byte) (int, error) {
	for {
		n, _, errno := unix.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// nap gives up the CPU for about as long.
func nap(d time.Duration) {
	request := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&request)), 0, 0) // an interrupted one was long enough
}

// newSocket makes a socket of the server's family on which no read lasts longer than a long nap, nor a write or a connect longer than answerTimeout.
// Those that a listener accepts are like it.
func (e *end) newSocket(kind int) (int, error) {
	fd, err := unix.Socket(domain(e.Server.Addr()), kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make a socket: %w", err)
	}
	for option, limit := range map[int]time.Duration{unix.SO_RCVTIMEO: longNap, unix.SO_SNDTIMEO: answerTimeout} {
		tv := unix.NsecToTimeval(int64(limit))
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &tv); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("set a time limit: %w", err)
		}
	}
	return fd, nil
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	port := int(at.Port())
	if at.Addr().Is6() {
		return &unix.SockaddrInet6{Port: port, Addr: at.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: port, Addr: at.Addr().As4()}
}

// at is where the server has port number i, from 0, of those that it has chosen.
func (e *end) at(i int) netip.AddrPort { return netip.AddrPortFrom(e.Server.Addr(), uint16(e.port+i)) }

// to is where the client sends what is for that port.
func (e *end) to(i int) netip.AddrPort {
	if e.Via.IsValid() {
		return netip.AddrPortFrom(e.Via.Addr(), e.Via.Port()+uint16(i))
	}
	return e.at(i)
}

// open makes a socket that is connected to the server.
func (e *end) open(kind int) (int, error) {
	fd, err := e.newSocket(kind)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, sockaddr(e.to(0))); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EINPROGRESS) {
			err = fmt.Errorf("no answer within %s", answerTimeout)
		}
		return -1, fmt.Errorf("connect to %s: %w", e.to(0), err)
	}
	return fd, nil
}

// Servers choose ports from firstPort to lastPort, below those that kernels give to clients.
const (
	firstPort = 10000
	lastPort  = 30000
)

// serve makes sockets that are bound to so many successive ports, which it chooses. Another sample uses other ports, so that its flows are
// new to every dataplane; but where the ports are a Service's.
func (e *end) serve(kind, ports int) (fds []int, err error) {
	if e.FirstPort != 0 {
		e.port, e.ports = e.FirstPort, min(ports, e.Ports)
		return e.bind(kind)
	}
	e.ports = ports
	for range 20 {
		e.port = firstPort + rand.IntN((lastPort-firstPort)/ports)*ports
		if fds, err = e.bind(kind); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return fds, err
}

func (e *end) bind(kind int) (fds []int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
		}
	}()
	for i := range e.ports {
		fd, err := e.newSocket(kind)
		if err != nil {
			return fds, err
		}
		fds = append(fds, fd)
		if e.FirstPort != 0 { // a reset that was lost leaves an earlier sample's connection there
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return fds, fmt.Errorf("share a port with connections that have ended: %w", err)
			}
		}
		if err := unix.Bind(fd, sockaddr(e.at(i))); err != nil {
			return fds, fmt.Errorf("bind to %s: %w", e.at(i), err)
		}
		if kind&unix.SOCK_STREAM != 0 {
			err = unix.Listen(fd, 1024)
		} else { // more room for received datagrams than all that may be on their way
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
		}
		if err != nil {
			return fds, fmt.Errorf("listen at %s: %w", e.at(i), err)
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
