package e2e

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// A pod sends ICMP errors that quote packets of others' connections. Those go on.
func TestForgedErrorEndsNoConnection(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach}}, drops.ForgedError)
		node := l.Nodes[0]
		victim, forger := addPod(t, node, "victim"), addPod(t, node, "forger")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			outside := lab.OutsideAddr[family]
			world, inside := serveOver(t, l.Outside, family), serveOver(t, victim.Namespace, family)
			if err := l.Outside.AddRoute(node.PodCIDROf(family), node.AddrOf(family), ""); err != nil {
				t.Fatal(err)
			}
			const outsidePort = 7001
			at := netip.AddrPortFrom
			all := []struct {
				name     string
				from     *lab.Namespace
				to       netip.AddrPort
				port     uint16
				src, dst netip.AddrPort // of a packet that reached the victim
			}{
				{"masqueraded", victim.Namespace, world, inRange, world, at(victim.AddrOf(family), inRange)},
				{"opened by the world", l.Outside, inside, outsidePort, at(outside, outsidePort), inside},
				{"the node's, whose port a pod has", node.Namespace, world, inRange, world, at(node.AddrOf(family), inRange)},
			}
			var streams []*lab.TCPConn
			for _, c := range all {
				stream, err := c.from.DialTCP(t.Context(), c.to, c.port)
				if err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				t.Cleanup(func() { stream.Close() })
				streams = append(streams, stream)
			}
			for i, c := range all {
				before := dropped(t, node, drops.ForgedError)
				for _, kind := range []lab.ICMPKind{lab.PortUnreachable[family], lab.TooBig[family], lab.TimeExceeded[family]} {
					if err := forger.SendRaw(icmpError(t, forger.AddrOf(family), outside, kind, segment(t, c.src, c.dst))); err != nil {
						t.Fatal(err)
					}
				}
				eventually(t, answerLimit, "the errors are counted", func() bool { return dropped(t, node, drops.ForgedError) == before+3 })
				if err := streams[i].Echo(within(t, answerLimit), 10_000); err != nil {
					t.Errorf("%s: %v", c.name, err)
				}
			}
		})
	})
}

// Beside netfilter, and a rule that drops what it calls INVALID, a pod learns from another node what it learns without:
// netfilter has not seen the flow that the error is about.
func TestErrorsOfAnotherNodeBesideNetfilter(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		p := startProxied(t, lab.Options{AgentFlags: []string{flag}}, drops.NoEndpoint)
		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		far := p.Nodes[1]
		// What waits for a neighbour passes the stack, and netfilter knows it.
		if _, err := p.client.Ping(t.Context(), p.remote.Addr(), lab.PingOptions{}); err != nil {
			t.Fatal(err)
		}
		expect := func(name string, to netip.Addr, opts lab.PingOptions, kind lab.ICMPKind) {
			t.Helper()
			_, err := p.client.Ping(within(t, answerLimit), to, opts)
			complaint, ok := errors.AsType[*lab.ICMPError](err)
			if !ok {
				t.Errorf("%s: %v", name, err)
			} else if complaint.ICMPKind != kind || complaint.From != far.Addr() || complaint.InnerSource != p.client.Addr() {
				t.Errorf("%s: %v, want %v from %s", name, complaint, kind, far.Addr())
			}
		}
		expect("an address that no pod has", inNetwork(far.PodCIDR(), 200), lab.PingOptions{}, lab.RouteUnreachable[p.family()])
		expect("TTL 2", p.remote.Addr(), lab.PingOptions{TTL: 2}, lab.TimeExceeded[p.family()])

		// Without the program that passes it by, the other node's stack looks at the MTU.
		m := newMaimed(p.Lab, far, p.remote, flag)
		if err := far.KillAgent(); err != nil {
			t.Fatal(err)
		}
		if err := far.SetMTU(p.remote.Result.Interfaces[0].Name, 1300); err != nil {
			t.Fatal(err)
		}
		m.remove(t, m.place(t, attach.FromUplink), attach.FromUplink)
		expect("a smaller MTU", p.remote.Addr(), lab.PingOptions{Size: 1400, DontFragment: true}, lab.TooBig[p.family()])
	})
}

// The node's stack cannot forward an answer to a pod: the world reads of the packet that it sent, and acts on it.
func TestErrorsOfTheNodeAboutAnswers(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach, "--mtu=1400", "--kube-proxy=on"}})
		pod := addPod(t, l.Nodes[0], "a")
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			world, set := netip.AddrPortFrom(lab.OutsideAddr[family], 7000), socketOptions[family]
			outside, inside := listenUDP(t, l.Outside, world), dialUDP(t, pod.Namespace, 5000, world)
			send(t, inside, "hello")
			from := receive(t, outside, "hello")
			outside.Close()
			capture, err := l.Outside.Capture(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			answer := openUDP(t, l.Outside, func() (*net.UDPConn, error) {
				return net.DialUDP(udpSockets[family], net.UDPAddrFromAddrPort(world), net.UDPAddrFromAddrPort(from))
			})
			set.on(t, answer, set.mtuDiscover, unix.IP_PMTUDISC_DO)
			eventually(t, answerLimit, "the world knows the smaller MTU", func() bool {
				_, err := answer.Write(make([]byte, 1440))
				return errors.Is(err, unix.EMSGSIZE)
			})
			set.on(t, answer, set.mtuDiscover, unix.IP_PMTUDISC_WANT)
			for { // until the socket has told of every error
				if _, err := answer.Write([]byte("small")); err == nil {
					break
				}
			}
			receive(t, inside, "small")
			large := strings.Repeat("x", 1440)
			send(t, answer, large)
			receive(t, inside, large)
			set.on(t, answer, set.hops, 1)
			send(t, answer, "no further")
			wants := map[lab.ICMPKind]bool{lab.TooBig[family]: true, lab.TimeExceeded[family]: true}
			time.Sleep(100 * time.Millisecond)
			for _, packet := range capture.Close() {
				kind, quoted, ok := icmpErrorIn(packet)
				if !ok {
					continue
				}
				delete(wants, kind)
				ip, _ := ipHeaderOf(quoted.NetworkLayer())
				if len(ip.payload) < 4 {
					t.Errorf("a short quote: %s", packet)
					continue
				}
				if to := netip.AddrPortFrom(ip.destination, binary.BigEndian.Uint16(ip.payload[2:])); to != from {
					t.Errorf("ICMP error %v quotes a packet to %s, the world sent to %s", kind, to, from)
				}
			}
			if len(wants) > 0 {
				t.Errorf("the world has not seen the ICMP errors %v", wants)
			}
		})
	})
}

// socketOptions are the families' names for the same options of a socket, whose values are the same.
var socketOptions = [wire.Families]socketOption{
	wire.IPv4: {unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_TTL},
	wire.IPv6: {unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_UNICAST_HOPS},
}

type socketOption struct{ level, mtuDiscover, hops int }

func (o socketOption) on(t *testing.T, conn *net.UDPConn, option, value int) {
	t.Helper()
	setOption(t, conn, o.level, option, value)
}

// setOption sets an option of a socket.
func setOption(t *testing.T, conn *net.UDPConn, level, option, value int) {
	t.Helper()
	if err := trySetOption(conn, level, option, value); err != nil {
		t.Fatal(err)
	}
}

func trySetOption(conn *net.UDPConn, level, option, value int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	if errs := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, value) }); errs != nil {
		return errs
	}
	return err
}
