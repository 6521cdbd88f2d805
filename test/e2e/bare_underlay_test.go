package e2e

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// bareLink joins two hosts by interfaces without Ethernet, as a VPN does, and counts the datagrams that it carries.
type bareLink struct {
	tunnelled atomic.Int64
	marked    [2]atomic.Int64 // of those with markedText, to the tunnel's port and the next
}

const markedText = "not the tunnel's"

func joinBare(t *testing.T, a, b *lab.Namespace) *bareLink {
	t.Helper()
	l := &bareLink{}
	ends := [2]*os.File{openTun(t, a, "vpn0"), openTun(t, b, "vpn0")}
	carry := func(from, to *os.File) {
		for packet := make([]byte, 65536); ; {
			n, err := from.Read(packet)
			if err != nil {
				return // closed at the test's end
			}
			l.count(packet[:n])
			_, _ = to.Write(packet[:n]) // what the other end refuses is lost, as on any link
		}
	}
	go carry(ends[0], ends[1])
	go carry(ends[1], ends[0])
	return l
}

// count reads an IP packet without options, or its first fragment.
func (l *bareLink) count(packet []byte) {
	const v4, v6, udp = 20, 40, 17
	header, proto := v4, 9
	if len(packet) > 0 && packet[0]>>4 == 6 {
		header, proto = v6, 6
	}
	if len(packet) < header+4 || packet[proto] != udp {
		return
	}
	port := int(packet[header+2])<<8 | int(packet[header+3])
	switch {
	case bytes.HasSuffix(packet, []byte(markedText)):
		l.marked[port-tunnelPort].Add(1)
	case port == tunnelPort:
		l.tunnelled.Add(1)
	}
}

// Nodes whose InternalIPs lie over a VPN reach each other's pods by the tunnel, with the MTU that the VPN leaves. By the Ethernet
// beside nobody gets in as one of those pods. So it is where a route to more than a node makes the VPN an uplink.
func TestTunnelOverNoEthernet(t *testing.T) {
	t.Parallel()
	for i := range 2 * len(families) {
		outer, uplink := families[i/2], i%2 == 1
		name := "over " + outer.String()
		if uplink {
			name += ", an uplink"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families}, drops.WrongUplink)
			link := joinBare(t, l.Nodes[0].Namespace, l.Nodes[1].Namespace)
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
				if uplink {
					runOn(t, node, "ip", "route", "add", netip.PrefixFrom(internal(0), internal(0).BitLen()-8).Masked().String(), "dev", "vpn0")
				} else {
					runOn(t, node, "ip", "route", "add", internal(1-i).String(), "dev", "vpn0")
				}
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
					before := link.tunnelled.Load()
					assertReaches(t, ends[0].Namespace, at, ends[0].AddrOf(f))
					if _, err := ends[0].Transfer(within(t, 20*time.Second), at, 1<<20); err != nil {
						t.Error(err)
					}
					if _, err := ends[0].UDP(t.Context(), at, 4000); err != nil {
						t.Error(err)
					}
					if link.tunnelled.Load() == before {
						t.Errorf("to %s nothing came through the tunnel over the VPN", at)
					}
				}
			}
			statusSays(t, l.Nodes[0], "No problems")
			for _, f := range families {
				assertNotForged(t, l, f, a, b)
			}
			if out, _ := l.Nodes[0].Ebpfctl(t.Context(), "dump", "uplinks"); strings.Contains(string(out), "bare") != uplink {
				t.Errorf("the uplinks are not as they should be:\n%s", out)
			}
			if !uplink {
				link.assertNotTunnels(t, l, outer, a)
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
		err = l.Outside.Netlink().AddrAdd(lo, &netlink.Addr{IPNet: prefix(netip.PrefixFrom(addr, addr.BitLen()).String()), Flags: unix.IFA_F_NODAD})
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

// assertNotTunnels has a pod send to the tunnel's port by a rule that gives it its node's address on the VPN: the far end would take
// what is inside for the node's.
func (l *bareLink) assertNotTunnels(t *testing.T, in *lab.Lab, f wire.Family, pod *lab.Pod) {
	t.Helper()
	node, to := in.Nodes[0], netip.MustParseAddr("100.64.0.9")
	iptables := "iptables-nft"
	if f == wire.IPv6 {
		to, iptables = netip.MustParseAddr("fd64::9"), "ip6tables-nft"
	}
	runOn(t, node, iptables, "-t", "nat", "-A", "POSTROUTING", "-o", "vpn0", "-j", "MASQUERADE")
	runOn(t, node, "ip", "route", "add", to.String(), "dev", "vpn0")
	own, other := dialUDP(t, pod.Namespace, 0, netip.AddrPortFrom(to, tunnelPort)), dialUDP(t, pod.Namespace, 0, netip.AddrPortFrom(to, tunnelPort+1))
	eventually(t, answerLimit, "datagrams to another port pass", func() bool {
		for _, conn := range []*net.UDPConn{own, other} {
			_, _ = conn.Write([]byte(markedText)) // an error is that of one before
		}
		return l.marked[1].Load() > 3
	})
	if n := l.marked[0].Load(); n > 0 {
		t.Errorf("%d datagrams of the pod's went to the tunnel's port over the VPN", n)
	}
}
