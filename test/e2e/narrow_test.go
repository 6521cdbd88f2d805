package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Where pods' packets could have less than what IPv6 needs, pods get none of it and all of IPv4, and the node says which interface
// it is, once.
func TestTooNarrowForIPv6(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mtu   int
		flags []string
		says  string
	}{
		"--mtu":                  {1500, []string{"--routing-mode=direct", "--mtu=1279"}, "--mtu=1279 gives pods' interfaces less than the 1280 bytes that IPv6 needs"},
		"an uplink":              {1300, []string{"--routing-mode=vxlan"}, "uplink eth0 (MTU 1300) leaves 1250 bytes for pods' packets, and IPv6 needs 1280"},
		"an uplink, with an MTU": {1300, []string{"--routing-mode=vxlan", "--mtu=1400"}, "uplink eth0 (MTU 1300) leaves 1250 bytes for pods' packets, and IPv6 needs 1280"},
	} {
		t.Run(name, func(t *testing.T) {
			l := startCluster(t, lab.Options{Nodes: 2, FabricMTU: c.mtu, Families: families, AgentFlags: c.flags})
			node := l.Nodes[0]
			a, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
			if len(a.Addrs()) != 1 || !a.Addr().Is4() {
				t.Errorf("the pod has %v", a.Addrs())
			}
			if _, err := a.UDP(t.Context(), serve(t, far.Namespace), 1000); err != nil {
				t.Error(err)
			}
			time.Sleep(3 * time.Second) // whatever was wrong would be tried again
			log := node.LogTail(1 << 20)
			if strings.Count(log, c.says) != 1 || strings.Count(log, "level=WARN")+strings.Count(log, "level=ERROR") != 1 {
				t.Errorf("the log does not say once, and nothing else, that %s:\n%s", c.says, log)
			}
			if out, err := node.Ebpfctl(t.Context(), "status"); err == nil || !strings.Contains(string(out), c.says) {
				t.Errorf("ebpfctl status (error %v):\n%s", err, out)
			}
		})
	}
}
