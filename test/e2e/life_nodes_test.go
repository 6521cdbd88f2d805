package e2e

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// changeLimit is how long a change of the Node list may take to reach the packets, by far.
const changeLimit = 5 * time.Second

// follower is a cluster of three nodes whose list of Nodes changes, while a pod of the first talks to one of the second
// and to the world: nothing that happens to the others may be noticed there.
type follower struct {
	*lab.Lab
	a, b, c *lab.Pod // one on each node
	specs   []lab.NodeSpec
}

func startFollower(t *testing.T) *follower {
	t.Helper()
	f := &follower{Lab: startCluster(t, lab.Options{Nodes: 3, AgentFlags: []string{"--routing-mode=direct"}})}
	needIPv4(t, f.Lab)
	f.a, f.b, f.c = addPod(t, f.Nodes[0], "a"), addPod(t, f.Nodes[1], "b"), addPod(t, f.Nodes[2], "c")
	f.specs = f.NodeSpecs()
	return f
}

// say gives the agents a new list.
func (f *follower) say(t *testing.T, specs ...lab.NodeSpec) {
	t.Helper()
	if err := f.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
}

// routes are the gateways of the first node's own routes, by prefix; unreachable ones have none.
func (f *follower) routes(t *testing.T) map[string]string {
	t.Helper()
	routes, err := lab.RetryInterrupted(func() ([]netlink.Route, error) { return f.Nodes[0].Netlink().RouteList(nil, unixAFInet) })
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, r := range routes {
		if r.Protocol == routeProtocol && r.Dst != nil {
			found[r.Dst.String()] = r.Gw.String()
		}
	}
	return found
}

