package e2e

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	events "github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// BIG TCP: a stream's packets may be larger than an IP header can say. That of IPv4 then has a length of 0, that of IPv6 too, and
// the kernel says it in a jumbo payload option (RFC 2675), which no wire sees.

const (
	bigTCP   = 185_000 // bytes, which some devices take at most
	ipLength = 1 << 16 // what an IP header can't say
)

// passed adds up what became of the packets that a node's programs have seen.
func passed(t *testing.T, node *lab.Node, direction wire.Direction, what ...events.Event) (bytes uint64) {
	t.Helper()
	counters, err := events.Open(bpffs.Dir(node.BPFFS()).Map(events.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer counters.Close()
	for _, event := range what {
		sum, err := counters.Sum(direction, event)
		if err != nil {
			t.Fatal(err)
		}
		bytes += sum.Bytes
	}
	return bytes
}

// Packets that large find their way as all others do, and reach the stack no more than others.
func TestBigTCP(t *testing.T) {
	t.Parallel()
	forClusters(t, always, func(c cluster) bool { return len(c.pods) == len(families) }, func(t *testing.T, opts lab.Options) {
		opts.Nodes = 2
		l := startCluster(t, opts)
		pod, near, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		if err := l.SetMaxSizes(bigTCP); err != nil {
			t.Fatal(err)
		}
		routes := routesOf(t, l, pod, near, far)
		overEachFamily(t, l, func(t *testing.T, family wire.Family) {
			for _, r := range routes {
				t.Run(r.name, func(t *testing.T) { assertBigTCP(t, r, pod, family) })
			}
		})
	})
}

// Where their segments are too big for the tunnel the pod is told, and goes on with smaller ones in packets as large.
func TestBigTCPTooBigForTheTunnel(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{"--routing-mode=vxlan", "--mtu=1500"}}, drops.TooBig)
	pod, far := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "far")
	if err := l.SetMaxSizes(bigTCP); err != nil {
		t.Fatal(err)
	}
	overEachFamily(t, l, func(t *testing.T, family wire.Family) {
		before := dropped(t, pod.Node, drops.TooBig)
		assertBigTCP(t, route{"", pod.Namespace, far.Namespace}, pod, family)
		if told := dropped(t, pod.Node, drops.TooBig) - before; told == 0 || told > 100 {
			t.Errorf("%d packets were too big", told)
		}
	})
}

// assertBigTCP has a stream enter the pod's node in large packets.
func assertBigTCP(t *testing.T, r route, pod *lab.Pod, family wire.Family) {
	t.Helper()
	at, link, direction := serveOver(t, r.to, family), pod.Result.Interfaces[0].Name, wire.FromPod
	if r.from != pod.Namespace {
		link, direction = lab.Uplink, wire.FromUplink
	}
	// Once the neighbours are known nothing has to wait for them in the stack.
	if _, err := r.from.Ping(t.Context(), at.Addr(), lab.PingOptions{}); err != nil {
		t.Fatal(err)
	}
	capture, err := pod.Node.Capture(link)
	if err != nil {
		t.Fatal(err)
	}
	carried := func() uint64 { return passed(t, pod.Node, direction, events.Delivered, events.Forwarded) }
	stack := func() uint64 { return passed(t, pod.Node, direction, events.Stack) }
	before, beforeStack := carried(), stack()
	const size = 8 << 20
	if _, err := r.from.Transfer(within(t, 20*time.Second), at, size); err != nil {
		t.Fatal(err)
	}
	largest := 0
	for _, packet := range capture.Close() {
		largest = max(largest, len(packet.Data()))
	}
	if largest <= ipLength {
		t.Errorf("the largest packet has %d bytes", largest)
	}
	if r.to == pod.Node.Namespace {
		return // the host's own are the stack's
	}
	if past := carried() - before; past < size {
		t.Errorf("%d bytes of %d went past the stack, %d through it", past, size, stack()-beforeStack)
	}
	if by := stack() - beforeStack; by > ipLength {
		t.Errorf("%d bytes went through the stack", by)
	}
}
