package prog

import (
	"encoding/binary"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// onWire attaches a program to an interface and returns a function that has a frame arrive there from the other end of
// the link, and says what became of it. That is for what BPF_PROG_TEST_RUN does not know, such as VLAN tags, which the
// kernel takes off a frame before our programs see it.
func (b *bed) onWire(d wire.Direction, l veth, peer string) func(frame []byte) string {
	b.Helper()
	b.attach(d, l.index)
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	must(b, err)
	b.Cleanup(func() { unix.Close(socket) })
	from, err := net.InterfaceByName(peer)
	must(b, err)
	return func(frame []byte) string {
		b.Helper()
		before := b.counters(d)
		limit := priv.Patience(5 * time.Second)
		deadline := time.Now().Add(limit)
		for tries := 0; time.Now().Before(deadline); tries++ {
			// A link that has just come up may lose a frame.
			if tries%200 == 0 {
				must(b, unix.Sendto(socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: from.Index}))
			}
			time.Sleep(time.Millisecond)
			for name, v := range b.counters(d) {
				if v.Packets != before[name].Packets && name != traffic.SnatAllocated.String() {
					return name
				}
			}
		}
		b.Fatalf("a frame did not arrive within %v", limit)
		return ""
	}
}

// attach has the program see what passes the interface: by clsact, which every kernel has; it pins nothing, and ends with
// the namespace.
func (b *bed) attach(d wire.Direction, index int) {
	b.Helper()
	_, err := attach.Attacher{Dir: bpffs.Dir(b.TempDir()), Mode: attach.Clsact}.Attach(index, attach.Hook(d.String()), b.programs[d])
	must(b, err)
}

// tagged is the frame with a VLAN tag (IEEE 802.1Q).
func tagged(frame []byte, vlan uint16) []byte {
	out := append(append([]byte{}, frame[:12]...), 0x81, 0, 0, 0)
	binary.BigEndian.PutUint16(out[14:], vlan)
	return append(out, frame[12:]...)
}

// A pod's tag would go out with the packet, into a network of the uplink that is none of its business.
func TestVLANFromPod(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		l := b.pods[podA]
		send := b.onWire(wire.FromPod, l, "ecprpod0-p")
		for _, to := range []string{podB, remote, world, nodeIP} {
			p := udp(podA, 50000, to, 53)
			p.macTo, p.macFrom = l.mac, l.peer
			if got := send(tagged(p.bytes(b.family), 7)); got != "drop NOT_IP" {
				t.Errorf("tagged, to %s: outcome %q", to, got)
			}
		}
		p := udp(podA, 50000, world, 53)
		p.macTo, p.macFrom = l.mac, l.peer
		if got := send(p.bytes(b.family)); got != "forwarded" {
			t.Errorf("untagged: outcome %q", got)
		}
	})
}

// What arrives with a tag belongs to another network than the uplink's own: the stack knows which.
func TestVLANFromUplink(t *testing.T) {
	inEachFamily(t, func(t *testing.T, f family) {
		b := newBed(t, f)
		send := b.onWire(wire.FromUplink, b.uplink, "ecprup-p")
		p := udp(world, 4000, podA, 53)
		p.macTo, p.macFrom = b.uplink.mac, b.uplink.peer
		if got := send(tagged(p.bytes(b.family), 7)); got != "stack" {
			t.Errorf("tagged: outcome %q", got)
		}
		b.count(0, 0)
		if got := send(p.bytes(b.family)); got != "delivered" {
			t.Errorf("untagged: outcome %q", got)
		}
	})
}