// destination is the kind of the first node's entry for a prefix, and the node that it leads to; empty when there is none.
func (f *follower) destination(t *testing.T, prefix string) string {
	t.Helper()
	for _, row := range dump(t, f.Nodes[0], "destinations") {
		if row["prefix"] == prefix {
			return strings.TrimSpace(text(row["kind"]) + " " + text(row["node"]))
		}
	}
	return ""
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

func pings(t *testing.T, from *lab.Pod, to netip.Addr) bool {
	t.Helper()
	_, err := from.Ping(within(t, 200*time.Millisecond), to, lab.PingOptions{})
	return err == nil
}

func TestLifeNodesChange(t *testing.T) {
	t.Parallel()
	f := startFollower(t)
	node := f.Nodes[0]
	// The flows that nothing may disturb.
	streams := []*numbered{
		startNumbered(t, "a > b", f.a.Namespace, f.b.Namespace), startNumbered(t, "a > outside", f.a.Namespace, f.Outside),
	}
	tcp := connect(t, f.a.Namespace, serve(t, f.b.Namespace), 1, 3)

	t.Run("gone and back with another podCIDR", func(t *testing.T) { f.movesToAnotherPodCIDR(t) })
	t.Run("overlapping podCIDRs", func(t *testing.T) { f.overlap(t) })
	t.Run("no podCIDR", func(t *testing.T) { f.withoutPodCIDR(t) })
	t.Run("no list at all", func(t *testing.T) { f.badLists(t) })
	t.Run("a list without this node", func(t *testing.T) { f.withoutUs(t) })
	t.Run("off link", func(t *testing.T) { f.offLink(t) })

	for _, stream := range streams {
		stream.end(t)
	}
	tcp.assertAlive(t, "in the end")
	if !node.AgentRunning() {
		t.Error("the agent has ended")
	}
}

// movesToAnotherPodCIDR: traffic follows, and nothing of the old podCIDR stays.
func (f *follower) movesToAnotherPodCIDR(t *testing.T) {
	old, moved := f.specs[2].PodCIDRs[0], netip.MustParsePrefix("10.244.77.0/24")
	gateway := f.Nodes[2].Addr().String()
	f.say(t, f.specs[:2]...)
	eventually(t, changeLimit, "the route to a node that is gone is gone", func() bool { return f.routes(t)[old.String()] == "" })
	eventually(t, changeLimit, "the entry of a node that is gone is gone", func() bool { return f.destination(t, old.String()) == "" })
	if pings(t, f.a, f.c.Addr()) {
		t.Error("a pod of a node that is gone is reached")
	}

	spec := f.specs[2]
	spec.PodCIDRs = []netip.Prefix{moved}
	f.say(t, f.specs[0], f.specs[1], spec)
	eventually(t, changeLimit, "the new podCIDR has a route", func() bool { return f.routes(t)[moved.String()] == gateway })
	eventually(t, changeLimit, "the node gives addresses of its new podCIDR", func() bool {
		list, err := os.ReadFile(f.Nodes[2].Conflist())
		return err == nil && strings.Contains(string(list), moved.String())
	})
	pod := addPod(t, f.Nodes[2], "moved")
	if !moved.Contains(pod.Addr()) {
		t.Errorf("the new pod has %s, want one of %s", pod.Addr(), moved)
	}
	assertReaches(t, f.a.Namespace, serve(t, pod.Namespace), f.a.Addr())
	assertReaches(t, pod.Namespace, serve(t, f.Outside), f.Nodes[2].Addr())
	// Who was there before lives on as far as its own node goes.
	assertReaches(t, pod.Namespace, serve(t, f.c.Namespace), pod.Addr())
	if f.routes(t)[old.String()] != "" {
		t.Errorf("routes to the old podCIDR: %v", f.routes(t))
	}
	if err := f.Nodes[2].DelPod(t.Context(), pod); err != nil {
		t.Error(err)
	}
	f.say(t, f.specs...)
	eventually(t, changeLimit, "the first podCIDR is back", func() bool { return pings(t, f.a, f.c.Addr()) })
}

// overlap: whoever came later loses, and whoever was there does not notice.
func (f *follower) overlap(t *testing.T) {
	late := lab.NodeSpec{
		Name: "k8s-late", InternalIPs: []netip.Addr{netip.MustParseAddr("172.18.0.99")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.128/25")}, Created: time.Now(),
	}
	// In the list it stands first.
	f.say(t, append([]lab.NodeSpec{late}, f.specs...)...)
	f.assertProblem(t, late.Name, "podcidr_conflict")
	if got := f.destination(t, late.PodCIDRs[0].String()); got != "" {
		t.Errorf("the later claim has the entry %q", got)
	}
	assertReaches(t, f.a.Namespace, serve(t, f.b.Namespace), f.a.Addr())
	f.say(t, f.specs...)
	f.assertNoProblem(t, late.Name)
}

// withoutPodCIDR: a node that has none yet is a node all the same.
func (f *follower) withoutPodCIDR(t *testing.T) {
	addr := netip.MustParseAddr("172.18.0.98")
	young := lab.NodeSpec{Name: "k8s-young", InternalIPs: []netip.Addr{addr}}
	f.say(t, append(slices.Clone(f.specs), young)...)
	eventually(t, changeLimit, "its address is a node's", func() bool {
		return strings.HasPrefix(f.destination(t, addr.String()+"/32"), "node")
	})
	f.assertNoProblem(t, young.Name)
	f.say(t, f.specs...)
	eventually(t, changeLimit, "its address is forgotten", func() bool { return f.destination(t, addr.String()+"/32") == "" })
}

// badLists: what is no list of Nodes changes nothing, and is said.
func (f *follower) badLists(t *testing.T) {
	before := mapEntries(t, f.Nodes[0])
	routes := f.routes(t)
	nameless, err := lab.NodeList(f.specs[0], f.specs[1], lab.NodeSpec{PodCIDRs: f.specs[2].PodCIDRs, InternalIPs: f.specs[2].InternalIPs})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"empty":           "",
		"garbage":         "{[}\x00",
		"of another kind": "apiVersion: v1\nkind: PodList\nitems: []\n",
		"without a name":  string(nameless),
		"cut off":         string(nameless[:len(nameless)/2]),
	} {
		size := len(f.Nodes[0].LogTail(1 << 20))
		if err := f.WriteNodesFile([]byte(content)); err != nil {
			t.Fatal(err)
		}
		eventually(t, changeLimit, "the agent says that the list is "+name, func() bool {
			return strings.Contains(f.Nodes[0].LogTail(1 << 20)[size:], f.NodesFile())
		})
		if now := mapEntries(t, f.Nodes[0]); !slices.Equal(before, now) {
			t.Errorf("a list that is %s changed the maps from %q to %q", name, before, now)
		}
		if now := f.routes(t); len(now) != len(routes) {
			t.Errorf("a list that is %s changed the routes from %v to %v", name, routes, now)
		}
		if status, body, err := f.Nodes[0].HTTPGet(t.Context(), "/readyz"); err != nil || status != 200 {
			t.Errorf("a list that is %s: /readyz says %d %s, error %v: pods can be carried all the same", name, status, body, err)
		}
	}
	f.say(t, f.specs...)
}

// withoutUs: a good list without this node leaves its pods and its podCIDR as they are.
func (f *follower) withoutUs(t *testing.T) {
	node := f.Nodes[0]
	f.say(t, f.specs[1:]...)
	eventually(t, changeLimit, "the agent says that it is not in the list", func() bool {
		return strings.Contains(node.LogTail(50), "reason=node_missing")
	})
	pod := addPod(t, node, "unlisted")
	if !node.PodCIDR().Contains(pod.Addr()) {
		t.Errorf("the new pod has %s, want one of %s", pod.Addr(), node.PodCIDR())
	}
	assertReaches(t, pod.Namespace, serve(t, f.a.Namespace), pod.Addr())
	assertReaches(t, pod.Namespace, serve(t, f.Outside), node.Addr())
	if err := node.DelPod(t.Context(), pod); err != nil {
		t.Error(err)
	}
	f.say(t, f.specs...)
	eventually(t, changeLimit, "the others know the node again", func() bool { return pings(t, f.b, f.a.Addr()) })
}

// offLink: a node behind a router, which direct routing does not reach, is named wherever somebody looks.
func (f *follower) offLink(t *testing.T) {
	far := lab.NodeSpec{
		Name: "k8s-far", InternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.77")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.99.0/24")},
	}
	f.say(t, append(slices.Clone(f.specs), far)...)
	f.assertProblem(t, far.Name, "off_link")
	out, err := f.Nodes[0].Ebpfctl(t.Context(), "status")
	if err == nil {
		t.Error("ebpfctl status finds nothing wrong")
	}
	for _, word := range []string{far.InternalIPs[0].String(), far.PodCIDRs[0].String(), "off link"} {
		if !strings.Contains(string(out), word) {
			t.Errorf("ebpfctl status does not say %q:\n%s", word, out)
		}
	}
	f.say(t, f.specs...)
	f.assertNoProblem(t, far.Name)
	if out, err := f.Nodes[0].Ebpfctl(t.Context(), "status"); err != nil {
		t.Errorf("ebpfctl status of a node that is in order again: %v\n%s", err, out)
	}
}

