package prog

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ownsSockets has the node's namespace be the one of podA's sockets, with podA's address.
func (b *bed) ownsSockets() {
	b.Helper()
	ns, err := os.Open("/proc/thread-self/ns/net")
	must(b, err)
	defer ns.Close()
	const number = 7
	must(b, netlink.SetNetNsIdByFd(int(ns.Fd()), number))
	lo, err := netlink.LinkByName("lo")
	must(b, err)
	assign(b, lo, podA+"/32")
	v := b.device(podA)
	v.Netns = number + 1
	must(b, b.devices.Put(devices.Key{Ifindex: uint32(b.pods[podA].index)}, v))
}

// A port from which the pod is connected straight to the backend is no port for a flow to its Service; one on which it
// only listens is.
func TestServiceBesideSockets(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			p     packet
			hold  func(b *bed)
			moved bool
		}{
			"UDP, connected":  {udp(podA, 50000, vip, 80), func(b *bed) { b.dialUDPFrom(podA, 50000, remote, 80) }, true},
			"UDP, to another": {udp(podA, 50000, vip, 80), func(b *bed) { b.dialUDPFrom(podA, 50000, remote, 81) }, false},
			"UDP":             {udp(podA, 50000, vip, 80), func(b *bed) { b.openUDP(podA, 50000) }, false},
			"TCP, listening":  {tcp(podA, 50000, vip, 80, syn), func(b *bed) { listen(b, podA, 50000) }, false},
			"TCP, connecting": {tcp(podA, 50000, vip, 80, syn), func(b *bed) { b.dialTCPFrom(podA, 50000, remote, 80) }, true},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f, withServices)
				b.ownsSockets()
				b.serve(vip, 80, c.p.proto, remote+":80")
				c.hold(b)
				r := b.fromPod(c.p).is("forwarded").valid()
				if v := r.view(); (v.sport != 50000) != c.moved {
					t.Errorf("left as %v", v)
				}
				b.back(r, c.p).is("delivered").flow(ends(c.p.proto, vip, 80, podA, 50000))
			})
		}
	})
}

// The same of a backend that has a socket connected to the client; one of the host's on the same tuple is not its own.
func TestNodePortBesideSockets(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, own := range []bool{false, true} {
			b := newBed(t, f, withServices)
			b.ownsSockets()
			if !own {
				b.addPod(podA)
			}
			b.serve(vip, 80, wire.UDP, podA+":8080").nodePort(30080, 0)
			b.dialUDPFrom(podA, 8080, world, 5000)
			if v := b.fromUplink(udp(world, 5000, nodeIP, 30080)).is("delivered").view(); (v.sport != 5000) != own {
				t.Errorf("the pod's own %t: left as %v", own, v)
			}
		}
	})
}

func (b *bed) openUDP(src string, sport int) net.PacketConn {
	b.Helper()
	c, err := net.ListenPacket(b.network("udp"), b.end(src, sport))
	must(b, err)
	b.Cleanup(func() { c.Close() })
	return c
}

func (b *bed) dialUDPFrom(src string, sport int, dst string, dport int) {
	b.Helper()
	c, err := net.DialUDP(b.network("udp"), &net.UDPAddr{IP: b.netIP(src), Port: sport}, &net.UDPAddr{IP: b.netIP(dst), Port: dport})
	must(b, err)
	b.Cleanup(func() { c.Close() })
}

// dialTCPFrom begins a connection that nobody answers.
func (b *bed) dialTCPFrom(src string, sport int, dst string, dport int) {
	b.Helper()
	fd, err := unix.Socket(each(b.family, unix.AF_INET, unix.AF_INET6), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	must(b, err)
	b.Cleanup(func() { unix.Close(fd) })
	must(b, unix.Bind(fd, b.sockaddr(src, sport)))
	if err := unix.Connect(fd, b.sockaddr(dst, dport)); !errors.Is(err, unix.EINPROGRESS) {
		b.Fatalf("connect: %v", err)
	}
}

func (f family) sockaddr(address string, port int) unix.Sockaddr {
	a := f.ip(address)
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
	}
	return &unix.SockaddrInet6{Addr: a.As16(), Port: port}
}
