package cluster

import (
	"context"
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

// Dial connects from the machine to an address (not a name: that would be looked up outside).
func (m *Machine) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return dialIn(ctx, m.Do, network, address)
}

// DialFrom is Dial from a port, which others that it was called for may have too.
func (m *Machine) DialFrom(ctx context.Context, port uint16, network, address string) (net.Conn, error) {
	return dialFrom(ctx, m.Do, port, network, address)
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

func dialIn(ctx context.Context, do func(func() error) error, network, address string) (net.Conn, error) {
	return dialBy(ctx, do, net.Dialer{}, network, address)
}

func dialFrom(ctx context.Context, do func(func() error) error, port uint16, network, address string) (net.Conn, error) {
	dialer := net.Dialer{Control: shared, LocalAddr: &net.TCPAddr{Port: int(port)}}
	if network == "udp" {
		dialer.LocalAddr = &net.UDPAddr{Port: int(port)}
	}
	return dialBy(ctx, do, dialer, network, address)
}

// shared lets a socket have a port that others have.
func shared(_, _ string, raw syscall.RawConn) error {
	var failed error
	err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, failed)
}

func dialBy(ctx context.Context, do func(func() error) error, dialer net.Dialer, network, address string) (conn net.Conn, err error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	err = do(func() error {
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}
