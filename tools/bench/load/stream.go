package load

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

func sendStreams(e *end) (report, error) {
	poll, err := newPoller()
	if err != nil {
		return report{}, err
	}
	var fds []int
	defer func() { closeAll(fds) }()
	for range e.Count {
		fd, err := e.open(unix.SOCK_STREAM)
		if err != nil {
			return report{}, err
		}
		fds = append(fds, fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return report{}, fmt.Errorf("make a socket non-blocking: %w", err)
		}
		if errno := poll.add(fd, unix.EPOLLOUT, 0); errno != 0 {
			return report{}, fmt.Errorf("watch a socket: %w", errno)
		}
	}
	if err := e.ready(); err != nil {
		return report{}, err
	}
	if !e.start() {
		return report{}, unmeasured("it was stopped")
	}
	var r report
	chunk := make([]byte, streamChunk)
	for e.tick() != over {
		full := true
		for _, fd := range fds {
			n, errno := rawWrite(fd, chunk)
			if errno != 0 && errno != unix.EAGAIN {
				return report{}, fmt.Errorf("send: %w", errno)
			}
			r.Total += uint64(n)
			full = full && n < len(chunk)
		}
		if full {
			poll.wait(longNap)
		}
	}
	for _, fd := range fds {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return report{}, fmt.Errorf("ask a connection for what it sent again: %w", err)
		}
		r.Resent += uint64(info.Total_retrans)
	}
	return r, e.fill(&r)
}

func receiveStreams(e *end) (report, error) {
	fds, err := e.acceptAll()
	if err != nil {
		return report{}, err
	}
	defer closeAll(fds)
	poll, err := watch(fds)
	if err != nil {
		return report{}, err
	}
	r := report{Each: make([]uint64, len(fds))}
	buffer := make([]byte, streamChunk)
	open := len(fds)
	for open > 0 || e.tick() != over {
		for _, event := range poll.wait(longNap) {
			i := int(event.Fd)
			n, errno := rawRead(fds[i], buffer)
			switch {
			case errno == unix.EAGAIN:
			case errno != 0:
				return report{}, fmt.Errorf("receive: %w", errno)
			case n == 0:
				unix.Close(fds[i])
				fds[i] = -1
				open--
			case e.phase == measuring:
				r.Each[i] += uint64(n)
				r.Counted += uint64(n)
				fallthrough
			default:
				r.Total += uint64(n)
			}
		}
		e.tick()
	}
	return r, e.fill(&r)
}

// acceptAll listens, says so, and waits for as many connections as the order counts. The sockets do not block.
func (e *end) acceptAll() (fds []int, err error) {
	e.Ports = 1
	listeners, err := e.serve(unix.SOCK_STREAM)
	if err != nil {
		return nil, err
	}
	defer closeAll(listeners)
	if err := e.ready(); err != nil {
		return nil, err
	}
	if err := unix.SetsockoptTimeval(listeners[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(patience)); err != nil {
		return nil, fmt.Errorf("set a time limit: %w", err)
	}
	for range e.Count {
		fd, _, err := unix.Accept4(listeners[0], unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("accept connection %d of %d within %s: %w", len(fds)+1, e.Count, patience, err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

func request(e *end) (report, error) {
	fd, err := e.open(unix.SOCK_STREAM)
	if err != nil {
		return report{}, err
	}
	defer unix.Close(fd)
	if err := exchanging(fd); err != nil {
		return report{}, err
	}
	r := report{Histogram: new(Histogram)}
	message := make([]byte, requestSize)
	if err := e.ready(); err != nil {
		return report{}, err
	}
	if !e.start() {
		return report{}, unmeasured("it was stopped")
	}
	for {
		before := e.tick()
		if before == over {
			break
		}
		asked := e.now()
		if errno := exchange(fd, message); errno != 0 {
			return report{}, fmt.Errorf("transaction %d: %w", r.Total+1, errno)
		}
		r.Total++
		if answered := e.now(); before == measuring {
			r.Histogram.Add(time.Duration(answered - asked))
			r.Counted++
		}
	}
	return r, e.fill(&r)
}

func respond(e *end) (report, error) {
	fds, err := e.acceptAll()
	if err != nil {
		return report{}, err
	}
	defer closeAll(fds)
	if err := unix.SetNonblock(fds[0], false); err != nil {
		return report{}, fmt.Errorf("make a socket blocking: %w", err)
	}
	if err := exchanging(fds[0]); err != nil {
		return report{}, err
	}
	var r report
	message := make([]byte, requestSize)
	for {
		n, errno := readAll(fds[0], message)
		e.tick()
		if errno == 0 && n == 0 {
			break
		}
		if errno == 0 {
			_, errno = rawWrite(fds[0], message)
		}
		if errno != 0 {
			return report{}, fmt.Errorf("answer request %d: %w", r.Total+1, errno)
		}
		r.Total++
	}
	for e.tick() != over {
		nap(udpReceiverNap)
	}
	return r, e.fill(&r)
}

// exchanging sets a connection up for small messages that are waited for, and not for ever.
func exchanging(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(patience)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	return nil
}

// exchange is one transaction.
func exchange(fd int, message []byte) unix.Errno {
	if _, errno := rawWrite(fd, message); errno != 0 {
		return errno
	}
	n, errno := readAll(fd, message)
	if errno == 0 && n == 0 {
		return unix.ECONNRESET
	}
	return errno
}

// readAll fills the buffer. 0 is the end of the connection.
func readAll(fd int, buffer []byte) (int, unix.Errno) {
	for filled := 0; filled < len(buffer); {
		n, errno := rawRead(fd, buffer[filled:])
		if errno != 0 || n == 0 {
			return 0, errno
		}
		filled += n
	}
	return len(buffer), 0
}
