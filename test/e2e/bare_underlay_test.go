package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// bareLink joins two nodes by interfaces without Ethernet, as a VPN does. It counts the tunnel's packets that it carries.
func bareLink(t *testing.T, a, b *lab.Node) (tunnelled *atomic.Int64) {
	t.Helper()
	tunnelled = new(atomic.Int64)
	ends := [2]*os.File{openTun(t, a, "vpn0"), openTun(t, b, "vpn0")}
	carry := func(from, to *os.File) {
		for packet := make([]byte, 65536); ; {
			n, err := from.Read(packet)
			if err != nil {
				return // closed at the test's end
			}
			if isTunnels(packet[:n]) {
				tunnelled.Add(1)
			}
			_, _ = to.Write(packet[:n]) // what the other end refuses is lost, as on any link
		}
	}
	go carry(ends[0], ends[1])
	go carry(ends[1], ends[0])
	return tunnelled
}

// isTunnels says whether an IP packet without options, or its first fragment, goes to the tunnel's port.
func isTunnels(packet []byte) bool {
	const v4, v6, udp, port = 20, 40, 17, 4789
	header, proto := v4, 9
	if len(packet) > 0 && packet[0]>>4 == 6 {
		header, proto = v6, 6
	}
	return len(packet) > header+4 && packet[proto] == udp && int(packet[header+2])<<8|int(packet[header+3]) == port
}

// Nodes whose InternalIPs lie over a VPN reach each other's pods by the tunnel, with the MTU that the VPN leaves. By the Ethernet
// beside nobody gets in as one of those pods.
func TestTunnelOverNoEthernet(t *testing.T) {
	t.Parallel()
	for _, outer := range families {
		t.Run("over "+outer.String(), func(t *testing.T) {
			t.Parallel()
			l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families}, drops.WrongUplink)
			tunnelled := bareLink(t, l.Nodes[0], l.Nodes[1])
			specs := l.NodeSpecs()
			for i, node := range l.Nodes {
				internal := func(i int) netip.Addr {
					if outer == wire.IPv4 {
						return netip.MustParseAddr(fmt.Sprintf("100.64.0.%d", 1+i))
					}
					return netip.MustParseAddr(fmt.Sprintf("fd64::%d", 1+i))
				}
				runOn(t, node, "ip", "link", "set", "vpn0", "mtu", "1400")
				runOn(t, node, "ip", "addr", "add", internal(i).String(), "dev", "vpn0")
				runOn(t, node, "ip", "route", "add", internal(1-i).String(), "dev", "vpn0")
				specs[i].InternalIPs = []netip.Addr{internal(i)}
			}
			if err := l.WriteNodes(specs...); err != nil {
				t.Fatal(err)
			}
			startAgents(t, l)
			a, b := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")
			for _, f := range families {
				for _, ends := range [][2]*lab.Pod{{a, b}, {b, a}} {
					at := serveOver(t, ends[1].Namespace, f)
					before := tunnelled.Load()
					assertReaches(t, ends[0].Namespace, at, ends[0].AddrOf(f))
					if _, err := ends[0].Transfer(within(t, 20*time.Second), at, 1<<20); err != nil {
						t.Error(err)
					}
					if _, err := ends[0].UDP(t.Context(), at, 4000); err != nil {
						t.Error(err)
					}
					if tunnelled.Load() == before {
						t.Errorf("to %s nothing came through the tunnel over the VPN", at)
					}
				}
			}
			statusSays(t, l.Nodes[0], "No problems")
			for _, f := range families {
				assertNotForged(t, l, f, a, b)
			}
		})
	}
}

// assertNotForged has a host on the nodes' Ethernet send to a pod of the first node with the address of one of the second's.
func assertNotForged(t *testing.T, l *lab.Lab, f wire.Family, to, as *lab.Pod) {
	t.Helper()
	node, addr := l.Nodes[0], as.AddrOf(f)
	lo, err := l.Outside.Netlink().LinkByName("lo")
	if err == nil {
		err = l.Outside.Netlink().AddrAdd(lo, &netlink.Addr{IPNet: prefix(netip.PrefixFrom(addr, addr.BitLen()).String())})
	}
	if err == nil {
		err = l.Outside.AddRoute(netip.PrefixFrom(to.AddrOf(f), addr.BitLen()), node.AddrOf(f), "")
	}
	if err != nil {
		t.Fatal(err)
	}
	server := listenUDP(t, to.Namespace, netip.AddrPortFrom(to.AddrOf(f), 0))
	client := openUDP(t, l.Outside, func() (*net.UDPConn, error) {
		return net.DialUDP(udpSockets[f], &net.UDPAddr{IP: addr.AsSlice()}, server.LocalAddr().(*net.UDPAddr))
	})
	before := dropped(t, node, drops.WrongUplink)
	send(t, client, "forged")
	eventually(t, answerLimit, "the forged datagram is dropped", func() bool { return dropped(t, node, drops.WrongUplink) > before })
	if err := server.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, from, err := server.ReadFromUDPAddrPort(make([]byte, 100)); err == nil {
		t.Errorf("the pod got %d bytes from %s", n, from)
	}
}
