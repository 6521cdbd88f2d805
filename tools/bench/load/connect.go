package load

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// One flow takes one port at each end: this many ports of the server's keep the number of NAT ports that a sample takes from one
// destination, 16 384 at most, in the hundreds.
const (
	connectPorts  = 64
	connectAtOnce = 16
)

// linger of no time makes close send RST where it would send FIN.
var linger = unix.Linger{Onoff: 1, Linger: 0}

// client opens connections, some at once, each slot of a number one after the other.
type client struct {
	*end
	poll   *poller
	fds    [connectAtOnce]int
	asked  [connectAtOnce]bool
	read   [connectAtOnce]int
	name   name
	next   int // the port of the next connection, from the server's first on
	buffer []byte
}

func connect(e *end) error {
	poll, err := newPoller()
	if err != nil {
		return err
	}
	defer poll.close()
	c := &client{end: e, poll: poll, name: encode(e.Server.Addr(), e.port), buffer: make([]byte, 2*requestSize)}
	before, err := retransmitted()
	if err != nil {
		return err
	}
	e.start()
	if err := c.run(); err != nil {
		return err
	}
	after, err := retransmitted()
	if err != nil {
		return err
	}
	e.lost = after - before
	return e.ended()
}

// run opens connections until the window is over, or has seen as many as a sample may.
func (c *client) run() error {
	defer func() {
		c.sample.phase.Store(int32(over)) // before the server sees these end
		for _, fd := range c.fds {
			unix.Close(fd)
		}
	}()
	for slot := range c.fds {
		if errno := c.open(slot); errno != 0 {
			return fmt.Errorf("open connection %d: %w", slot+1, errno)
		}
	}
	for quiet := c.now(); c.tick() != over; {
		c.sample.phase.Store(int32(c.phase))
		before := c.total
		for _, event := range c.poll.wait(longNap) {
			if step, errno := c.advance(int(event.Fd), event.Events); errno != 0 {
				return fmt.Errorf("connection after %d complete ones: %s: %w", c.total, step, errno)
			}
		}
		if c.total > before {
			quiet = c.now()
		} else if c.now()-quiet > patience {
			return unmeasured("no connection was completed within %s", patience)
		}
		if c.phase == measuring {
			c.counted += c.total - before
		}
		if c.counted >= ConnectionsPerSample {
			c.finish()
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
		switch {
		case len(fields) == 0 || fields[0] != group:
		case names == nil:
			names = fields
		default:
			i := slices.Index(names, name)
			if i < 0 || i >= len(fields) {
				return 0, fmt.Errorf("parse /proc/net/snmp: %s has no %s", group, name)
			}
			value, err := strconv.ParseUint(fields[i], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("parse /proc/net/snmp: %s %s: %w", group, name, err)
			}
			return value, nil
		}
	}
	return 0, fmt.Errorf("parse /proc/net/snmp: it has no two lines of %s", group)
}

// open begins the next connection of a slot.
func (c *client) open(slot int) unix.Errno {
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if errno != 0 {
		return errno
	}
	c.fds[slot], c.asked[slot], c.read[slot] = int(fd), false, 0
	_, _, errno = unix.RawSyscall6(unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_LINGER,
		uintptr(unsafe.Pointer(&linger)), unsafe.Sizeof(linger), 0)
	if errno != 0 {
		return errno
	}
	port := c.port + c.next
	c.next = (c.next + 1) % c.ports
	c.name[2], c.name[3] = byte(port>>8), byte(port)
	_, _, errno = unix.RawSyscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&c.name[0])), uintptr(len(c.name)))
	if errno != 0 && errno != unix.EINPROGRESS {
		return errno
	}
	return c.poll.add(int(fd), unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET&0xffffffff, slot)
}

// advance does what the events of a slot's connection allow.
func (c *client) advance(slot int, events uint32) (step string, errno unix.Errno) {
	fd := c.fds[slot]
	if !c.asked[slot] && events&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		c.asked[slot] = true
		_, errno = rawWrite(fd, c.buffer[:requestSize])
		return "request", errno
	}
	for {
		n, errno := rawRead(fd, c.buffer)
		switch {
		case errno == unix.EAGAIN:
			return "", 0
		case errno != 0:
			return "read the answer", errno
		case n > 0:
			c.read[slot] += n
			continue
		case c.read[slot] != requestSize:
			return "read a whole answer", unix.EPROTO
		}
		unix.Close(fd)
		c.total++
		return "open the next", c.open(slot)
	}
}

// accept answers one request on each connection and closes it, on all of its ports.
func accept(e *end) error {
	poll, err := newPoller()
	if err != nil {
		return err
	}
	defer poll.close()
	listeners, err := e.serve(unix.SOCK_STREAM|unix.SOCK_NONBLOCK, connectPorts)
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	for _, fd := range listeners {
		if errno := poll.add(fd, unix.EPOLLIN, -fd); errno != 0 {
			return fmt.Errorf("watch a socket: %w", errno)
		}
	}
	e.listens()
	message := make([]byte, requestSize)
	for !e.done.Load() {
		for _, event := range poll.wait(longNap) {
			var errno unix.Errno
			if listener := -int(event.Fd); listener > 0 {
				errno = poll.admit(listener)
			} else if errno = answer(int(event.Fd), message); errno == 0 {
				e.total++
			}
			e.follow()
			// A connection that the client gave up when its time was over.
			if errno != 0 && (errno != unix.ECONNRESET || phase(e.sample.phase.Load()) != over) {
				return fmt.Errorf("serve connection %d: %w", e.total+1, errno)
			}
		}
		e.follow()
	}
	e.follow()
	return e.ended()
}

// admit takes one connection from a listener.
func (p *poller) admit(listener int) unix.Errno {
	fd, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), 0, 0, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0, 0)
	if errno == unix.EAGAIN {
		return 0
	}
	if errno != 0 {
		return errno
	}
	return p.add(int(fd), unix.EPOLLIN, int(fd))
}

// answer reads a request, which is one segment, answers it, and closes the connection.
func answer(fd int, message []byte) unix.Errno {
	defer unix.Close(fd)
	n, errno := rawRead(fd, message)
	if errno == 0 && n != len(message) {
		errno = unix.ECONNRESET
	}
	if errno == 0 {
		_, errno = rawWrite(fd, message)
	}
	return errno
}
