package datapath

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// toPods returns how the program for what is sent to pods is attached, by pod; all of them run the pinned one.
func (n node) toPods(t *testing.T) []attach.Mode {
	t.Helper()
	var modes []attach.Mode
	for _, pod := range n.pods {
		state, err := n.opts.attacher().Attached(pod, attach.ToPod)
		check(t, err)
		if state.Mode != "" && state.ProgramID != pinnedID(t, n.opts, attach.ToPod.Program()) {
			t.Errorf("interface %d runs program %d, which is not the pinned one", pod, state.ProgramID)
		}
		modes = append(modes, state.Mode)
	}
	return modes
}

// all is a mode for each pod.
func (n node) all(mode attach.Mode) []attach.Mode {
	return slices.Repeat([]attach.Mode{mode}, len(n.pods))
}

// serving are the options with which the programs serve Services, or not, where no cgroup is needed.
func (n node) serving(on bool) Options {
	opts := n.opts
	opts.NodeConfig.Services, opts.Cgroup = 0, "/nowhere"
	if on {
		opts.NodeConfig.Services, opts.Cgroup = 1, n.opts.Cgroup
	}
	return opts
}

// TestServicesAreTurnedOnAndOff at starts and by a change of mode, with pods on the node.
func TestServicesAreTurnedOnAndOff(t *testing.T) {
	for mode, want := range map[attach.Mode]attach.Mode{attach.Auto: attach.Clsact, attach.Clsact: attach.Clsact, attach.TCX: attach.TCX} {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, isolated(t, mode))
			n.opts.Spec, n.opts.Cgroup = stubs(t), priv.Cgroup(t)
			for _, on := range []bool{false, true, true, false, true} {
				dp := mustLoad(t, n.serving(on))
				n.assertSockets(t, on)
				for _, name := range []string{sockets.Name, affinity.ClientsName} {
					if got := dp.Maps.Capacity(name); got == 1 == on {
						t.Errorf("Services on: %v; map %s has room for %d", on, name, got)
					}
				}
				if on {
					n.assertToPods(t, want)
					check(t, dp.Reconfigure(context.Background(), n.serving(on).NodeConfig, false))
					n.assertToPods(t, want)
					n.assertSockets(t, true)
				} else {
					n.assertToPods(t, "")
				}
				n.verify(t)
				for _, pod := range n.pods {
					if ours := mode == attach.Clsact || on && want == attach.Clsact; hasClsact(t, pod) != ours {
						t.Errorf("Services on: %v; interface %d has a clsact qdisc: %v", on, pod, !ours)
					}
				}
			}
			check(t, Remove(context.Background(), n.opts))
			n.opts.Spec = nil
			n.assertSockets(t, false)
			for _, pod := range n.pods {
				state, err := n.opts.attacher().Attached(pod, attach.ToPod)
				check(t, err)
				if state.Mode != "" || hasClsact(t, pod) {
					t.Errorf("interface %d still carries %+v, or the qdisc", pod, state)
				}
			}
		})
	}
}

func (n node) assertToPods(t *testing.T, mode attach.Mode) {
	t.Helper()
	if diff := cmp.Diff(n.all(mode), n.toPods(t)); diff != "" {
		t.Errorf("programs of pods (-want +got):\n%s", diff)
	}
}

// assertSockets says whether the programs for sockets are on the cgroup, all of them the pinned ones.
func (n node) assertSockets(t *testing.T, on bool) {
	t.Helper()
	for _, hook := range attach.SocketHooks() {
		state, err := n.serving(true).attacher().Attached(0, hook)
		check(t, err)
		var want attach.State
		if on {
			want = attach.State{Mode: attach.Cgroup, ProgramID: pinnedID(t, n.opts, hook.Program())}
		}
		if state != want {
			t.Errorf("%s: %+v, want %+v", hook, state, want)
		}
	}
}

// TestServicesThatCouldNotBeTurnedOn fails each step of a start that turns them on, before and after all pods have the program.
func TestServicesThatCouldNotBeTurnedOn(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	n.opts.Spec, n.opts.Cgroup = stubs(t), priv.Cgroup(t)
	before, old := n.pins(t), n.attached(t)
	broken := errors.New("broken")
	var attached int
	for fail := 1; ; fail++ {
		attached = 0
		dp, err := load(context.Background(), n.serving(true), func(s step) error {
			if s == stepAttached {
				attached++
			}
			if attached == fail {
				return broken
			}
			return nil
		})
		if err == nil {
			check(t, dp.Close())
			break
		}
		if !errors.Is(err, broken) {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, n.pins(t)); diff != "" {
			t.Errorf("attachment %d: pins (-before +after):\n%s", fail, diff)
		}
		if diff := cmp.Diff(old, n.attached(t)); diff != "" {
			t.Errorf("attachment %d: (-before +after):\n%s", fail, diff)
		}
		n.assertToPods(t, "")
		n.assertSockets(t, false)
	}
	if want := 2*len(n.pods) + len(attach.UplinkHooks()) + len(attach.SocketHooks()); attached != want {
		t.Errorf("%d programs were attached, want %d", attached, want)
	}
	n.assertToPods(t, attach.Clsact)
	n.assertSockets(t, true)

	// An upgrade that fails leaves the old programs in their place, and so does a start that turns Services off.
	off := n.serving(false)
	off.Cgroup = n.opts.Cgroup
	for _, opts := range []Options{n.serving(true), off} {
		_, err := load(context.Background(), opts, func(s step) error {
			if s == stepMerged {
				return broken
			}
			return nil
		})
		if !errors.Is(err, broken) {
			t.Fatal(err)
		}
		n.assertSockets(t, true)
	}
}

// TestSocketsMoveToAnotherCgroup when a start names one, and stay on the old one if that start fails before they have.
func TestSocketsMoveToAnotherCgroup(t *testing.T) {
	old := newNode(t, isolated(t, attach.Auto))
	old.opts.Spec, old.opts.Cgroup = stubs(t), priv.Cgroup(t)
	mustLoad(t, old.serving(true))
	moved := old
	moved.opts.Cgroup = priv.Cgroup(t)
	broken := errors.New("broken")
	_, err := load(context.Background(), moved.serving(true), func(s step) error {
		if s == stepCommitted {
			return broken
		}
		return nil
	})
	if !errors.Is(err, broken) {
		t.Fatal(err)
	}
	old.assertSockets(t, true)
	moved.assertSockets(t, false)
	mustLoad(t, moved.serving(true))
	old.assertSockets(t, false)
	moved.assertSockets(t, true)
}

// TestSocketsAreAttachedAgain after somebody has removed some.
func TestSocketsAreAttachedAgain(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	n.opts.Spec, n.opts.Cgroup = stubs(t), priv.Cgroup(t)
	dp := mustLoad(t, n.serving(true))
	gone := []attach.Hook{attach.Recvmsg6, attach.Connect4}
	for _, hook := range gone {
		check(t, os.Remove(n.opts.Dir.Link(string(hook), 0)))
	}
	for _, want := range [][]attach.Hook{gone, nil} {
		attached, err := dp.AttachSockets()
		check(t, err)
		if !slices.Equal(attached, want) {
			t.Errorf("attached to %v, want %v", attached, want)
		}
		n.assertSockets(t, true)
	}
}

// TestPodThatIsGoneGetsNoProgram: its entry in the map may be left.
func TestPodThatIsGoneGetsNoProgram(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	n.opts.Spec = stubs(t)
	removeVeth(t, "pod2")
	mustLoad(t, n.serving(true))
	if got, want := n.toPods(t), []attach.Mode{attach.Clsact, "", attach.Clsact}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
