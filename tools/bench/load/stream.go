package load

import (
	"errors"
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
	chunk := make([]byte, streamChunk)
	e.start()
	for e.tick() != over {
		n, err := write(fd, chunk)
		if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		e.total += uint64(n)
	}
	return nil
}

func receiveStream(e *end) error {
	fd, err := e.acceptOne()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	buffer := make([]byte, streamChunk)
	for !e.stopped.Load() {
		n, err := read(fd, buffer)
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("receive: %w", err)
		}
		e.total += uint64(n)
		if e.tick() == measuring {
			e.counted += uint64(n)
		}
		if err == nil && n == 0 { // its end
			return nil
		}
	}
	return errStopped
}

// acceptOne listens, says so, and waits for a connection.
func (e *end) acceptOne() (fd int, err error) {
	listeners, err := e.serve(unix.SOCK_STREAM, 1)
	if err != nil {
		return -1, err
	}
	defer closeAll(listeners)
	close(e.listening)
	for deadline := e.now() + answerTimeout; ; {
		fd, _, err := unix.Accept4(listeners[0], unix.SOCK_CLOEXEC)
		if err == nil {
			return fd, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
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
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	e.latencies = make([]time.Duration, 1<<18)
	for i := range e.latencies {
		e.latencies[i] = 1
	}
	e.latencies = e.latencies[:0]
	message := make([]byte, requestSize)
	e.start()
	for phase := e.tick(); phase != over; phase = e.tick() {
		asked := e.now()
		_, err := write(fd, message)
		if err == nil {
			err = e.readAll(fd, message)
		}
		if err != nil {
			return fmt.Errorf("transaction %d: %w", e.total+1, err)
		}
		e.total++
		if phase == measuring {
			e.latencies = append(e.latencies, e.now()-asked)
			e.counted++
		}
	}
	if e.counted < minTransactions && !e.stopped.Load() {
		return unmeasured("%d transactions in %s say nothing about the slowest of a thousand", e.counted, e.Duration)
	}
	return nil
}

func respond(e *end) error {
	fd, err := e.acceptOne()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	message := make([]byte, requestSize)
	for {
		err := e.readAll(fd, message)
		e.tick()
		if errors.Is(err, errEnd) {
			return nil
		}
		if err == nil {
			_, err = write(fd, message)
		}
		if err != nil {
			return fmt.Errorf("answer request %d: %w", e.total+1, err)
		}
		e.total++
	}
}

// errEnd is the end of a connection.
var errEnd = errors.New("the connection has ended")

// readAll fills the buffer.
func (e *end) readAll(fd int, buffer []byte) error {
	for deadline := e.now() + answerTimeout; len(buffer) > 0; {
		n, err := read(fd, buffer)
		switch {
		case errors.Is(err, unix.EAGAIN) && e.now() < deadline && !e.stopped.Load():
		case err != nil:
			return err
		case n == 0:
			return errEnd
		}
		buffer = buffer[n:]
	}
	return nil
}
