package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"syscall"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Do calls f in the machine's network. f must not start goroutines that use it.
func (m *Machine) Do(f func() error) error {
	return inNetwork(m.Name, fmt.Sprintf("/proc/%d/ns/net", m.pid), f)
}

// inNetwork calls f in the network namespace at path.
func inNetwork(name, path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and no other one finds itself in the wrong network.
		runtime.LockOSThread()
		ns, err := netns.GetFromPath(path)
		if err != nil {
			done <- fmt.Errorf("find the network of %s: %w", name, err)
			return
		}
		defer ns.Close()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter the network of %s: %w", name, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// dialerFrom is one who connects from a port, which others may have too; from any if that is 0.
func dialerFrom(port uint16, network string) net.Dialer {
	switch {
	case port == 0:
		return net.Dialer{}
	case network == "udp":
		return net.Dialer{Control: shared, LocalAddr: &net.UDPAddr{Port: int(port)}}
	default:
		return net.Dialer{Control: shared, LocalAddr: &net.TCPAddr{Port: int(port)}}
	}
}

// shared lets a socket have a port that others have.
func shared(_, _ string, raw syscall.RawConn) error {
	var failed error
	err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, failed)
}

// isNoName keeps names from being looked up outside.
func isNoName(address string) error {
	_, err := netip.ParseAddrPort(address)
	if err != nil {
		err = fmt.Errorf("connect: %w", err)
	}
	return err
}
