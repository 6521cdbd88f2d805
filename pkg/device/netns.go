package device

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// ErrNotNetNS is returned (wrapped) for a path that is not a network namespace.
var ErrNotNetNS = errors.New("not a network namespace")

// errGoexit is returned by Do when its function ended the goroutine instead of returning, as t.FailNow does.
var errGoexit = errors.New("function did not return")

const currentNetNS = "/proc/thread-self/ns/net"

// NetNS is an open network namespace. It stays alive for as long as it is open.
type NetNS struct {
	file *os.File
	path string
}

// OpenNetNS opens the network namespace that path names. Errors match fs.ErrNotExist when there is no such file and
// ErrNotNetNS when the file is something else.
func OpenNetNS(path string) (*NetNS, error) {
	// O_NONBLOCK: the path comes from the runtime, and opening a FIFO would wait for a writer.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %w", path, ErrNotNetNS)
	}
	return &NetNS{file: os.NewFile(uintptr(fd), path), path: path}, nil
}

// CurrentNetNS opens the namespace that the calling goroutine's thread is in.
func CurrentNetNS() (*NetNS, error) {
	return OpenNetNS(currentNetNS)
}

// Close closes the file descriptor.
func (n *NetNS) Close() error { return n.file.Close() }

// FD returns the namespace's file descriptor, which is valid until Close.
func (n *NetNS) FD() int { return int(n.file.Fd()) }

// Path returns the path that the namespace was opened by.
func (n *NetNS) Path() string { return n.path }

// Same reports whether both are the same namespace.
func (n *NetNS) Same(other *NetNS) (bool, error) {
	a, err := n.file.Stat()
	if err != nil {
		return false, fmt.Errorf("stat network namespace %s: %w", n.path, err)
	}
	b, err := other.file.Stat()
	if err != nil {
		return false, fmt.Errorf("stat network namespace %s: %w", other.path, err)
	}
	return os.SameFile(a, b), nil
}

// Do runs fn inside the namespace, on a thread of its own, and returns its error. Goroutines that fn starts are outside.
// A thread that can't return to its own namespace ends.
func (n *NetNS) Do(fn func() error) error {
	done := make(chan error, 1)
	go n.run(fn, done)
	return <-done
}

func (n *NetNS) run(fn func() error, done chan<- error) {
	err := errGoexit
	defer func() { done <- err }()

	runtime.LockOSThread() // the thread ends with the goroutine, unless the Setns below succeeds
	before, openErr := CurrentNetNS()
	if openErr != nil {
		err = openErr
		return
	}
	defer before.Close()
	if setErr := unix.Setns(n.FD(), unix.CLONE_NEWNET); setErr != nil {
		err = fmt.Errorf("enter network namespace %s: %w", n.path, setErr)
		return
	}
	defer func() {
		if unix.Setns(before.FD(), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	err = fn()
}
