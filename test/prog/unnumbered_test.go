package prog

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Routes of IPv4 whose next hop has an address of IPv6 (RFC 5549), as between routers whose links have no IPv4 addresses.

// unnumberedIP is a router that resolves, silentRouterIP one that does not.
const (
	unnumberedIP   = "fe80::1"
	silentRouterIP = "fe80::77"
)

// unnumber lets routes of IPv4 lead over an uplink to a router with an address of IPv6.
func (b *bed) unnumber(l veth, router string, prefixes ...string) {
	b.Helper()
	hop := net.ParseIP(router)
	if router == unnumberedIP {
		must(b, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.index, Family: unix.AF_INET6, State: unix.NUD_PERMANENT, IP: hop, HardwareAddr: l.peer,
		}))
	}
	for _, prefix := range prefixes {
		must(b, netlink.RouteReplace(&netlink.Route{
			LinkIndex: l.index, Dst: inIPv4.ipNet(prefix), Via: &netlink.Via{AddrFamily: unix.AF_INET6, Addr: hop},
		}))
	}
}

// A pod's packets take such a route like any other, and flows to the world are masqueraded.
func TestUnnumbered(t *testing.T) {
	b := newBed(t, inIPv4)
	b.unnumber(b.uplink, unnumberedIP, "0.0.0.0/0", node2IP+"/32")
	b.unnumber(b.other, unnumberedIP, world2+"/32")
	for range 2 {
		out := udp(podA, 50000, world, 53)
		r := b.fromPod(out).is("forwarded").valid().flow("udp " + nodeIP + ":50000 > " + world + ":53")
		b.fromUplink(answer(r, out)).is("delivered").flow("udp " + world + ":53 > " + podA + ":50000")
		b.fromPod(tcp(podA, 50001, world2, 80, syn)).is("forwarded").flow("tcp " + nodeOtherIP + ":50001 > " + world2 + ":80")
	}
	b.fromPod(udp(podA, 50000, native, 53)).is("forwarded").flow("udp " + podA + ":50000 > " + native + ":53")
	b.fromPod(udp(podA, 50000, node2IP, 53)).is("forwarded").flow("udp " + podA + ":50000 > " + node2IP + ":53")
	b.fromPod(udp(podA, 50000, beyond, 53)).is("forwarded")
	b.answers = true
	b.fromPod(udp(podA, 50000, world, 53).with(func(p *packet) { p.payload, p.fragment = make([]byte, 1500), 0x4000 })).is("drop TOO_BIG")
}

// The program caches the next hop with its family.
func TestUnnumberedIsCached(t *testing.T) {
	b := newBed(t, inIPv4, withPaths(time.Minute))
	b.unnumber(b.uplink, unnumberedIP, "0.0.0.0/0")
	for range 3 {
		b.fromPod(udp(podA, 50000, world, 53)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":53")
	}
}

// Routers that do not resolve are few: they are asked for whatever a pod sends, past the stack at first. Answers of Services go on past the stack.
func TestSilentUnnumbered(t *testing.T) {
	b := newBed(t, inIPv4, withServices)
	b.unnumber(b.uplink, silentRouterIP, "0.0.0.0/0")
	for i := range 150 {
		b.fromPod(udp(podA, 5000, fmt.Sprintf("198.51.100.%d", 50+i), 53)).is("forwarded")
	}
	b.serve(vip, 80, wire.UDP, podB+":8080").nodePort(30080, 0)
	for i := range 150 {
		p := udp(fmt.Sprintf("198.51.100.%d", 50+i), 5000, nodeIP, 30080)
		b.back(b.fromUplink(p).is("delivered"), p).is("forwarded").flow(ends(p.proto, nodeIP, 30080, p.src, 5000))
	}
}

// Clients outside reach NodePorts and host ports of a node whose routes are such.
func TestNodePortUnnumbered(t *testing.T) {
	for _, proto := range []wire.Protocol{wire.TCP, wire.UDP} {
		for end, want := range map[string]string{
			podB: "delivered", podC: "delivered", nodeIP: "stack",
			remote: "forwarded", beyond: "forwarded", node2IP: "forwarded", node5IP: "forwarded", native: "forwarded", world2: "forwarded",
		} {
			t.Run(fmt.Sprintf("%v to %s", proto, end), func(t *testing.T) {
				b := newBed(t, inIPv4, withServices)
				b.unnumber(b.uplink, unnumberedIP, "0.0.0.0/0")
				b.unnumber(b.other, unnumberedIP, world2+"/32")
				b.serve(vip, 80, proto, end+":8080").nodePort(30080, 0)
				tellNodePort(b, initial(proto, world, 5000, nodeIP, 30080), end, want)
			})
		}
		t.Run(fmt.Sprintf("%v to a host port", proto), func(t *testing.T) {
			b := newBed(t, inIPv4, withServices)
			b.unnumber(b.uplink, unnumberedIP, "0.0.0.0/0")
			b.hostPort(nodeIP, 80, proto, podB)
			tellNodePort(b, initial(proto, world, 5000, nodeIP, 80), podB, "delivered")
		})
	}
}

// On the wire such a packet is one of IPv4, in a frame to the router's Ethernet address.
func TestUnnumberedOnTheWire(t *testing.T) {
	b := newBed(t, inIPv4)
	router := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
	b.unnumber(b.uplink, silentRouterIP, "0.0.0.0/0")
	must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: b.uplink.index, Family: unix.AF_INET6, State: unix.NUD_PERMANENT, IP: net.ParseIP(silentRouterIP), HardwareAddr: router,
	}))
	l := b.pods[podA]
	send, frames := b.onWire(wire.FromPod, l, "ecprpod0-p"), capture(b, "ecprup-p")
	p := udp(podA, 50000, world, 53)
	p.macTo, p.macFrom = l.mac, l.peer
	if got := send(p.bytes(b.family)); got != "forwarded" {
		t.Fatalf("outcome %q", got)
	}
	frame := frames(func(frame []byte) bool { return bytes.Equal(frame[:6], router) })
	v, err := read(frame)
	must(t, err)
	if want := "udp " + nodeIP + ":50000 > " + world + ":53"; v.String() != want || !bytes.Equal(frame[6:14], append(bytes.Clone(b.uplink.mac), 8, 0)) {
		t.Errorf("left as %v in % x, want %s", v, frame[:14], want)
	}
}

// capture returns a function that waits for a frame that arrives at an interface from now on.
func capture(b *bed, name string) func(wanted func(frame []byte) bool) []byte {
	b.Helper()
	const allFrames = 0x0300 // ETH_P_ALL in network byte order
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, allFrames)
	must(b, err)
	b.Cleanup(func() { unix.Close(socket) })
	on, err := net.InterfaceByName(name)
	must(b, err)
	must(b, unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: allFrames, Ifindex: on.Index}))
	limit := priv.Patience(5 * time.Second)
	timeout := unix.NsecToTimeval(int64(limit))
	must(b, unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	return func(wanted func([]byte) bool) []byte {
		b.Helper()
		frame := make([]byte, 2*mtu)
		for deadline := time.Now().Add(limit); time.Now().Before(deadline); {
			n, _, err := unix.Recvfrom(socket, frame, 0)
			must(b, err)
			if wanted(frame[:n]) {
				return frame[:n]
			}
		}
		b.Fatalf("%s got no such frame within %v", name, limit)
		return nil
	}
}
