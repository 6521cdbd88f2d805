package e2e

import (
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// While the program is off a pod's link, the kernel's reverse path filter keeps the pod to its own address, also on a host
// that has made the filter of all links loose.
func TestKernelRefusesSpoofedSourcesWithoutTheProgram(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{flag}})
		needIPv4(t, l) // IPv6 has no such filter
		liar, near, far := addPod(t, l.Nodes[0], "liar"), addPod(t, l.Nodes[0], "near"), addPod(t, l.Nodes[1], "far")
		at := []netip.AddrPort{serve(t, near.Namespace), serve(t, far.Namespace), serve(t, l.Outside), serve(t, l.Nodes[0].Namespace)}
		m := newMaimed(l, l.Nodes[0], liar, flag)
		if err := m.node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		// The larger of this and the link's own counts; without an address on the link either refuses.
		if err := m.node.WriteSysctl("net/ipv4/conf/all/rp_filter", "2"); err != nil {
			t.Fatal(err)
		}
		m.remove(t, m.place(t, attach.FromPod), attach.FromPod)
		captures := map[*lab.Namespace]*lab.Capture{}
		for ns, link := range map[*lab.Namespace]string{
			near.Namespace: near.IfName, far.Namespace: far.IfName, l.Outside: lab.Uplink, l.Nodes[1].Namespace: lab.Uplink,
		} {
			capture, err := ns.Capture(link)
			if err != nil {
				t.Fatal(err)
			}
			captures[ns] = capture
		}
		for _, source := range []netip.Addr{near.Addr(), far.Addr(), l.Nodes[1].Addr(), netip.MustParseAddr("192.0.2.77")} {
			for _, to := range at {
				if err := liar.SendRaw(datagram(t, source, to.Addr(), "lie")); err != nil {
					t.Fatal(err)
				}
			}
		}
		// What it sends as itself takes the same way, behind the lies, and arrives.
		for _, to := range at {
			if _, err := liar.TCP(t.Context(), to); err != nil {
				t.Errorf("%s: %v", to, err)
			}
		}
		time.Sleep(50 * time.Millisecond)
		for ns, capture := range captures {
			for _, packet := range capture.Close() {
				if app := packet.ApplicationLayer(); app != nil && string(app.Payload()) == "lie" {
					t.Errorf("a spoofed packet reached %s:\n%s", ns.Netns(), packet)
				}
			}
		}
	})
}
