package prog

import (
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// outer is what another host sees of a packet in the tunnel.
type outer struct {
	view
	tos   uint8
	whole bool // IPv4 forbids to fragment it
	udp   *layers.UDP
	vni   uint32
	inner []byte // the frame
}

// readOuter takes a frame apart; false: it is none of the tunnel's.
func readOuter(frame []byte) (o outer, ok bool) {
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
	vxlan, ok := p.Layer(layers.LayerTypeVXLAN).(*layers.VXLAN)
	if !ok {
		return o, false
	}
	switch ip := p.NetworkLayer().(type) {
	case *layers.IPv4:
		o.tos, o.whole = ip.TOS, ip.Flags&layers.IPv4DontFragment != 0
	case *layers.IPv6:
		o.tos = ip.TrafficClass
	}
	o.view, _ = read(frame)
	o.udp, _ = p.Layer(layers.LayerTypeUDP).(*layers.UDP)
	o.vni, o.inner = vxlan.VNI, vxlan.Payload
	return o, true
}

// through is the frame, from a node, in the tunnel to this one over a family.
func (b *bed) through(over family, node string, inner []byte) []byte {
	b.Helper()
	p := udp(node, 55555, nodeIP, tunnelPort)
	p.payload = append([]byte{8, 0, 0, 0, 0, vni >> 8, vni & 0xff, 0}, inner...)
	p.macTo, p.macFrom = b.uplink.mac, b.uplink.peer
	return p.bytes(over)
}

// link is the other end of one of the node's links.
type link struct {
	*bed
	socket int
	to     unix.SockaddrLinklayer
}

func (b *bed) linkTo(peer string) link {
	b.Helper()
	all := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, int(all))
	must(b, err)
	b.Cleanup(func() { unix.Close(socket) })
	from, err := net.InterfaceByName(peer)
	must(b, err)
	l := link{b, socket, unix.SockaddrLinklayer{Ifindex: from.Index, Protocol: all}}
	must(b, unix.Bind(socket, &l.to))
	must(b, unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	return l
}

func (l link) send(frame []byte) {
	l.Helper()
	must(l, unix.Sendto(l.socket, frame, 0, &l.to))
}

// waits says whether a frame arrives that found accepts; again is called while there is none.
func (l link) waits(found func(frame []byte) bool, again func()) bool {
	l.Helper()
	frame := make([]byte, 16384)
	for deadline := time.Now().Add(priv.Patience(5 * time.Second)); time.Now().Before(deadline); {
		again()
		for {
			n, _, err := unix.Recvfrom(l.socket, frame, 0)
			if err != nil {
				break
			}
			if found(bytes.Clone(frame[:n])) {
				return true
			}
		}
	}
	return false
}

// encapsulated waits for a packet in the tunnel whose inner flow is the one given; again is called while there is none.
func (l link) encapsulated(flow string, again func()) (o outer) {
	l.Helper()
	if !l.waits(func(frame []byte) (ok bool) {
		if o, ok = readOuter(frame); !ok {
			return false
		}
		v, err := read(o.inner)
		return err == nil && v.String() == flow
	}, again) {
		l.Fatalf("no packet %q in the tunnel", flow)
	}
	return o
}

// is asserts what every outer packet of ours has.
func (o outer) is(t *testing.T, over family, tos uint8, sum bool) {
	t.Helper()
	if o.family != over || o.src != nodeIP || o.dst != node5IP || o.dport != tunnelPort || o.vni != vni {
		t.Errorf("outer packet %v, VNI %d", o.view, o.vni)
	}
	if o.ttl != 64 || o.whole {
		t.Errorf("outer TTL %d, may be fragmented: %v", o.ttl, !o.whole)
	}
	if o.tos != tos {
		t.Errorf("outer TOS %#x, want the inner one's, %#x", o.tos, tos)
	}
	if got := o.udp.Checksum != 0; got != sum {
		t.Errorf("outer UDP checksum %#x", o.udp.Checksum)
	}
}

// Other nodes compare the outer source, so it is the InternalIP, whichever address the kernel would choose.
func TestOuterSource(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		v, err := b.config.Get(config.Key{})
		must(t, err)
		v.Tunnel[f.Family].Source = b.addr(nodeOtherIP)
		must(t, b.config.Put(config.Key{}, v))
		b.attach(wire.FromPod, b.pods[podA].index)
		pod, far := b.linkTo("ecprpod0-p"), b.linkTo("ecprup-p")
		l := b.pods[podA]
		p := udp(podA, 5000, beyond, 53).with(func(p *packet) { p.macTo, p.macFrom = l.mac, l.peer })
		o := far.encapsulated("udp "+podA+":5000 > "+beyond+":53", func() { pod.send(p.bytes(b.family)) })
		if o.src != nodeOtherIP {
			t.Errorf("outer source %v, want %s", o.src, nodeOtherIP)
		}
	})
}

// A ping from beyond the tunnel is answered through it: the kernel's device gives and takes the keys.
func TestTunnelOnTheWire(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		for name, c := range map[string]struct {
			with option
			sum  bool
		}{
			"with checksum":    {func(*config.NodeConfig) {}, true},
			"without checksum": {func(c *config.NodeConfig) { c.TunnelChecksum = 0 }, false},
		} {
			t.Run(name, func(t *testing.T) {
				inEachFamily(t, func(t *testing.T, over family) {
					b := newBed(t, f, c.with)
					b.tunnelOver(over)
					b.attach(wire.FromTunnel, b.tunnel)
					b.attach(wire.ToTunnel, b.tunnel)
					far := b.linkTo("ecprup-p")
					const tos = 0xb8 | 2 // expedited forwarding, ECN-capable
					p := ping(beyond, 7, nodeIP).with(func(p *packet) { p.tos = tos })
					o := far.encapsulated("icmp "+nodeIP+":0 > "+beyond+":7", func() { far.send(b.through(over, node5IP, p.bytes(f))) })
					o.is(t, over, tos, c.sum || over == inIPv6) // which has to have one
					must(t, sumsValid(o.inner))
				})
			})
		}
	})
}
