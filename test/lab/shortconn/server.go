package shortconn

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// server is the end that answers.
type server struct {
	*run

	poll     *poller
	listener int
	buffer   []byte
}

// newServer listens.
func newServer(r *run) (s *server, err error) {
	s = &server{run: r, buffer: make([]byte, 64)}
	err = r.Server.Do(func() (err error) {
		if s.poll, err = newPoller(); err != nil {
			return err
		}
		s.listener, err = listen(r.Options)
		if err == nil {
			err = s.poll.add(s.listener, s.listener)
		}
		return err
	})
	return s, err
}

func listen(o Options) (fd int, err error) {
	if fd, err = newSocket(o.At, o.Way); err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			err = fmt.Errorf("listen at %s: %w", o.At, err)
		}
	}()
	if o.Way == ResetByServer {
		if err := lingerNot(fd); err != nil {
			return fd, err
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fd, err
	}
	if err := unix.Bind(fd, sockaddr(o.At)); err != nil {
		return fd, err
	}
	if o.Way == Question { // room for more than what is in flight
		return fd, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
	}
	return fd, unix.Listen(fd, 4096)
}

// serve answers until all clients are done.
func (s *server) serve() error {
	defer unix.Close(s.poll.fd)
	defer unix.Close(s.listener)
	for !s.done.Load() && !s.stopped.Load() {
		for _, event := range s.poll.wait() {
			fd := int(event.Fd)
			if fd != s.listener {
				s.finish(fd)
			} else if err := s.admit(); err != nil {
				return fmt.Errorf("answer: %w", err)
			}
		}
	}
	return nil
}

// admit answers whatever has come. An error of one connection is the client's to see.
func (s *server) admit() error {
	for range 64 {
		var err error
		if s.Way == Question {
			err = echo(s.listener, s.buffer)
		} else {
			err = s.greet()
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil && !errors.Is(err, unix.ECONNABORTED) && s.Way != Question:
			return err
		}
	}
	return nil
}

// greet takes a connection and speaks first. Where the client closes, it waits for that.
func (s *server) greet() error {
	fd, err := accept(s.listener)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, s.buffer[:1])
	if err != nil || !s.Way.byClient() {
		return unix.Close(fd)
	}
	return s.poll.add(fd, fd)
}

// finish closes what the client has closed.
func (s *server) finish(fd int) {
	if _, err := unix.Read(fd, s.buffer); !errors.Is(err, unix.EAGAIN) {
		unix.Close(fd)
	}
}
