package load

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	streamChunk = 128 << 10 // as iperf3
	requestSize = 64
)

func sendStream(e *end) error {
	fd, err := e.open(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// A full socket is waited for no longer than it takes to look whether the sample is over.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, timeval(longNap)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	chunk := make([]byte, streamChunk)
	e.start()
	for e.tick() != over {
		n, errno := rawWrite(fd, chunk)
		if errno != 0 && errno != unix.EAGAIN {
			return fmt.Errorf("send: %w", errno)
		}
		e.total += uint64(n)
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return fmt.Errorf("ask the connection for what it sent again: %w", err)
	}
	e.lost = uint64(info.Total_retrans)
	return e.ended()
}

func receiveStream(e *end) error {
	fd, err := e.acceptOne()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(longNap)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	buffer := make([]byte, streamChunk)
	for !e.stopped.Load() {
		n, errno := rawRead(fd, buffer)
		if errno != 0 && errno != unix.EAGAIN {
			return fmt.Errorf("receive: %w", errno)
		}
		e.total += uint64(n)
		if e.tick() == measuring {
			e.counted += uint64(n)
		}
		if errno == 0 && n == 0 { // its end, which comes when the window is over for both
			for e.tick() != over {
				nap(udpReceiverNap)
			}
			break
		}
	}
	return e.ended()
}

// acceptOne listens, says so, and waits for a connection.
func (e *end) acceptOne() (fd int, err error) {
	listeners, err := e.serve(unix.SOCK_STREAM, 1)
	if err != nil {
		return -1, err
	}
	defer closeAll(listeners)
	if err := unix.SetsockoptTimeval(listeners[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(longNap)); err != nil {
		return -1, fmt.Errorf("set a time limit: %w", err)
	}
	e.listens()
	for deadline := e.now() + patience; ; {
		fd, _, err := unix.Accept4(listeners[0], unix.SOCK_CLOEXEC)
		if err == nil {
			return fd, nil
		}
		if e.stopped.Load() || e.now() > deadline || err != unix.EAGAIN && err != unix.EINTR {
			return -1, fmt.Errorf("accept a connection: %w", err)
		}
	}
}

// request keeps each latency in memory that was touched before, so that none has the making of a page in it.
func request(e *end) error {
	fd, err := e.open(unix.SOCK_STREAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := exchanging(fd); err != nil {
		return err
	}
	e.latencies = make([]time.Duration, 1<<18)
	for i := range e.latencies {
		e.latencies[i] = 1
	}
	e.latencies = e.latencies[:0]
	message := make([]byte, requestSize)
	e.start()
	for {
		before := e.tick()
		if before == over {
			return e.ended()
		}
		asked := e.now()
		_, errno := rawWrite(fd, message)
		n := 0
		if errno == 0 {
			n, errno = e.readAll(fd, message)
		}
		if errno == 0 && n == 0 {
			errno = unix.ECONNRESET
		}
		if errno != 0 {
			return fmt.Errorf("transaction %d: %w", e.total+1, errno)
		}
		e.total++
		if before == measuring {
			e.latencies = append(e.latencies, e.now()-asked)
			e.counted++
		}
	}
}

func respond(e *end) error {
	fd, err := e.acceptOne()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := exchanging(fd); err != nil {
		return err
	}
	message := make([]byte, requestSize)
	for {
		n, errno := e.readAll(fd, message)
		e.tick()
		if errno == 0 && n == 0 {
			break
		}
		if errno == 0 {
			_, errno = rawWrite(fd, message)
		}
		if errno != 0 {
			return fmt.Errorf("answer request %d: %w", e.total+1, errno)
		}
		e.total++
	}
	for e.tick() != over {
		nap(udpReceiverNap)
	}
	return e.ended()
}

// exchanging sets a connection up for small messages that are waited for, and not for ever.
func exchanging(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(helloTimeout)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	return nil
}

// readAll fills the buffer. 0 is the end of the connection.
func (e *end) readAll(fd int, buffer []byte) (int, unix.Errno) {
	for filled, tries := 0, 0; filled < len(buffer); {
		n, errno := rawRead(fd, buffer[filled:])
		if errno == unix.EAGAIN && tries < int(patience/helloTimeout) && !e.stopped.Load() {
			tries++
			continue
		}
		if errno != 0 || n == 0 {
			return 0, errno
		}
		filled += n
	}
	return len(buffer), 0
}
