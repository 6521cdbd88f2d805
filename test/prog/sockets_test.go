package prog

import (
	"net"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"
)

// A port on which the node itself waits for, holds or has just ended a connection is no port for a pod.
func TestHostSocketsAvoided(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			p    packet
			hold func(b *bed)
		}{
			"TCP listener on all addresses": {tcp(podA, 50000, world, 80, syn), func(b *bed) { listen(b, "0.0.0.0", 50000) }},
			"TCP listener on the address":   {tcp(podA, 50000, world, 80, syn), func(b *bed) { listen(b, nodeIP, 50000) }},
			"TCP connection":                {tcp(podA, 50000, nodeOtherIP, 80, syn), func(b *bed) { connect(b) }},
			"TCP in TIME_WAIT":              {tcp(podA, 50000, nodeOtherIP, 80, syn), endConnection},
			"UDP socket":                    {udp(podA, 50000, world, 53), func(b *bed) { listenUDP(b) }},
			"UDP socket, connected":         {udp(podA, 50000, world, 53), func(b *bed) { dialUDP(b) }},
		} {
			t.Run(name, func(t *testing.T) {
				b := newBed(t, f)
				// For the connections the node's second address plays the world.
				must(t, b.destinations.Delete(b.hostKey(nodeOtherIP)))
				c.hold(b)
				r := b.toUplink(c.p).is("stack").valid()
				if v := r.view(); v.src != nodeIP || v.sport == 50000 || v.sport < 49152 {
					t.Errorf("left as %v", v)
				}
				r = b.toUplink(c.p.with(func(p *packet) { p.dport++; p.sport = 50001 })).is("stack")
				if v := r.view(); v.sport != 50001 {
					t.Errorf("a free port was passed over: left as %v", v)
				}
			})
		}
	})
}

// A socket of another protocol, or to another host, holds no port.
func TestHostSocketsOfOthers(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		listen(b, "0.0.0.0", 50000)
		dialUDP(b) // from 50000 to world:53
		b.fromPod(udp(podA, 50000, world, 54)).is("forwarded").flow("udp " + nodeIP + ":50000 > " + world + ":54")
		b.fromPod(ping(podA, 50000, world)).is("forwarded").flow("icmp " + nodeIP + ":50000 > " + world + ":0")
	})
}

// With every port but one of the range listened on, that one is found or the packet refused; never another taken.
func TestHostSocketsFillRange(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f, withPorts(50000, 50003))
		for p := 50000; p < 50003; p++ {
			listen(b, "0.0.0.0", p)
		}
		r := b.fromPod(tcp(podA, 1, world, 80, syn))
		r.is("forwarded").flow("tcp " + nodeIP + ":50003 > " + world + ":80")
		b.turnedAway(tcp(podA, 60, world, 80, syn), "drop SNAT_EXHAUSTED")
		b.count(1, 0)
	})
}

// network is the family's version of a network, such as "tcp6".
func (f family) network(proto string) string { return proto + each(f, "4", "6") }

// end is an end of a connection.
func (f family) end(name string, port int) string {
	return net.JoinHostPort(f.ip(name).String(), strconv.Itoa(port))
}

func listen(b *bed, address string, port int) net.Listener {
	b.Helper()
	l, err := net.Listen(b.network("tcp"), b.end(address, port))
	must(b, err)
	b.Cleanup(func() { l.Close() })
	return l
}

func listenUDP(b *bed) {
	b.Helper()
	c, err := net.ListenPacket(b.network("udp"), b.end("0.0.0.0", 50000))
	must(b, err)
	b.Cleanup(func() { c.Close() })
}

func dialUDP(b *bed) {
	b.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: b.netIP(nodeIP), Port: 50000}}
	c, err := d.Dial(b.network("udp"), b.end(world, 53)) // sends nothing
	must(b, err)
	b.Cleanup(func() { c.Close() })
}

// endConnection waits for TIME_WAIT, for in the moment of the change to it the kernel finds no socket.
func endConnection(b *bed) {
	b.Helper()
	connect(b).Close()
	inTimeWait := regexp.MustCompile(`(?m)^ *\d+: [0-9A-F]+:C350 [0-9A-F]+:0050 06 `)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		sockets, err := os.ReadFile("/proc/thread-self/net/tcp" + each(b.family, "", "6"))
		must(b, err)
		if inTimeWait.Match(sockets) {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("no connection of port 50000 is in TIME_WAIT:\n%s", sockets)
		}
	}
}

// connect makes a connection within the node, from its first address and port 50000 to its second, port 80.
func connect(b *bed) net.Conn {
	b.Helper()
	l := listen(b, nodeOtherIP, 80)
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: b.netIP(nodeIP), Port: 50000}, Timeout: 5 * time.Second}
	c, err := d.Dial(b.network("tcp"), b.end(nodeOtherIP, 80))
	must(b, err)
	b.Cleanup(func() { c.Close() })
	server, err := l.Accept()
	must(b, err)
	l.Close()
	b.Cleanup(func() { server.Close() })
	// The end that closes first is the one that waits.
	go func() {
		buffer := make([]byte, 1)
		_, _ = server.Read(buffer)
		server.Close()
	}()
	return c
}
