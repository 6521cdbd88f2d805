package e2e

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	unreachable        = 3
	hostUnreachable    = 1
	fragmentationNeeds = 4
	timeExceeded       = 11
)

// A pod sends ICMP errors that quote packets of others' connections. Those go on.
func TestForgedErrorEndsNoConnection(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach}}, drops.ForgedError)
		node := l.Nodes[0]
		victim, forger := addPod(t, node, "victim"), addPod(t, node, "forger")
		world, inside := serve(t, l.Outside), serve(t, victim.Namespace)
		if err := l.Outside.AddRoute(node.PodCIDR(), node.Addr(), ""); err != nil {
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
			{"masqueraded", victim.Namespace, world, inRange, world, at(victim.Addr(), inRange)},
			{"opened by the world", l.Outside, inside, outsidePort, at(lab.OutsideAddr[wire.IPv4], outsidePort), inside},
			{"the node's, whose port a pod has", node.Namespace, world, inRange, world, at(node.Addr(), inRange)},
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
			for _, kind := range []layers.ICMPv4TypeCode{
				layers.CreateICMPv4TypeCode(unreachable, 3), layers.CreateICMPv4TypeCode(unreachable, fragmentationNeeds),
				layers.CreateICMPv4TypeCode(timeExceeded, 0),
			} {
				complain(t, forger.Namespace, lab.OutsideAddr[wire.IPv4], kind, c.src, c.dst)
			}
			eventually(t, answerLimit, "the errors are counted", func() bool { return dropped(t, node, drops.ForgedError) == before+3 })
			if err := streams[i].Echo(within(t, answerLimit), 10_000); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	})
}

// complain sends an ICMP error about a TCP segment between two parties.
func complain(t *testing.T, from *lab.Namespace, to netip.Addr, kind layers.ICMPv4TypeCode, src, dst netip.AddrPort) {
	t.Helper()
	ip := &layers.IPv4{Version: 4, TTL: 60, Protocol: layers.IPProtocolTCP, SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice()}
	tcp := &layers.TCP{SrcPort: layers.TCPPort(src.Port()), DstPort: layers.TCPPort(dst.Port()), ACK: true}
	if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	message := gopacket.NewSerializeBuffer()
	fixed := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(message, fixed, &layers.ICMPv4{TypeCode: kind}, ip, tcp); err != nil {
		t.Fatal(err)
	}
	err := from.Do(func() error {
		conn, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.WriteTo(message.Bytes(), &net.IPAddr{IP: to.AsSlice()})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Beside netfilter, and a rule that drops what it calls INVALID, a pod learns from another node what it learns without:
// netfilter has not seen the flow that the error is about.
func TestErrorsOfAnotherNodeBesideNetfilter(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, flag string) {
		p := startProxied(t, lab.Options{AgentFlags: []string{flag}}, drops.NoEndpoint)
		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		far := p.Nodes[1]
		// What waits for a neighbour passes the stack, and netfilter knows it.
		if _, err := p.client.Ping(t.Context(), p.remote.Addr(), lab.PingOptions{}); err != nil {
			t.Fatal(err)
		}
		expect := func(name string, to netip.Addr, opts lab.PingOptions, kind, code uint8) {
			t.Helper()
			_, err := p.client.Ping(within(t, answerLimit), to, opts)
			complaint, ok := errors.AsType[*lab.ICMPError](err)
			if !ok {
				t.Errorf("%s: %v", name, err)
			} else if complaint.Type != kind || complaint.Code != code || complaint.From != far.Addr() || complaint.InnerSource != p.client.Addr() {
				t.Errorf("%s: %v, want type %d code %d from %s", name, complaint, kind, code, far.Addr())
			}
		}
		expect("an address that no pod has", netip.AddrFrom4([4]byte{10, 244, far.PodCIDR().Addr().As4()[2], 200}), lab.PingOptions{}, unreachable, hostUnreachable)
		expect("TTL 2", p.remote.Addr(), lab.PingOptions{TTL: 2}, timeExceeded, 0)

		// Without the program that passes it by, the other node's stack looks at the MTU.
		m := newMaimed(p.Lab, far, p.remote, flag)
		if err := far.KillAgent(); err != nil {
			t.Fatal(err)
		}
		if err := far.SetMTU(p.remote.Result.Interfaces[0].Name, 1300); err != nil {
			t.Fatal(err)
		}
		m.remove(t, m.place(t, attach.FromUplink), attach.FromUplink)
		expect("a smaller MTU", p.remote.Addr(), lab.PingOptions{Size: 1400, DontFragment: true}, unreachable, fragmentationNeeds)
	})
}

// The node's stack cannot forward an answer to a pod: the world reads of the packet that it sent, and acts on it.
func TestErrorsOfTheNodeAboutAnswers(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach, "--mtu=1400", "--kube-proxy=on"}})
		pod, world := addPod(t, l.Nodes[0], "a"), netip.AddrPortFrom(lab.OutsideAddr[wire.IPv4], 7000)
		outside, inside := listenUDP(t, l.Outside, world), dialUDP(t, pod.Namespace, 5000, world)
		send(t, inside, "hello")
		from := receive(t, outside, "hello")
		outside.Close()
		capture, err := l.Outside.Capture(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		answer := openUDP(t, l.Outside, func() (*net.UDPConn, error) {
			return net.DialUDP("udp4", net.UDPAddrFromAddrPort(world), net.UDPAddrFromAddrPort(from))
		})
		setIP(t, answer, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		eventually(t, answerLimit, "the world knows the smaller MTU", func() bool {
			_, err := answer.Write(make([]byte, 1440))
			return errors.Is(err, unix.EMSGSIZE)
		})
		setIP(t, answer, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_WANT)
		for { // until the socket has told of every error
			if _, err := answer.Write([]byte("small")); err == nil {
				break
			}
		}
		receive(t, inside, "small")
		large := strings.Repeat("x", 1440)
		send(t, answer, large)
		receive(t, inside, large)
		setIP(t, answer, unix.IP_TTL, 1)
		send(t, answer, "no further")
		wants := map[uint8]bool{unreachable: true, timeExceeded: true}
		time.Sleep(100 * time.Millisecond)
		for _, packet := range capture.Close() {
			icmp, ok := packet.Layer(layers.LayerTypeICMPv4).(*layers.ICMPv4)
			if !ok {
				continue
			}
			delete(wants, icmp.TypeCode.Type())
			quote := icmp.Payload
			if len(quote) < 28 {
				t.Errorf("a short quote: %s", packet)
				continue
			}
			to := netip.AddrPortFrom(netip.AddrFrom4([4]byte(quote[16:20])), binary.BigEndian.Uint16(quote[22:]))
			if to != from {
				t.Errorf("ICMP error %s quotes a packet to %s, the world sent to %s", icmp.TypeCode, to, from)
			}
		}
		if len(wants) > 0 {
			t.Errorf("the world has not seen ICMP errors of types %v", wants)
		}
	})
}

// setIP sets an option of a socket.
func setIP(t *testing.T, conn *net.UDPConn, option, value int) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if errs := errors.Join(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, option, value) }), err); errs != nil {
		t.Fatal(errs)
	}
}
