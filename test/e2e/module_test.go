package e2e

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What the kernel itself speaks besides TCP, UDP and ICMP, where it has the modules: pods talk to pods, and nothing is masqueraded.

func TestGREAndSCTPBetweenPods(t *testing.T) {
	modes := []string{"vxlan"}
	if priv.Long() {
		modes = append(modes, "direct")
	}
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{"--routing-mode=" + mode}}, drops.UnknownProtocol)
			needGREAndSCTP(t, l.Outside)
			startAgents(t, l)
			pod := addPod(t, l.Nodes[0], "a")
			peers := []*lab.Namespace{addPod(t, l.Nodes[0], "near").Namespace, addPod(t, l.Nodes[1], "far").Namespace, l.Outside}
			overEachFamily(t, l, func(t *testing.T, family wire.Family) {
				for i, peer := range peers {
					assertGRE(t, pod, peer, family, byte(10*int(family)+i))
					assertSCTP(t, pod, peer, family)
				}
			})
		})
	}
}

// needGREAndSCTP skips a test where the kernel lacks them.
func needGREAndSCTP(t *testing.T, on *lab.Namespace) {
	t.Helper()
	socket, err := openSCTP(on, on.Addr(), func(int) error { return nil })
	if err == nil {
		err = errors.Join(socket.Close(), addGRE(on, 99, wire.IPv4, on.Addr(), 1))
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		t.Skipf("this kernel has no GRE or SCTP: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// assertRefused: what is sent to the world is dropped with its reason.
func assertRefused(t *testing.T, node *lab.Node, send func()) {
	t.Helper()
	before := dropped(t, node, drops.UnknownProtocol)
	send()
	eventually(t, answerLimit, "what can't be masqueraded is dropped", func() bool { return dropped(t, node, drops.UnknownProtocol) > before })
}

// assertGRE has TCP go through a GRE tunnel, or be refused on its way to the world.
func assertGRE(t *testing.T, pod *lab.Pod, peer *lab.Namespace, family wire.Family, id byte) {
	t.Helper()
	if err := errors.Join(addGRE(pod.Namespace, id, family, peer.AddrOf(family), 1), addGRE(peer, id, family, pod.AddrOf(family), 2)); err != nil {
		t.Fatal(err)
	}
	server, err := peer.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(greAddr(id, 2), server.Port)
	if peer.AddrOf(family) == lab.OutsideAddr[family] {
		assertRefused(t, pod.Node, func() { send(t, dialUDP(t, pod.Namespace, 0, at), "is anybody there?") })
		return
	}
	if _, err := pod.Transfer(within(t, 20*time.Second), at, 1<<20); err != nil {
		t.Errorf("GRE to %s: %v", peer.Netns(), err)
	}
}

func greAddr(id, last byte) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, id, last}) }

// addGRE makes one end of a GRE tunnel, with an address inside.
func addGRE(on *lab.Namespace, id byte, outside wire.Family, far netip.Addr, last byte) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "tunnel" + string(rune('a'+id))
	link := &netlink.Gretun{LinkAttrs: attrs, Local: on.AddrOf(outside).AsSlice(), Remote: far.AsSlice(), Ttl: 64, PMtuDisc: 1}
	if err := on.Netlink().LinkAdd(link); err != nil {
		return err
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: greAddr(id, last).AsSlice(), Mask: net.CIDRMask(24, 32)}}
	return errors.Join(on.Netlink().AddrAdd(link, address), on.Netlink().LinkSetUp(link))
}

// assertSCTP has messages return, or be refused on their way to the world.
func assertSCTP(t *testing.T, pod *lab.Pod, peer *lab.Namespace, family wire.Family) {
	t.Helper()
	at := serveSCTP(t, peer, family)
	if at.Addr() == lab.OutsideAddr[family] {
		assertRefused(t, pod.Node, func() {
			if conn, err := dialSCTP(pod.Namespace, at, 300*time.Millisecond); err == nil {
				t.Error("an association with the world")
				conn.Close()
			}
		})
		return
	}
	if err := returnSCTP(pod, at); err != nil {
		t.Errorf("SCTP to %s: %v", at, err)
	}
}

// openSCTP makes a socket that is used as one of TCP.
func openSCTP(on *lab.Namespace, own netip.Addr, prepare func(fd int) error) (*os.File, error) {
	domain, at := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: own.As16()})
	if own.Is4() {
		domain, at = unix.AF_INET, &unix.SockaddrInet4{Addr: own.As4()}
	}
	fd := -1
	err := on.Do(func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		if err != nil {
			return err
		}
		if err = errors.Join(unix.Bind(fd, at), prepare(fd)); err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "SCTP"), nil
}

// serveSCTP returns what it gets from each association.
func serveSCTP(t *testing.T, on *lab.Namespace, family wire.Family) netip.AddrPort {
	t.Helper()
	socket, err := openSCTP(on, on.AddrOf(family), func(fd int) error { return unix.Listen(fd, 1) })
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	listener, err := net.FileListener(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			_, _ = io.Copy(struct{ io.Writer }{conn}, struct{ io.Reader }{conn}) // the client misses the rest
			conn.Close()
		}
	}()
	return listener.Addr().(*net.TCPAddr).AddrPort()
}

func dialSCTP(from *lab.Namespace, to netip.AddrPort, limit time.Duration) (net.Conn, error) {
	remote := unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		remote = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	timeout := unix.NsecToTimeval(priv.Patience(limit).Nanoseconds())
	socket, err := openSCTP(from, from.AddrOf(wire.FamilyOf(to.Addr())), func(fd int) error {
		return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout), unix.Connect(fd, remote))
	})
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	return net.FileConn(socket)
}

// returnSCTP compares messages of many packets each with what comes back.
func returnSCTP(pod *lab.Pod, to netip.AddrPort) error {
	conn, err := dialSCTP(pod.Namespace, to, answerLimit)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		return err
	}
	for range 10 {
		sent, got := make([]byte, 10_000), make([]byte, 10_000)
		_, _ = rand.Read(sent) // never fails
		_, err := conn.Write(sent)
		if err == nil {
			_, err = io.ReadFull(conn, got)
		}
		if err != nil {
			return err
		}
		if !bytes.Equal(sent, got) {
			return errors.New("other bytes came back than were sent")
		}
	}
	return nil
}
