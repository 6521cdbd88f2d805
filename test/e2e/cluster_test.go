package e2e

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// readyLimit is how long an agent may take from its start until it is ready.
const readyLimit = 40 * time.Second

// answerLimit is how long to wait for what comes at once on a computer that has time: what does not come never does.
const answerLimit = 5 * time.Second

// startCluster builds a lab whose agents are ready.
func startCluster(t *testing.T, opts lab.Options, expected ...drops.Reason) *lab.Lab {
	t.Helper()
	l := lab.ForTest(t, opts, expected...)
	startAgents(t, l)
	return l
}

func startAgents(t *testing.T, l *lab.Lab) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(readyLimit))
	defer cancel()
	if err := l.StartAgents(ctx); err != nil {
		t.Fatal(err)
	}
}

var ways = flag.String("attach", "all", "ways of attaching programs: all, or newest for the one that the kernel gets by itself")

// forEachAttach runs a test with each way of attaching programs.
func forEachAttach(t *testing.T, test func(t *testing.T, attach string)) {
	attached(t, *ways == "all", test)
}

// forNewestAttach runs a test with the way that the kernel gets by itself, since clsact is proven for it elsewhere: by
// test-kernels on Linux 6.1, or as test/vm knows. In its long form it is run with each way.
func forNewestAttach(t *testing.T, test func(t *testing.T, attach string)) {
	attached(t, *ways == "all" && priv.Long(), test)
}

func attached(t *testing.T, all bool, test func(t *testing.T, attach string)) {
	for _, attach := range []string{"tcx", "clsact"} {
		if newest := attach == "tcx" == priv.HasTCX(t); !all && !newest {
			continue
		}
		t.Run(attach, func(t *testing.T) {
			if attach == "tcx" {
				priv.NeedTCX(t)
			}
			test(t, "--attach="+attach)
		})
	}
}

// families are both: those that a test runs in, one after the other, and those of a dual Node whose first is IPv4.
var families = []wire.Family{wire.IPv4, wire.IPv6}

// forEachFamily runs a test in each family, for clusters of that family alone.
func forEachFamily(t *testing.T, test func(t *testing.T, family []wire.Family)) {
	for _, family := range families {
		t.Run(family.String(), func(t *testing.T) { test(t, []wire.Family{family}) })
	}
}

// overEachFamily runs a part of a test in each family of one cluster.
func overEachFamily(t *testing.T, l *lab.Lab, test func(t *testing.T, family wire.Family)) {
	for _, family := range l.Options.Families {
		t.Run(family.String(), func(t *testing.T) { test(t, family) })
	}
}

// needIPv4 skips a test in a cluster of IPv6 alone: what it writes, or does, is of IPv4.
func needIPv4(t *testing.T, l *lab.Lab) {
	t.Helper()
	if !slices.Contains(l.Options.Families, wire.IPv4) {
		t.Skip("of IPv4, and the cluster has none")
	}
}

// firstFamily is that of a test which tells its story in one family, whichever others the cluster has.
func firstFamily(l *lab.Lab) wire.Family { return l.Options.Families[0] }

// everywhere is all of a family.
var everywhere = [wire.Families]netip.Prefix{wire.IPv4: netip.MustParsePrefix("0.0.0.0/0"), wire.IPv6: netip.MustParsePrefix("::/0")}

// inNetwork is an address of a network by its last byte.
func inNetwork(network netip.Prefix, last byte) netip.Addr {
	raw := network.Addr().AsSlice()
	raw[len(raw)-1] = last
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

// addPod adds an ordinary pod.
func addPod(t *testing.T, node *lab.Node, name string) *lab.Pod {
	t.Helper()
	pod, err := node.AddPod(t.Context(), name, lab.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// serve answers on a port of the kernel's choice and returns where, in the first family of the host or pod.
func serve(t *testing.T, on *lab.Namespace) netip.AddrPort {
	t.Helper()
	return serveOver(t, on, wire.FamilyOf(on.Addr()))
}

// serveOver is serve in one family.
func serveOver(t *testing.T, on *lab.Namespace, family wire.Family) netip.AddrPort {
	t.Helper()
	if !on.AddrOf(family).IsValid() {
		t.Fatalf("%s has no %v address; it has %v", on.Netns(), family, on.Addrs())
	}
	server, err := on.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(on.AddrOf(family), server.Port)
}

// within bounds a single exchange.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(limit))
	t.Cleanup(cancel)
	return ctx
}

// assertReaches has one party reach a server by ping, TCP and UDP of several sizes, and be seen as expected.
func assertReaches(t *testing.T, from *lab.Namespace, to netip.AddrPort, seenAs netip.Addr) {
	t.Helper()
	if _, err := from.Ping(t.Context(), to.Addr(), lab.PingOptions{}); err != nil {
		t.Error(err)
	}
	seen, err := from.TCP(t.Context(), to)
	assertSeen(t, fmt.Sprintf("TCP from %s to %s", from.Netns(), to), seen, err, seenAs)
	for _, size := range []int{64, 1472, 9000} {
		seen, err := from.UDP(t.Context(), to, size)
		assertSeen(t, fmt.Sprintf("UDP of %d bytes from %s to %s", size, from.Netns(), to), seen, err, seenAs)
	}
}

// meet has pods reach each other, once their nodes know of each other, also with more than fits one packet.
func meet(t *testing.T, pods ...*lab.Namespace) {
	t.Helper()
	for _, to := range pods {
		at := serve(t, to)
		for _, from := range pods {
			if from == to {
				continue
			}
			eventually(t, answerLimit, from.Netns()+" reaches "+to.Netns(), func() bool {
				_, err := from.UDP(within(t, time.Second), at, 64)
				return err == nil
			})
			assertReaches(t, from, at, from.Addr())
			if _, err := from.Ping(t.Context(), to.Addr(), lab.PingOptions{Size: 4000}); err != nil {
				t.Error(err)
			}
			if _, err := from.Transfer(within(t, 4*answerLimit), at, 4<<20); err != nil {
				t.Error(err)
			}
		}
	}
}

func assertSeen(t *testing.T, what string, seen netip.AddrPort, err error, want netip.Addr) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	} else if seen.Addr() != want {
		t.Errorf("%s: the server saw %s, want %s", what, seen, want)
	}
}

// dropped is how many packets the node has dropped for a reason so far.
func dropped(t *testing.T, node *lab.Node, reason drops.Reason) uint64 {
	t.Helper()
	packets, err := node.Dropped(reason)
	if err != nil {
		t.Fatal(err)
	}
	return packets
}

// assertNoDrops is for tests that take the counters away: nobody can look at them afterwards.
func assertNoDrops(t *testing.T, l *lab.Lab) {
	t.Helper()
	if err := l.UnexpectedDrops(); err != nil {
		t.Error(err)
	}
}

// eventually waits until something holds that takes the cluster a moment.
func eventually(t *testing.T, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	limit = priv.Patience(limit)
	for deadline := time.Now().Add(limit); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("not within %v: %s", limit, what)
			return
		}
	}
}
