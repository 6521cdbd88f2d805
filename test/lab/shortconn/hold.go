package shortconn

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Holder holds connections to one place open. The open files stand in messages on their way between two sockets, where no process's limit of open files counts
// them.
type Holder struct {
	server   *lab.Namespace
	at       netip.AddrPort
	listener int
	store    store
	// samples are connections of clients that Check asks for the server's byte.
	samples []int
}

const (
	// batch is the number of connections that are opened at a time, and files in a message: SCM_MAX_FD is 253.
	batch = 250
	// stored is the number of messages in a pair of sockets.
	stored = 64
	// queue is the number of connections that wait for Check.
	queue = 65535
)

// Hold listens at an address of the server's namespace.
func Hold(server *lab.Namespace, at netip.AddrPort) (*Holder, error) {
	if err := server.WriteSysctl("net/core/somaxconn", fmt.Sprint(queue)); err != nil {
		return nil, err
	}
	h := &Holder{server: server, at: at}
	err := server.Do(func() (err error) {
		if h.listener, err = listen(Options{At: at, Way: ResetByServer}); err == nil {
			err = unix.Listen(h.listener, queue)
		}
		return err
	})
	return h, err
}

// Open opens so many connections from a client, which may use all ports above 1023, and says how many of them the server has taken. It ends early when none of a
// batch opens within two seconds.
func (h *Holder) Open(client *lab.Namespace, to netip.AddrPort, count int) (opened int, err error) {
	if err := client.WriteSysctl("net/ipv4/ip_local_port_range", "1024 65535"); err != nil {
		return 0, err
	}
	err = client.Do(func() error {
		for opened < count {
			fds, err := h.open(to, min(batch, count-opened))
			if err != nil || len(fds) == 0 {
				return err
			}
			opened += len(fds)
			h.samples = append(h.samples, fds[0])
			if err := h.store.put(fds[1:]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("hold connection %d: %w", opened+1, err)
	}
	return opened, err
}

// open returns those of a batch that opened.
func (h *Holder) open(to netip.AddrPort, count int) (opened []int, err error) {
	waiting := make([]unix.PollFd, 0, count)
	defer func() {
		for _, w := range waiting {
			unix.Close(int(w.Fd))
		}
	}()
	for range count {
		fd, err := newSocket(to, ResetByClient)
		if err != nil {
			return opened, err
		}
		waiting = append(waiting, unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT})
		if err := lingerNot(fd); err != nil {
			return opened, err
		}
		if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
			return opened, err
		}
	}
	for deadline := time.Now().Add(failLimit); len(waiting) > 0 && time.Now().Before(deadline); {
		if _, err := unix.Poll(waiting, turn); err != nil && !errors.Is(err, unix.EINTR) {
			return opened, err
		}
		var still []unix.PollFd
		for _, w := range waiting {
			switch {
			case w.Revents&(unix.POLLERR|unix.POLLHUP) != 0:
				unix.Close(int(w.Fd))
			case w.Revents&unix.POLLOUT != 0:
				opened = append(opened, int(w.Fd))
			default:
				still = append(still, w)
			}
		}
		waiting = still
	}
	return opened, nil
}

// Check has the server take all connections and send a byte on each, and is an error unless it arrives on the first connection of each batch.
func (h *Holder) Check() error {
	err := h.server.Do(func() error {
		for ended := false; !ended; {
			var fds []int
			for len(fds) < batch && !ended {
				fd, err := accept(h.listener)
				if errors.Is(err, unix.EAGAIN) {
					ended = true
					continue
				}
				if err != nil {
					return fmt.Errorf("take a connection: %w", err)
				}
				fds = append(fds, fd)
				if _, err := unix.Write(fd, []byte{0}); err != nil {
					return fmt.Errorf("send on a connection: %w", err)
				}
			}
			if err := h.store.put(fds); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, fd := range h.samples {
		waiting := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(waiting, int(failLimit.Milliseconds())); err != nil {
			return err
		}
		if n, err := unix.Read(fd, make([]byte, 1)); n != 1 {
			return fmt.Errorf("held connection %d: read %d bytes: %w", i*batch+1, n, err)
		}
	}
	return nil
}

// Close closes all connections with RST.
func (h *Holder) Close() {
	unix.Close(h.listener)
	for _, fd := range append(h.samples, h.store.fds...) {
		unix.Close(fd)
	}
}

// store is pairs of sockets with open files on their way between them.
type store struct {
	fds []int
	// room is the number of messages that fit into the last pair.
	room int
}

// put takes the files, of which the caller has none any more.
func (s *store) put(files []int) error {
	defer func() {
		for _, fd := range files {
			unix.Close(fd)
		}
	}()
	if len(files) == 0 {
		return nil
	}
	if s.room == 0 {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("make a pair of sockets: %w", err)
		}
		if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 1<<20); err != nil {
			return fmt.Errorf("make room for files: %w", err)
		}
		s.fds, s.room = append(s.fds, pair[:]...), stored
	}
	s.room--
	if err := unix.Sendmsg(s.fds[len(s.fds)-2], []byte{0}, unix.UnixRights(files...), nil, 0); err != nil {
		return fmt.Errorf("put %d files aside: %w", len(files), err)
	}
	return nil
}
