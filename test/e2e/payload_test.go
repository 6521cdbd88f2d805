package e2e

import (
	"bytes"
	"crypto/rand"
	"errors"
	"flag"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What arrives is what was sent, whoever computes checksums, and whoever cuts and merges what is sent.

var (
	payload    = flag.Int64("payload", 8<<20+7, "bytes of each transfer with offloads on and off")
	eachSwitch = flag.Bool("each-offload", true, "each offload is off alone, besides all together")
)

// route is a way that payloads take.
type route struct {
	name     string
	from, to *lab.Namespace
}

// routesOf are all ways from and to a pod. The world knows the way to the pod where no router is between.
func routesOf(t *testing.T, l *lab.Lab, pod, near, far *lab.Pod) []route {
	t.Helper()
	all := []route{
		{"same node", pod.Namespace, near.Namespace}, {"across nodes", pod.Namespace, far.Namespace},
		{"to the world", pod.Namespace, l.Outside}, {"to the own host", pod.Namespace, pod.Node.Namespace},
	}
	if l.Router != nil {
		return all
	}
	for _, family := range l.Options.Families {
		if err := l.Outside.AddRoute(pod.Node.PodCIDROf(family), pod.Node.AddrOf(family), ""); err != nil {
			t.Fatal(err)
		}
	}
	return append(all, route{"from the world", l.Outside, pod.Namespace})
}

// offloadCase is which offloads pods and uplinks have.
type offloadCase struct {
	name         string
	off          []string // all, if none is named
	pods, uplink bool     // whether they have those, too
	piece        int      // in which datagrams come back that were sent in one; 0: as it happens
}

// offloadCases are all switches together in every cluster, and each of them alone where there are both families.
func offloadCases(l *lab.Lab) []offloadCase {
	all := []offloadCase{
		{"on", nil, true, true, segmentSize * segmentCount}, {"off", nil, false, false, segmentSize},
		{"off in pods", nil, false, true, 0}, {"off on the uplinks", nil, true, false, 0},
	}
	if !*eachSwitch || len(l.Options.Families) == 1 && !priv.Long() {
		return all
	}
	for _, name := range lab.Offloads {
		all = append(all, offloadCase{"on but " + name, []string{name}, false, false, 0})
	}
	return all
}

func (c offloadCase) set(t *testing.T, l *lab.Lab, pods ...*lab.Pod) {
	t.Helper()
	for _, pod := range pods {
		if err := errors.Join(pod.SetOffloads(pod.IfName, true), pod.SetOffloads(pod.IfName, c.pods, c.off...)); err != nil {
			t.Fatal(err)
		}
	}
	for _, host := range fabricHosts(l) {
		if err := errors.Join(host.SetOffloads(lab.Uplink, true), host.SetOffloads(lab.Uplink, c.uplink, c.off...)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPayloadsSurviveOffloads(t *testing.T) {
	t.Parallel()
	forEachCluster(t, always, func(t *testing.T, opts lab.Options) {
		opts.Nodes = 2
		l := startCluster(t, opts)
		a, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		routes := routesOf(t, l, a, near, far)
		for _, offloads := range offloadCases(l) {
			offloads.set(t, l, a, near, far)
			for _, r := range routes {
				for _, family := range l.Options.Families {
					t.Run(offloads.name+"/"+r.name+"/"+family.String(), func(t *testing.T) {
						if piece := assertPayloads(t, r, family); offloads.piece != 0 && piece != offloads.piece {
							t.Errorf("datagrams came back in pieces of %d bytes, want %d", piece, offloads.piece)
						}
					})
				}
			}
		}
	})
}

// assertPayloads compares what arrives of a stream, and of datagrams of each kind, there and back. It returns the size of the largest piece of them.
func assertPayloads(t *testing.T, r route, family wire.Family) (piece int) {
	t.Helper()
	at := serveOver(t, r.to, family)
	if _, err := r.from.Transfer(within(t, 20*time.Second), at, *payload); err != nil {
		t.Error(err)
	}
	if _, err := r.from.UDP(t.Context(), at, 9000); err != nil {
		t.Error(err)
	}
	assertDatagramsReturn(t, r, family, datagrams{noChecksum[family], segmentSize})
	return assertDatagramsReturn(t, r, family, segmented)
}

// datagrams are how to send them.
type datagrams struct {
	options [][3]int // of both sockets: level, option, value
	atOnce  int      // bytes that are handed to the kernel
}

// Datagrams that fit every path, no more than the oldest kernel cuts out of one piece.
const (
	segmentSize  = 1200
	segmentCount = 40
)

// segmented datagrams are cut out of one piece by whoever carries them out, and may be merged again.
var segmented = datagrams{[][3]int{{unix.SOL_UDP, unix.UDP_SEGMENT, segmentSize}, {unix.SOL_UDP, unix.UDP_GRO, 1}}, segmentSize * segmentCount}

// assertDatagramsReturn sends datagrams to somebody who returns them, and says how large the largest piece was in which they came back.
func assertDatagramsReturn(t *testing.T, r route, family wire.Family, how datagrams) (largest int) {
	t.Helper()
	server := listenUDP(t, r.to, netip.AddrPortFrom(r.to.AddrOf(family), 0))
	defer server.Close()
	client := dialUDP(t, r.from, 0, server.LocalAddr().(*net.UDPAddr).AddrPort())
	defer client.Close()
	for _, socket := range []*net.UDPConn{server, client} {
		for _, option := range how.options {
			setOption(t, socket, option[0], option[1], option[2])
		}
	}
	go returnDatagrams(server)
	sent := make([]byte, segmentSize*segmentCount)
	_, _ = rand.Read(sent) // never fails
	for piece := range slices.Chunk(sent, how.atOnce) {
		if err := sendDatagrams(client, piece, client.Write); err != nil {
			t.Error(err)
			return 0
		}
	}
	if err := client.SetReadDeadline(time.Now().Add(priv.Patience(answerLimit))); err != nil {
		t.Fatal(err)
	}
	var came [][]byte
	for len(came) < segmentCount {
		piece := make([]byte, 1<<16)
		n, err := client.Read(piece)
		if err != nil {
			t.Errorf("after %d datagrams: %v", len(came), err)
			return largest
		}
		largest = max(largest, n)
		came = slices.AppendSeq(came, slices.Chunk(piece[:n], segmentSize))
	}
	went := slices.Collect(slices.Chunk(sent, segmentSize))
	slices.SortFunc(went, bytes.Compare) // nobody promises an order
	slices.SortFunc(came, bytes.Compare)
	if !slices.EqualFunc(went, came, bytes.Equal) {
		t.Error("other datagrams came back than were sent")
	}
	return largest
}

// returnDatagrams sends back what comes, in the same pieces, until the socket is closed.
func returnDatagrams(socket *net.UDPConn) {
	for piece := make([]byte, 1<<16); ; {
		n, from, err := socket.ReadFromUDPAddrPort(piece)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// Who misses them says so.
		_ = sendDatagrams(socket, piece[:n], func(b []byte) (int, error) { return socket.WriteToUDPAddrPort(b, from) })
	}
}

// sendDatagrams sends a piece at once where the kernel cuts it: before Linux 6.11 it does so only where the link computes checksums.
func sendDatagrams(socket *net.UDPConn, piece []byte, write func([]byte) (int, error)) error {
	_, err := write(piece)
	if !errors.Is(err, unix.EIO) {
		return err
	}
	// Not even one datagram goes with it.
	if err := trySetOption(socket, unix.SOL_UDP, unix.UDP_SEGMENT, 0); err != nil {
		return err
	}
	for one := range slices.Chunk(piece, segmentSize) {
		if _, err := write(one); err != nil {
			return err
		}
	}
	return nil
}
