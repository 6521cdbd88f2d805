package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The builds that a node is upgraded to. Each is a directory with agent and plugin.
type builds struct {
	differing, refused, grown string
}

func makeBuilds(t *testing.T) builds {
	t.Helper()
	differing := build(t, []edit{otherPrograms()}, map[string]string{"bpf/other.go": programsThatDiffer}, "ebpf-agent", "ebpf-cni")
	grown := build(t, []edit{
		otherPrograms(),
		{"maps/snat/snat.go", [][2]string{{"	Pod uint32\n}", "	Pod   uint32\n	Grown uint64\n}"}}},
		{"maps/wire/wire_gen.go", [][2]string{{"LayoutVersion  = 3 //", "LayoutVersion  = 4 //"}}},
	}, map[string]string{"bpf/other.go": programsThatGrow}, "ebpf-agent", "ebpf-cni")
	// One program that looks at its directory's name, which saves a build.
	refused := filepath.Join(t.TempDir(), "refused")
	if err := os.Mkdir(refused, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"ebpf-agent", "ebpf-cni"} {
		if err := os.Link(filepath.Join(differing, program), filepath.Join(refused, program)); err != nil {
			t.Fatal(err)
		}
	}
	return builds{differing, refused, grown}
}

// upgraded is a cluster of two nodes with 1 000 TCP connections: half of them masqueraded, half across nodes, some in
// use all the time. Beside them datagrams that are counted, and connections that come and go.
type upgraded struct {
	*lab.Lab
	a, far      *lab.Pod
	world, pods *connections
	steady      []*steadyFlows
	streams     []*numbered
	comers      *comers
	outside     netip.AddrPort
}

func startUpgraded(t *testing.T) *upgraded {
	t.Helper()
	// Only where maps move: a connection that opens then may meet both builds before what they know is joined, and TCP
	// repeats the packet. See assertAllMapped.
	u := &upgraded{Lab: startCluster(t, lab.Options{Nodes: 2}, drops.NoMapping)}
	u.a, u.far = addPod(t, u.Nodes[0], "a"), addPod(t, u.Nodes[1], "far")
	outside, far := serve(t, u.Outside), serve(t, u.far.Namespace)
	byStack(t, u.Nodes[0], func() { u.steady = append(u.steady, startSteadyFlows(t, u.a.Namespace, outside)) })
	assertReaches(t, u.a.Namespace, far, u.a.Addr())
	u.steady = append(u.steady, startSteadyFlows(t, u.a.Namespace, outside, far))
	const busy, idle = 20, 480
	u.world = connect(t, u.a.Namespace, outside, busy, idle)
	u.pods = connect(t, u.a.Namespace, far, busy, idle)
	u.streams = []*numbered{
		startNumbered(t, "a > far", u.a.Namespace, u.far.Namespace), startNumbered(t, "a > outside", u.a.Namespace, u.Outside),
	}
	u.comers, u.outside = startComers(t, u.a.Namespace, outside), outside
	return u
}

// end ends all traffic; what was lost of it is an error.
func (u *upgraded) end(t *testing.T) {
	t.Helper()
	u.comers.end(t)
	for _, stream := range u.streams {
		stream.end(t)
	}
	for _, flows := range u.steady {
		flows.end(t)
	}
}

// comers are short connections, one after the other.
type comers struct {
	stop   context.CancelFunc
	done   chan struct{}
	opened int
	failed []error
}

func startComers(t *testing.T, from *lab.Namespace, to netip.AddrPort) *comers {
	ctx, stop := context.WithCancel(t.Context())
	c := &comers{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		// Their ports rest for seconds: not so many that one is hard to find.
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for ; ctx.Err() == nil; c.opened++ {
			limited, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			if _, err := from.TCP(limited, to); err != nil {
				c.failed = append(c.failed, err)
			}
			cancel()
			<-tick.C
		}
	}()
	t.Cleanup(func() { stop(); <-c.done })
	return c
}

func (c *comers) end(t *testing.T) {
	t.Helper()
	c.stop()
	<-c.done
	if len(c.failed) > 0 || c.opened < 100 {
		t.Errorf("of %d new connections %d failed: %v", c.opened, len(c.failed), errors.Join(c.failed...))
	}
}

func (u *upgraded) assertAlive(t *testing.T, when string) {
	t.Helper()
	u.world.assertAlive(t, when+", masqueraded")
	u.pods.assertAlive(t, when+", across nodes")
}

// assertAllMapped: up to here no flow was without its mapping, not for one packet.
func (u *upgraded) assertAllMapped(t *testing.T, when string) {
	t.Helper()
	for _, node := range u.Nodes {
		if lost := dropped(t, node, drops.NoMapping); lost != 0 {
			t.Errorf("%s: %s has dropped %d packets without a mapping, want none: no map has moved yet", when, node.Name, lost)
		}
	}
}

// replace ends the agents of both nodes and starts another build's.
func (u *upgraded) replace(t *testing.T, dir string) {
	t.Helper()
	for _, node := range u.Nodes {
		if _, err := node.StopAgent(); err != nil {
			t.Fatal(err)
		}
		if err := node.StartAgentBinary(filepath.Join(dir, "ebpf-agent")); err != nil {
			t.Fatal(err)
		}
	}
	for _, node := range u.Nodes {
		if err := node.WaitReady(within(t, readyLimit)); err != nil {
			t.Fatal(err)
		}
		assertOnlyPinned(t, node, "after the upgrade")
	}
}

