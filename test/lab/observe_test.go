package lab

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestSnapshotSeesChanges(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1})
	node := l.Nodes[0]
	before, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	again, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.Without("fe80", "ff00", "anycast"), again.Without("fe80", "ff00", "anycast")); diff != "" {
		t.Errorf("two snapshots of the same node differ:\n%s", diff)
	}

	if err := node.AddRoute(netip.MustParsePrefix("10.9.0.0/16"), GatewayAddr[wire.IPv4], ""); err != nil {
		t.Fatal(err)
	}
	if err := node.SetMTU(Uplink, 1400); err != nil {
		t.Fatal(err)
	}
	if err := node.WriteSysctl("net/ipv4/ip_forward", "1"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(node.ConfDir(), "left"), []byte("over"), 0o600); err != nil {
		t.Fatal(err)
	}
	after, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"route table 254 10.9.0.0/16", "link eth0 veth", "sysctl net/ipv4/ip_forward = 1", "file " + node.ConfDir() + "/left"} {
		isNew := func(line string) bool { return strings.HasPrefix(line, want) && !slices.Contains(before, line) }
		if !slices.ContainsFunc(after, isNew) {
			t.Errorf("no new line %q in the second snapshot", want)
		}
	}
}

func TestOffloadsAndCapture(t *testing.T) {
	for _, on := range []bool{true, false} {
		l := ForTest(t, Options{Nodes: 2})
		for _, node := range l.Nodes {
			if err := node.SetOffloads(Uplink, on); err != nil {
				t.Fatal(err)
			}
		}
		server, err := l.Nodes[1].Serve(0)
		if err != nil {
			t.Fatal(err)
		}
		capture, err := l.Nodes[0].Capture(Uplink)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Nodes[0].Transfer(t.Context(), netip.AddrPortFrom(l.Nodes[1].Addr(), server.Port), 1<<20); err != nil {
			t.Fatal(err)
		}
		largest := 0
		for _, packet := range capture.Close() {
			largest = max(largest, len(packet.Data()))
		}
		if big := largest > 1514; largest == 0 || big != on {
			t.Errorf("offloads on: %v, largest frame sent %d bytes", on, largest)
		}
	}
}

func TestSendRaw(t *testing.T) {
	l := ForTest(t, Options{Nodes: 2, Families: dual["IPv4, IPv6"]})
	capture, err := l.Nodes[1].Capture(Uplink)
	if err != nil {
		t.Fatal(err)
	}
	for family, spoofed := range addresses("192.0.2.99", "2001:db8::99") {
		if err := l.Nodes[0].SendRaw(hello(t, spoofed, l.Nodes[1].AddrOf(wire.Family(family)))); err != nil {
			t.Fatal(err)
		}
		seen := func() bool {
			return slices.ContainsFunc(capture.Packets(), func(p gopacket.Packet) bool {
				ip, ok := parseIP(p.Data()[14:])
				return ok && ip.source == spoofed && string(ip.payload[8:]) == "hello"
			})
		}
		for deadline := time.Now().Add(priv.Patience(2 * time.Second)); !seen(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("the packet from %s, who does not exist, did not arrive", spoofed)
			}
		}
	}
	capture.Close()
	if err := l.Nodes[0].SendRaw([]byte("no packet")); err == nil || !strings.Contains(err.Error(), "no whole IP header") {
		t.Errorf("what is no packet: %v", err)
	}
}

// hello is a UDP datagram.
func hello(t *testing.T, from, to netip.Addr) []byte {
	t.Helper()
	udp := &layers.UDP{SrcPort: 7, DstPort: 9}
	var ip interface {
		gopacket.NetworkLayer
		gopacket.SerializableLayer
	} = &layers.IPv6{Version: 6, HopLimit: 9, NextHeader: layers.IPProtocolUDP, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
	if from.Is4() {
		ip = &layers.IPv4{Version: 4, TTL: 9, Protocol: layers.IPProtocolUDP, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
	}
	if err := udp.SetNetworkLayerForChecksum(ip); err != nil {
		t.Fatal(err)
	}
	buffer := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, ip, udp, gopacket.Payload("hello")); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// A host believes what a router advertises, as hosts do that nobody has configured.
func TestAdvertise(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1, Router: true, Families: dual["IPv4, IPv6"]})
	node, router := l.Nodes[0], l.Router
	before, err := node.Namespace.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	via, err := router.LinkLocal(Uplink)
	if err != nil {
		t.Fatal(err)
	}
	ra := RouterAdvertisement{Lifetime: time.Minute, Prefix: netip.MustParsePrefix("2001:db8:99::/64")}
	if err := router.Advertise(Uplink, ra); err != nil {
		t.Fatal(err)
	}
	wants := []string{"address eth0 2001:db8:99:", "route table 254 2001:db8:99::/64 ", "route table 254 ::/0 type 1 via " + via.String() + " dev \"eth0\""}
	for deadline := time.Now().Add(priv.Patience(2 * time.Second)); len(wants) > 0; time.Sleep(time.Millisecond) {
		after, err := node.Namespace.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		wants = slices.DeleteFunc(wants, func(want string) bool {
			return slices.ContainsFunc(after, func(line string) bool { return strings.HasPrefix(line, want) && !slices.Contains(before, line) })
		})
		if time.Now().After(deadline) {
			t.Fatalf("the node has not learnt %q; it has %q", wants, after.Only("address", "route"))
		}
	}
	if _, err := node.LinkLocal("lo"); err == nil || !strings.Contains(err.Error(), "no link-local") {
		t.Errorf("the link-local address of a link that has none: %v", err)
	}
}
