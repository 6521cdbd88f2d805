package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Dial connects from the machine to an address (not a name: that would be looked up outside). The socket is one of the machine's own
// processes, as programs on their cgroup see it: whoever only enters the machine's network has none like that.
func (m *Machine) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return m.DialFrom(ctx, 0, network, address)
}

// DialFrom is Dial from a port, which others that it was called for may have too.
func (m *Machine) DialFrom(ctx context.Context, port uint16, network, address string) (net.Conn, error) {
	if err := isNoName(address); err != nil {
		return nil, err
	}
	conn, err := m.connection(ctx, request{Verb: verbDial, Network: network, To: address, From: port})
	if err == nil {
		return conn, nil
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return nil, fmt.Errorf("connect from %s to %s: %w", m.Name, address, err)
}

// connection has process 1 make one.
func (m *Machine) connection(ctx context.Context, r request) (net.Conn, error) {
	asked, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: m.path(socketFile), Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer asked.Close()
	stop := context.AfterFunc(ctx, func() { asked.Close() })
	defer stop()
	if err := json.NewEncoder(asked).Encode(r); err != nil {
		return nil, err
	}
	text, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	n, control, _, _, err := asked.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, err
	}
	var answer response
	switch err := json.Unmarshal(text[:n], &answer); {
	case err != nil:
		return nil, err
	case answer.Errno != 0:
		return nil, answer.Errno
	case answer.Error != "":
		return nil, errors.New(answer.Error)
	}
	return received(rights[:control])
}

// received is the connection that came with a message.
func received(control []byte) (net.Conn, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("%d messages of the kernel, error %w", len(messages), err)
	}
	sockets, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(sockets) != 1 {
		return nil, fmt.Errorf("%d sockets, error %w", len(sockets), err)
	}
	file := os.NewFile(uintptr(sockets[0]), "socket")
	defer file.Close() // the connection has a copy
	return net.FileConn(file)
}

// handOver is process 1's part: it connects for as long as somebody waits for that.
func handOver(asked *net.UnixConn, r request) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		_, _ = asked.Read(make([]byte, 1)) // until the other end is closed
	}()
	var answer response
	socket, err := dialSocket(ctx, r)
	if err != nil {
		answer.Error = err.Error()
		errors.As(err, &answer.Errno)
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return
	}
	var rights []byte
	if socket != nil {
		defer socket.Close()
		rights = unix.UnixRights(int(socket.Fd()))
	}
	_, _, _ = asked.WriteMsgUnix(text, rights, nil)
}

// dialSocket makes the connection; its socket is the only descriptor that is left.
func dialSocket(ctx context.Context, r request) (*os.File, error) {
	dialer := dialerFrom(r.From, r.Network)
	conn, err := dialer.DialContext(ctx, r.Network, r.To)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.(interface{ File() (*os.File, error) }).File()
}