// interrupt kills the first node's agent while it brings another build onto the node.
func (u *upgraded) interrupt(t *testing.T, dir string) {
	t.Helper()
	node := u.Nodes[0]
	// The maps move after some hundred milliseconds.
	for _, age := range []int{100, 200, 300, 400, 500, 600, 700, 800} {
		if err := node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		if err := node.StartAgentBinary(filepath.Join(dir, "ebpf-agent")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(age) * time.Millisecond) // when it dies is the point of the test
	}
}

// assertNewPod: with the plugin that this build has installed, pods still come and go.
func (u *upgraded) assertNewPod(t *testing.T, name string) {
	t.Helper()
	node := u.Nodes[0]
	pod := addPod(t, node, name)
	assertReaches(t, pod.Namespace, serve(t, u.far.Namespace), pod.Addr())
	assertReaches(t, pod.Namespace, serve(t, u.Outside), node.Addr())
	if err := node.DelPod(t.Context(), pod); err != nil {
		t.Error(err)
	}
}

// refuse starts a build that must not get onto the first node, with a setting that is new too: it says why, and changes nothing.
func (u *upgraded) refuse(t *testing.T, dir string, words ...string) {
	t.Helper()
	node := u.Nodes[0]
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	was := whole(t, node)
	if err := node.StartAgentBinary(filepath.Join(dir, "ebpf-agent"), "--snat-ports=40000-50000"); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyLimit, "the agent ends", func() bool { return !node.AgentRunning() })
	// The same output that a person would look at.
	said := node.LogTail(100)
	for _, word := range words {
		if !strings.Contains(said, word) {
			t.Errorf("the agent does not say %q:\n%s", word, said)
		}
	}
	if diff := cmp.Diff(was, whole(t, node)); diff != "" {
		t.Errorf("a build that was refused changed the node:\n%s", diff)
	}
}

// whole is all of a node that an agent could change: objects in the kernel, network, sysctls and files, but for what it says of itself
// and the empty directory for an upgrade. Link-local addresses of new links become usable in the kernel's own time.
func whole(t *testing.T, node *lab.Node) []string {
	t.Helper()
	all, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return append(objects(t, node), all.Without("/"+observe.ClusterFile+" ", "/next ", " fe80::")...)
}

// goBack has the build of before try to take over the first node from one whose record has grown: it is refused, and the node
// lives on, by the dataplane and the plugin of the newer build, whose agent takes it up again.
func (u *upgraded) goBack(t *testing.T, newer string) {
	t.Helper()
	node := u.Nodes[0]
	older, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	u.refuse(t, filepath.Dir(older), fmt.Sprintf("layout %d", wire.LayoutVersion+1), "cleanup")
	u.assertAlive(t, "an older build")
	u.assertNewPod(t, "beside")
	if err := node.StartAgentBinary(filepath.Join(newer, "ebpf-agent")); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	u.assertAlive(t, "the newer build again")
	u.assertNewPod(t, "after")
}

// tagOf is the kernel's digest of the program that a pod's packets meet.
func tagOf(t *testing.T, node *lab.Node) string {
	t.Helper()
	p, err := ebpf.LoadPinnedProgram(bpffs.Dir(node.BPFFS()).Program("ec_from_pod"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	return info.Tag
}

// layoutOf is the size of a value of the masquerading table.
func layoutOf(t *testing.T, node *lab.Node) uint32 {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(bpffs.Dir(node.BPFFS()).Map("snat"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	return m.ValueSize()
}

// walksStack says whether a flow, as ebpfctl shows it, goes by the host's stack.
func walksStack(row map[string]any) bool {
	flags, _ := row["flags"].(string)
	return slices.Contains(strings.Split(flags, "|"), "via_stack")
}

// TestLifeUpgradeInPlace upgrades under 1 000 flows: none is lost, whatever comes.
func TestLifeUpgradeInPlace(t *testing.T) {
	t.Parallel()
	made := makeBuilds(t)
	u := startUpgraded(t)
	node := u.Nodes[0]
	u.assertAlive(t, "before")
	tag, layout := tagOf(t, node), layoutOf(t, node)

	u.replace(t, made.differing)
	if now := tagOf(t, node); now == tag {
		t.Errorf("the program is still %s: this shows nothing", tag)
	}
	u.assertAlive(t, "other programs")
	u.assertNewPod(t, "differing")
	u.assertAllMapped(t, "other programs")

	u.refuse(t, made.refused, "ec_", "R9 !read_ok")
	u.assertAlive(t, "programs that were refused")
	u.assertAllMapped(t, "programs that were refused")

	if err := node.StartAgent(); err != nil { // so that there is one to replace
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	// Cut off halfway, both builds run until the next start: what is there lives on, what opens meanwhile may have to wait.
	u.comers.end(t)
	u.interrupt(t, made.grown)
	u.assertAlive(t, "an upgrade to another layout that was killed")
	u.comers = startComers(t, u.a.Namespace, u.outside)
	u.replace(t, made.grown)
	if now := layoutOf(t, node); now != layout+8 {
		t.Errorf("a value of snat has %d bytes, had %d: this shows nothing", now, layout)
	}
	u.assertAlive(t, "another layout")
	u.assertNewPod(t, "grown")

	u.goBack(t, made.grown)
	u.end(t)
}
