package load

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// One flow takes one port at each end: this many ports of the server's keep the number of NAT ports that a sample takes from one
// destination, 16 384 at most, in the hundreds.
const (
	connectPorts  = 64
	connectAtOnce = 16
)

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

// add watches fd; the tag comes back with its events.
func (p *poller) add(fd int, events uint32, tag int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(tag)})
}

// wait returns the events, none after the time has passed.
func (p *poller) wait(d time.Duration) []unix.EpollEvent {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)),
		uintptr(d.Milliseconds()), 0, 0)
	if errno != 0 {
		return nil
	}
	return p.events[:n]
}

// client opens connections, some at once, each slot of a number one after the other.
type client struct {
	*end

	poll   *poller
	fds    [connectAtOnce]int
	asked  [connectAtOnce]bool
	read   [connectAtOnce]int
	next   int // the port of the next connection, from the server's first on
	buffer []byte
}

func connect(e *end) error {
	poll, err := newPoller()
	if err != nil {
		return err
	}
	defer unix.Close(poll.fd)
	before, err := retransmitted()
	if err != nil {
		return err
	}
	c := &client{end: e, poll: poll, buffer: make([]byte, 2*requestSize)}
	e.start()
	if err := c.run(); err != nil {
		return err
	}
	after, err := retransmitted()
	e.lost = after - before
	return err
}

// run opens connections until the window is over, or has seen as many as a sample may.
func (c *client) run() error {
	defer func() {
		c.enter(over) // before the server sees these end
		closeAll(c.fds[:])
	}()
	for slot := range c.fds {
		if err := c.open(slot); err != nil {
			return fmt.Errorf("open connection %d: %w", slot+1, err)
		}
	}
	for quiet := c.now(); c.tick() != over && c.counted < ConnectionsPerSample; {
		before := c.total
		for _, event := range c.poll.wait(longNap) {
			if err := c.advance(int(event.Fd), event.Events); err != nil {
				return fmt.Errorf("connection after %d complete ones: %w", c.total, err)
			}
		}
		if c.total > before {
			quiet = c.now()
		} else if c.now()-quiet > answerTimeout {
			return unmeasured("no connection was completed within %s", answerTimeout)
		}
		if c.phase == measuring {
			c.counted += c.total - before
		}
	}
	return nil
}

// retransmitted is how many segments this namespace has sent again since it exists.
func retransmitted() (uint64, error) {
	text, err := os.ReadFile("/proc/thread-self/net/snmp")
	if err != nil {
		return 0, fmt.Errorf("read the namespace's counters: %w", err)
	}
	return parseSNMP(string(text), "Tcp:", "RetransSegs")
}

// parseSNMP finds a counter where the names stand in one line and the values in the next.
func parseSNMP(text, group, name string) (uint64, error) {
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != group {
			continue
		}
		for i := range min(len(names), len(fields)) {
			if names[i] == name {
				return strconv.ParseUint(fields[i], 10, 64)
			}
		}
		names = fields
	}
	return 0, fmt.Errorf("parse /proc/net/snmp: %s has no %s", group, name)
}

// open begins the next connection of a slot. A linger of no time makes close send RST where it would send FIN.
func (c *client) open(slot int) error {
	fd, err := unix.Socket(domain(c.Server.Addr()), unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	c.fds[slot], c.asked[slot], c.read[slot] = fd, false, 0
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return err
	}
	to := c.to(c.next)
	c.next = (c.next + 1) % c.ports
	if err := unix.Connect(fd, sockaddr(to)); err != nil && err != unix.EINPROGRESS {
		return err
	}
	return c.poll.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET&0xffffffff, slot)
}

// advance does what the events of a slot's connection allow.
func (c *client) advance(slot int, events uint32) error {
	fd := c.fds[slot]
	if !c.asked[slot] && events&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		c.asked[slot] = true
		_, err := write(fd, c.buffer[:requestSize])
		return err
	}
	for {
		n, err := read(fd, c.buffer)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return fmt.Errorf("read the answer: %w", err)
		case n > 0:
			c.read[slot] += n
			continue
		case c.read[slot] != requestSize:
			return fmt.Errorf("an answer of %d bytes, want %d", c.read[slot], requestSize)
		}
		unix.Close(fd)
		c.total++
		return c.open(slot)
	}
}

// accept answers one request on each connection and closes it, on all of its ports.
func accept(e *end) error {
	poll, err := newPoller()
	if err != nil {
		return err
	}
	defer unix.Close(poll.fd)
	listeners, err := e.serve(unix.SOCK_STREAM|unix.SOCK_NONBLOCK, connectPorts)
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	for _, fd := range listeners {
		if err := poll.add(fd, unix.EPOLLIN, -fd); err != nil {
			return fmt.Errorf("watch a socket: %w", err)
		}
	}
	close(e.listening)
	message := make([]byte, requestSize)
	for !e.done.Load() {
		for _, event := range poll.wait(longNap) {
			var err error
			if listener := -int(event.Fd); listener > 0 {
				err = poll.admit(listener)
			} else if err = answer(int(event.Fd), message); err == nil {
				e.total++
			}
			// A connection that the client gave up when its time was over.
			if now := e.tick(); err != nil && (now != over || !errors.Is(err, unix.ECONNRESET)) {
				return fmt.Errorf("serve connection %d: %w", e.total+1, err)
			}
		}
		e.tick()
	}
	return nil
}

// admit takes one connection from a listener.
func (p *poller) admit(listener int) error {
	fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if err == unix.EAGAIN {
		return nil
	}
	if err != nil {
		return err
	}
	return p.add(fd, unix.EPOLLIN, fd)
}

// answer reads a request, which is one segment, answers it, and closes the connection.
func answer(fd int, message []byte) error {
	defer unix.Close(fd)
	n, err := read(fd, message)
	if err == nil && n != len(message) {
		err = unix.ECONNRESET
	}
	if err == nil {
		_, err = write(fd, message)
	}
	return err
}
