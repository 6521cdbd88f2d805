package e2e

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// A pod writes to a connection that its node has forgotten, with and without offloading of checksums and segments: it is told
// at once that the connection is gone, whichever way it went.
func TestForgottenConnectionIsReset(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		for way, flag := range map[string]string{"past the stack": "--kube-proxy=off", "by the stack": "--kube-proxy=on"} {
			l := startCluster(t, lab.Options{Nodes: 1, Families: families, AgentFlags: []string{attach, flag}}, drops.NoMapping)
			pod := addPod(t, l.Nodes[0], "a")
			overEachFamily(t, l, func(t *testing.T, family wire.Family) {
				assertForgottenIsReset(t, way, pod, serveOver(t, l.Outside, family))
			})
		}
	})
}

func assertForgottenIsReset(t *testing.T, way string, pod *lab.Pod, at netip.AddrPort) {
	t.Helper()
	node := pod.Node
	if _, err := pod.Ping(t.Context(), at.Addr(), lab.PingOptions{}); err != nil { // so that the neighbour is known
		t.Fatal(err)
	}
	for _, offloads := range []bool{true, false} {
		if err := errors.Join(pod.SetOffloads(pod.IfName, offloads), node.SetOffloads(pod.Result.Interfaces[0].Name, offloads)); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 100_000} {
			stream, err := pod.DialTCP(t.Context(), at, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { stream.Close() })
			forget(t, node)
			if err := stream.Echo(within(t, time.Second), size); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%s, offloads %v, %d bytes: %v, want connection reset", way, offloads, size, err)
			}
		}
	}
}

// forget takes every masqueraded flow out of a node's tables.
func forget(t *testing.T, node *lab.Node) {
	t.Helper()
	for _, name := range []string{snat.Name, snat.ReverseName} {
		m, err := typed.Open[snat.Key, snat.Value](bpffs.Dir(node.BPFFS()).Map(name))
		if err != nil {
			t.Fatal(err)
		}
		for entry, err := range m.All() {
			if err == nil {
				err = m.Delete(entry.Key)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
