package e2e

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// standstill is how long an exchange that cannot work is looked at, at least. TCP repeats a packet twice meanwhile, and again after.
const standstill = time.Second

// way is one direction in which somebody opens flows; old is a connection that was there before. What is opened anew is a
// connection of its own unless there is something else.
type way struct {
	name string
	from *lab.Namespace
	to   netip.AddrPort
	old  *lab.TCPConn
	anew func(context.Context) error
}

// maimed is a node without an agent, from which a person removes one program.
type maimed struct {
	*lab.Lab
	node *lab.Node
	pod  *lab.Pod
	ways []way
	// attacher is what a person would use to put the program back.
	attacher attach.Attacher
}

func newMaimed(l *lab.Lab, node *lab.Node, pod *lab.Pod, flag string) *maimed {
	mode := attach.Mode(strings.TrimPrefix(flag, "--attach="))
	return &maimed{Lab: l, node: node, pod: pod, attacher: attach.Attacher{Dir: bpffs.Dir(node.BPFFS()), Mode: mode}}
}

func startMaimed(t *testing.T, flag string) *maimed {
	t.Helper()
	// The host knows nothing of a pod's connection: its resets must not end one, and are dropped as NO_MAPPING.
	l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{flag}}, drops.NoMapping)
	m := newMaimed(l, l.Nodes[0], addPod(t, l.Nodes[0], "a"), flag)
	near, far := addPod(t, m.node, "near"), addPod(t, m.Nodes[1], "far")
	pod, own := m.pod.Namespace, serve(t, m.pod.Namespace)
	m.ways = []way{
		{name: "pod to the world", from: pod, to: serve(t, m.Outside)},
		{name: "pod to another node's", from: pod, to: serve(t, far.Namespace)},
		{name: "pod to the same node's", from: pod, to: serve(t, near.Namespace)},
		{name: "pod to its host", from: pod, to: serve(t, m.node.Namespace)},
		{name: "another node's to the pod", from: far.Namespace, to: own},
		{name: "host to its pod", from: m.node.Namespace, to: own},
	}
	for i := range m.ways {
		w := &m.ways[i]
		if _, err := w.from.TCP(t.Context(), w.to); err != nil { // so that neighbours are known
			t.Fatalf("%s: %v", w.name, err)
		}
		var err error
		if w.old, err = w.from.DialTCP(t.Context(), w.to, 0); err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
		t.Cleanup(func() { w.old.Close() })
	}
	if err := m.node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	return m
}

// place is the interface that carries the hook.
func (m *maimed) place(t *testing.T, hook attach.Hook) int {
	t.Helper()
	name := lab.Uplink
	if hook == attach.FromPod {
		name = m.pod.Result.Interfaces[0].Name
	}
	found, err := m.node.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return found.Attrs().Index
}

func (m *maimed) remove(t *testing.T, index int, hook attach.Hook) {
	t.Helper()
	var left attach.State
	err := m.node.Do(func() (err error) {
		if err := m.attacher.Detach(index, hook); err != nil {
			return err
		}
		left, err = m.attacher.Attached(index, hook)
		return err
	})
	if err != nil || left.Mode != "" {
		t.Fatalf("%s is not removed: %+v (error %v)", hook, left, err)
	}
}

func (m *maimed) putBack(t *testing.T, index int, hook attach.Hook) {
	t.Helper()
	program, err := ebpf.LoadPinnedProgram(m.attacher.Dir.Program(hook.Program()), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if err := m.node.Do(func() error { _, err := m.attacher.Attach(index, hook, program); return err }); err != nil {
		t.Fatal(err)
	}
}

// exchange is one on its way, which may take until the program is back.
type exchange struct {
	name  string
	ended chan error
}

// exchanges has every way used twice: by the flow that is there, and by a new one.
func (m *maimed) exchanges(ctx context.Context) (all []exchange) {
	start := func(name string, do func() error) {
		e := exchange{name, make(chan error, 1)}
		go func() { e.ended <- do() }()
		all = append(all, e)
	}
	for _, w := range m.ways {
		if w.old != nil {
			start("old, "+w.name, func() error { return w.old.Echo(ctx, 100) })
		}
		if w.anew == nil {
			w.anew = func(ctx context.Context) error { _, err := w.from.TCP(ctx, w.to); return err }
		}
		start("new, "+w.name, func() error { return w.anew(ctx) })
	}
	return all
}

// withoutProgram removes a program, checks who is cut off then, and that nobody is once it is back. Exchanges that are
// not to be cut off are waited for, however slow the computer is; the others are looked at after that.
func (m *maimed) withoutProgram(t *testing.T, hook attach.Hook, cut []string, meanwhile func()) {
	t.Helper()
	index := m.place(t, hook)
	m.remove(t, index, hook)
	removed := time.Now()
	var hindered, unhindered []exchange
	for _, e := range m.exchanges(within(t, 20*time.Second)) {
		if slices.Contains(cut, e.name) {
			hindered = append(hindered, e)
		} else {
			unhindered = append(unhindered, e)
		}
	}
	pending := waitFor(t, unhindered, priv.Patience(10*time.Second))
	pending = append(pending, waitFor(t, hindered, standstill-time.Since(removed))...)
	var names []string
	for _, e := range pending {
		names = append(names, e.name)
	}
	if diff := cmp.Diff(cut, names); diff != "" {
		t.Errorf("exchanges that stand still (-want +got):\n%s", diff)
	}
	meanwhile()
	m.putBack(t, index, hook)
	for _, e := range waitFor(t, pending, priv.Patience(10*time.Second)) {
		t.Errorf("%s: still stands when the program is back", e.name)
	}
}

// waitFor looks at exchanges until all have ended or the time is up, and returns those that go on.
func waitFor(t *testing.T, all []exchange, limit time.Duration) (pending []exchange) {
	t.Helper()
	after := time.After(limit)
	for i, e := range all {
		select {
		case err := <-e.ended:
			if err != nil {
				t.Errorf("%s: %v", e.name, err)
			}
		case <-after:
			for _, late := range all[i:] {
				select {
				case err := <-late.ended:
					if err != nil {
						t.Errorf("%s: %v", late.name, err)
					}
				default:
					pending = append(pending, late)
				}
			}
			return pending
		}
	}
	return nil
}

// Each program removed alone, by a person or a fault, with no agent to repair it: who is then cut off, and that nobody
// loses a connection for good. What leaves a pod is masqueraded by either of two programs, what comes back is known to
// one alone.
func TestEachProgramRemovedAlone(t *testing.T) {
	t.Parallel()
	stands := map[attach.Hook][]string{
		attach.FromPod:    nil,
		attach.ToUplink:   nil,
		attach.FromUplink: {"old, pod to the world", "new, pod to the world"},
	}
	forEachAttach(t, func(t *testing.T, flag string) {
		m := startMaimed(t, flag)
		for hook, cut := range stands {
			t.Run(string(hook), func(t *testing.T) {
				m.withoutProgram(t, hook, cut, func() {})
			})
		}
	})
}
