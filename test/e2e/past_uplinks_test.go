package e2e

import (
	"bytes"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Routes by which pods' packets leave a node and meet no program that could masquerade them: ebpfctl status says so.

// openTun makes an interface without Ethernet on a host, as a VPN does, and returns its other end.
func openTun(t *testing.T, on *lab.Namespace, name string) *os.File {
	t.Helper()
	var tun *os.File
	err := on.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		ifr, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
		tun = os.NewFile(uintptr(fd), name) // which has deadlines only from then on
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tun.Close() })
	upBoth(t, name, on)
	return tun
}

// A table of routes to single addresses over a VPN, as Tailscale's is: pods' packets leave there with pods' addresses.
func TestSingleAddressesPastUplinks(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: []wire.Family{wire.IPv4}})
	node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
	tun, peer := openTun(t, node.Namespace, "vpn0"), netip.MustParseAddr("198.51.100.9")
	runOn(t, node, "ip", "route", "add", peer.String(), "dev", "vpn0", "table", "52")
	runOn(t, node, "ip", "route", "add", "198.51.100.10", "dev", "vpn0", "table", "52")
	runOn(t, node, "ip", "rule", "add", "priority", "5270", "lookup", "52")
	statusSays(t, node, "routes to single addresses, such as 198.51.100.", "lead over vpn0, which has no programs", "--uplink eth0,vpn0")
	send(t, dialUDP(t, pod.Namespace, 0, netip.AddrPortFrom(peer, 9)), "hello")
	if err := tun.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	for packet := make([]byte, 2000); ; {
		n, err := tun.Read(packet)
		if err != nil {
			t.Fatalf("nothing of the pod came over the VPN: %v", err)
		}
		if n >= 20 && packet[0]>>4 == 4 && bytes.Equal(packet[16:20], peer.AsSlice()) {
			if !bytes.Equal(packet[12:16], pod.Addr().AsSlice()) {
				t.Errorf("left from %v, which is not what status says", packet[12:16])
			}
			return
		}
	}
}

// A route that encapsulates packets takes them past the programs, inside packets of the node's.
func TestEncapsulatingRoute(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1, Families: []wire.Family{wire.IPv4}})
	node, pod := l.Nodes[0], addPod(t, l.Nodes[0], "a")
	const segment = "fd00:77::fe"
	runOn(t, node, "ip", "addr", "add", "fd00:77::1/64", "dev", lab.Uplink, "nodad")
	if err := node.WriteSysctl(lab.Forwarding[wire.IPv6], "1"); err != nil { // a node of IPv4 alone does not forward the outer packet
		t.Fatal(err)
	}
	run(t, l.Outside, "ip", "addr", "add", segment+"/64", "dev", lab.Uplink, "nodad")
	runOn(t, node, "ip", "route", "add", "198.51.100.0/24", "encap", "seg6", "mode", "encap", "segs", segment, "dev", lab.Uplink)
	statusSays(t, node, "routes, such as that to 198.51.100.0/24, encapsulate packets (encap seg6)")
	capture, err := l.Outside.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	to := netip.MustParseAddrPort("198.51.100.9:9")
	inner := append(pod.Addr().AsSlice(), to.Addr().AsSlice()...)
	conn := dialUDP(t, pod.Namespace, 0, to)
	eventually(t, answerLimit, "the pod's packet leaves inside another one", func() bool {
		send(t, conn, "hello")
		for _, packet := range capture.Packets() {
			if bytes.Contains(packet.Data(), inner) && packet.Data()[12] == 0x86 {
				return true
			}
		}
		return false
	})
	capture.Close()
}

// statusSays waits until the status of a node has all of these words.
func statusSays(t *testing.T, node *lab.Node, words ...string) {
	t.Helper()
	var text []byte
	eventually(t, 3*answerLimit, "ebpfctl status says "+strings.Join(words, " ... "), func() bool {
		text, _ = node.Ebpfctl(t.Context(), "status")
		for _, w := range words {
			if !strings.Contains(string(text), w) {
				return false
			}
		}
		return true
	})
}
