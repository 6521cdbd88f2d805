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

// The loops call the kernel without telling Go's scheduler (RawSyscall): it has nothing else to run on that CPU, and would only
// take its time. They handle errors as numbers, since an error value may be an allocation.

// mmsghdr is the kernel's struct of that name.
type mmsghdr struct {
	header unix.Msghdr
	length uint32
	_      uint32
}

// name is an IPv4 socket address as the kernel reads it.
type name [unix.SizeofSockaddrInet4]byte

func encode(address netip.Addr, port int) (n name) {
	binary.NativeEndian.PutUint16(n[:], unix.AF_INET)
	binary.BigEndian.PutUint16(n[2:], uint16(port))
	v4 := address.As4()
	copy(n[4:], v4[:])
	return n
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

// send gives the first n datagrams to the kernel and returns how many it took.
func (b *batch) send(fd, n int) (int, unix.Errno) {
	return b.call(unix.SYS_SENDMMSG, fd, n, 0)
}

// receive takes what is there, at most the size of the batch, and does not wait. 0 means that there was nothing.
func (b *batch) receive(fd int) (int, unix.Errno) {
	if b.messages[0].header.Name != nil {
		for i := range b.messages {
			b.messages[i].header.Namelen = uint32(len(b.names[i]))
		}
	}
	n, errno := b.call(unix.SYS_RECVMMSG, fd, len(b.messages), unix.MSG_DONTWAIT)
	if errno == unix.EAGAIN {
		return 0, 0
	}
	return n, errno
}

func (b *batch) call(number uintptr, fd, n, flags int) (int, unix.Errno) {
	for {
		done, _, errno := unix.RawSyscall6(number, uintptr(fd), uintptr(unsafe.Pointer(&b.messages[0])), uintptr(n), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(done), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// rawRead and rawWrite are read and write without Go's scheduler; an interrupted call is made again.
func rawRead(fd int, buffer []byte) (int, unix.Errno) { return rawIO(unix.SYS_READ, fd, buffer) }

func rawWrite(fd int, buffer []byte) (int, unix.Errno) { return rawIO(unix.SYS_WRITE, fd, buffer) }

func rawIO(number uintptr, fd int, buffer []byte) (int, unix.Errno) {
	for {
		n, _, errno := unix.RawSyscall(number, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)))
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// nap gives up the CPU for about as long.
func nap(d time.Duration) {
	request := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&request)), 0, 0)
}

// poller is an epoll instance.
type poller struct {
	fd     int
	events [128]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make an epoll instance: %w", err)
	}
	return &poller{fd: fd}, nil
}

func (p *poller) close() { unix.Close(p.fd) }

// add watches fd; the tag comes back with its events.
func (p *poller) add(fd int, events uint32, tag int) unix.Errno {
	event := unix.EpollEvent{Events: events, Fd: int32(tag)}
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.fd), unix.EPOLL_CTL_ADD, uintptr(fd),
		uintptr(unsafe.Pointer(&event)), 0, 0)
	return errno
}

// wait returns the events, none after the time has passed.
func (p *poller) wait(d time.Duration) []unix.EpollEvent {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])),
		uintptr(len(p.events)), uintptr(d.Milliseconds()), 0, 0)
	if errno != 0 {
		return nil
	}
	return p.events[:n]
}

func sockaddr(address netip.Addr, port int) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: port, Addr: address.As4()}
}

// open makes a socket that is connected to the server.
func (e *end) open(kind int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make a socket: %w", err)
	}
	if kind == unix.SOCK_STREAM {
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, timeval(patience)) // bounds connect; worst case it takes long
	}
	if err := unix.Connect(fd, sockaddr(e.Server.Addr(), e.port)); err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EINPROGRESS) {
			err = fmt.Errorf("no answer within %s", patience)
		}
		return -1, fmt.Errorf("connect to %s port %d: %w", e.Server.Addr(), e.port, err)
	}
	return fd, nil
}

// Servers choose ports from firstPort to lastPort, below those that kernels give to clients.
const (
	firstPort = 10000
	lastPort  = 30000
)

// serve makes sockets that are bound to so many successive ports, which it chooses. Another sample uses other ports, so that its flows are
// new to every dataplane.
func (e *end) serve(kind, ports int) (fds []int, err error) {
	e.ports = ports
	for range 20 {
		e.port = firstPort + rand.IntN((lastPort-firstPort)/ports)*ports
		if fds, err = e.bind(kind); !errors.Is(err, unix.EADDRINUSE) {
			return fds, err
		}
	}
	return nil, err
}

func (e *end) bind(kind int) (fds []int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
		}
	}()
	for port := e.port; port < e.port+e.ports; port++ {
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fds, fmt.Errorf("make a socket: %w", err)
		}
		fds = append(fds, fd)
		if err := unix.Bind(fd, sockaddr(e.Server.Addr(), port)); err != nil {
			return fds, fmt.Errorf("bind to %s port %d: %w", e.Server.Addr(), port, err)
		}
		if kind&unix.SOCK_STREAM == 0 {
			continue
		}
		if err := unix.Listen(fd, 1024); err != nil {
			return fds, fmt.Errorf("listen at %s port %d: %w", e.Server.Addr(), port, err)
		}
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func timeval(d time.Duration) *unix.Timeval {
	tv := unix.NsecToTimeval(int64(d))
	return &tv
}

// bigBuffer gives a socket more room for received datagrams than the sender's window can fill.
func bigBuffer(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
		return fmt.Errorf("enlarge the receive buffer: %w", err)
	}
	return nil
}

// overflown is how many datagrams a socket had no room for.
func overflown(fd int) (uint64, error) {
	var memory [9]uint32 // SK_MEMINFO_VARS, the last of them SK_MEMINFO_DROPS
	size := uint32(unsafe.Sizeof(memory))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&memory[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("ask the socket for its drops: %w", errno)
	}
	return uint64(memory[8]), nil
}
