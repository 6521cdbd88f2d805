package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// processRole makes an executable that calls BeProcess a process of a node's.
const processRole = "EBPF_CNI_LAB_PROCESS"

// Process is a process in a node's cgroup that makes sockets for the caller. To the kernel they are the node's, whoever uses
// them, as the caller's own are not, even if it makes them in the node's network namespace.
type Process struct {
	cmd  *exec.Cmd
	conn *os.File // a socket; each byte that is sent asks for one of its family
}

// BeProcess is to be called first by an executable whose tests start processes on nodes.
func BeProcess() {
	if os.Getenv(processRole) == "" {
		return
	}
	if err := makeSockets(3); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// makeSockets answers each byte of a socket with a socket: family and type are in its halves.
func makeSockets(conn int) error {
	for {
		ask := make([]byte, 1)
		if n, err := unix.Read(conn, ask); n == 0 || err != nil {
			return err
		}
		fd, err := unix.Socket(int(ask[0]>>4), int(ask[0]&15)|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = errors.Join(unix.Sendmsg(conn, []byte{0}, unix.UnixRights(fd), nil, 0), unix.Close(fd))
		}
		if err != nil {
			return err
		}
	}
}

// StartProcess starts a process in the node's cgroup, and in a network namespace: most often the node's.
func (n *Node) StartProcess(in *Namespace) (*Process, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("start a process of %s: %w", n.Name, err)
	}
	p := &Process{cmd: exec.Command("/proc/self/exe"), conn: os.NewFile(uintptr(pair[0]), "process")}
	theirs := os.NewFile(uintptr(pair[1]), "lab")
	defer theirs.Close()
	p.cmd.Env, p.cmd.ExtraFiles, p.cmd.Stderr = []string{processRole + "=1"}, []*os.File{theirs}, os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{}
	started, err := n.inCgroup(p.cmd.SysProcAttr)
	if err == nil {
		err = in.Do(p.cmd.Start)
		started()
	}
	if err != nil {
		p.conn.Close()
		return nil, fmt.Errorf("start a process of %s: %w", n.Name, err)
	}
	return p, nil
}

// Join moves the process to another cgroup, such as that of a pod, below the node's.
func (p *Process) Join(cgroup string) error { return joinCgroup(p.cmd.Process.Pid, cgroup) }

// Close ends the process. Sockets that it has made go on.
func (p *Process) Close() error { return errors.Join(p.conn.Close(), p.cmd.Wait()) }

// Socket is a new socket of the process: of IPv6 or of IPv4, and of a type such as unix.SOCK_STREAM.
func (p *Process) Socket(ipv6 bool, kind int) (int, error) {
	family := byte(unix.AF_INET)
	if ipv6 {
		family = unix.AF_INET6
	}
	if _, err := unix.Write(int(p.conn.Fd()), []byte{family<<4 | byte(kind)}); err != nil {
		return 0, fmt.Errorf("ask a process for a socket: %w", err)
	}
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(p.conn.Fd()), make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("get a socket of a process: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return 0, fmt.Errorf("get a socket of a process: %d messages, %v", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return 0, fmt.Errorf("get a socket of a process: %d descriptors, %v", len(fds), err)
	}
	return fds[0], nil
}

// Dial connects a new socket of a type. An address of IPv4 in IPv6 (::ffff:a.b.c.d) takes a socket of IPv6.
func (p *Process) Dial(kind int, to netip.AddrPort) (net.Conn, error) {
	fd, err := p.Socket(!to.Addr().Is4(), kind)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close() // the connection has a copy
	limit := unix.NsecToTimeval(defaultTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return nil, fmt.Errorf("limit a connection's time: %w", err)
	}
	err = unix.Connect(fd, Sockaddr(to))
	// The runtime's signals interrupt it; asked again it waits on.
	for errors.Is(err, unix.EINTR) {
		err = unix.Connect(fd, Sockaddr(to))
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return net.FileConn(file)
}

// Sockaddr is an address and port for the kernel.
func Sockaddr(to netip.AddrPort) unix.Sockaddr {
	if to.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	return &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
}

// DialTCP opens a connection to a Server.
func (p *Process) DialTCP(ctx context.Context, to netip.AddrPort) (*TCPConn, error) {
	conn, err := p.Dial(unix.SOCK_STREAM, to)
	if err != nil {
		return nil, err
	}
	c := &TCPConn{Conn: conn, in: bufio.NewReader(conn)}
	if err := c.greet(ctx, askEcho); err != nil {
		conn.Close()
		return nil, fmt.Errorf("TCP to %s: %w", to, err)
	}
	return c, nil
}

// DialUDP makes a UDP socket that talks to one Server.
func (p *Process) DialUDP(to netip.AddrPort) (*UDPConn, error) {
	conn, err := p.Dial(unix.SOCK_DGRAM, to)
	if err != nil {
		return nil, err
	}
	return &UDPConn{conn.(*net.UDPConn)}, nil
}