// assertProblem: the metric counts it by its reason, and the log names the node as well.
func (f *follower) assertProblem(t *testing.T, name, reason string) {
	t.Helper()
	eventually(t, changeLimit, "a problem is counted as "+reason, func() bool { return nodeProblems(t, f.Nodes[0])[reason] == "1" })
	if log := f.Nodes[0].LogTail(50); !strings.Contains(log, name) || !strings.Contains(log, reason) {
		t.Errorf("the log does not name %s and %s:\n%s", name, reason, log)
	}
}

func (f *follower) assertNoProblem(t *testing.T, name string) {
	t.Helper()
	eventually(t, changeLimit, "no problem with "+name, func() bool {
		counted := nodeProblems(t, f.Nodes[0])
		for _, n := range counted {
			if n != "0" {
				return false
			}
		}
		return len(counted) > 0
	})
}

// nodeProblems are the samples of the metric node_problems by reason, which is its only label: with one for the node too, a
// cluster that falls in two would have as many series as the square of its nodes.
func nodeProblems(t *testing.T, node *lab.Node) map[string]string {
	t.Helper()
	counted := map[string]string{}
	for line := range strings.Lines(metrics(t, node)) {
		if labels, ok := strings.CutPrefix(line, `ebpf_cni_node_problems{reason="`); ok {
			reason, n, _ := strings.Cut(strings.TrimSpace(labels), `"} `)
			counted[reason] = n
		}
	}
	return counted
}
