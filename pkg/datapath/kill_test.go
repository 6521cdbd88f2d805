package datapath

import (
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// The child is this test binary, told by its environment which build to load
// and in which step, by number, to be killed.
const (
	childStep  = "ECDP_CHILD_STEP"
	childDir   = "ECDP_CHILD_DIR"
	childState = "ECDP_CHILD_STATE"
	childMode  = "ECDP_CHILD_MODE"
	// childFew has it keep only the rights that the DaemonSet names, and load the real build.
	childFew = "ECDP_CHILD_FEW"
)

// child loads the grown build and kills itself.
func child() int {
	t := &testing.T{}
	few := os.Getenv(childFew)
	if few == "drop" {
		check(t, os.Setenv(childFew, "dropped"))
		fmt.Fprintln(os.Stderr, priv.ExecWith(priv.ManifestRights, []string{"/proc/self/exe"}, os.Environ()))
		return 2
	}
	opts := optionsIn(os.Getenv(childDir), os.Getenv(childState), attach.Mode(os.Getenv(childMode)))
	if few == "" {
		opts.Spec = grown(t)
	} else {
		opts.NodeConfig.NetfilterNat = config.Translates // which takes the most rights
	}
	kill, err := strconv.Atoi(os.Getenv(childStep))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	steps := 0
	_, err = load(context.Background(), opts, func(s step) error {
		if steps++; steps > kill {
			fmt.Println(s)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "%+v\n", err)
		return 4
	}
	return 0
}

// killedAt loads the grown build in a process that is killed in that step, and
// returns the step's name; false when the process came to its end.
func killedAt(t *testing.T, opts Options, number int) (string, bool) {
	t.Helper()
	self, err := os.Executable()
	check(t, err)
	cmd := exec.Command(self)
	cmd.Env = childEnviron(opts, number)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err == nil {
		return "", false
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !status.Signaled() {
		t.Fatalf("step %d: %v", number, err)
	}
	return strings.TrimSpace(string(out)), true
}

func childEnviron(opts Options, number int) []string {
	return append(os.Environ(), childStep+"="+strconv.Itoa(number), childDir+"="+string(opts.Dir),
		childState+"="+opts.StateDir, childMode+"="+string(opts.Attach))
}

// TestKilledAtAnyStep kills an upgrade to a grown layout at each of its steps.
// Then the same build starts again, and another time the build of before does.
func TestKilledAtAnyStep(t *testing.T) {
	// Only attaching differs by mode: for the second one, fewer steps do.
	for mode, stride := range map[attach.Mode]int{attach.TCX: 1, attach.Clsact: 3} {
		t.Run(string(mode), func(t *testing.T) {
			base := isolated(t, mode)
			published := false
			for number := 0; ; number += stride {
				opts := base
				opts.StateDir, opts.Spec = t.TempDir(), stubs(t)
				n := newNode(t, opts)
				name, killed := killedAt(t, opts, number)
				if !killed {
					n.clear(t)
					break
				}
				published = published || name == string(stepPublished)
				n.afterKill(t, fmt.Sprintf("step %d (%s)", number, name), name)
				n.clear(t)
			}
			if !published {
				t.Error("no step published anything")
			}
		})
	}
}

// afterKill checks that the node works on, and that a start puts things right.
func (n node) afterKill(t *testing.T, where, name string) {
	t.Helper()
	n.attached(t)
	// A flow that is opened in the old map before the next start.
	old, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(snat.Name), nil)
	check(t, err)
	defer old.Close()
	key := raw.Encode(make([]byte, 40), flowKey(2))
	v, err := raw.Lookup(old, key)
	check(t, err)
	flow := raw.Decode[snat.Value](v[0])
	flow.LastSeen = 7000 * second
	check(t, raw.Update(old, key, raw.Value{raw.Encode(v[0], flow)}, ebpf.UpdateAny))

	if name != string(stepPublished) {
		before := n.opts
		before.Spec = stubs(t)
		dp, err := Load(context.Background(), before)
		if err != nil {
			t.Fatalf("%s: the build of before: %+v", where, err)
		}
		_ = dp.Close()
		n.verify(t)
		n.verifySeen(t, where+", back", 7000*second)
	}
	again := n.opts
	again.Spec = grown(t)
	dp, err := Load(context.Background(), again)
	if err != nil {
		t.Fatalf("%s: the new build: %+v", where, err)
	}
	_ = dp.Close()
	n.verify(t)
	n.verifySeen(t, where+", on", 7000*second)
	if _, err := os.Stat(migrate.Dir(n.opts.Dir)); err == nil {
		t.Errorf("%s: pins of the upgrade are left", where)
	}
	if t.Failed() {
		t.Fatalf("failed at %s", where)
	}
}

func (n node) verifySeen(t *testing.T, where string, seen uint64) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(snat.Name), nil)
	check(t, err)
	defer m.Close()
	v, err := raw.Lookup(m, raw.Encode(make([]byte, 40), flowKey(2)))
	check(t, err)
	if got := raw.Decode[snat.Value](v[0]).LastSeen; got != seen {
		t.Errorf("%s: flow 2 was seen at %d, want %d", where, got, seen)
	}
}

// clear makes room for the next node.
func (n node) clear(t *testing.T) {
	t.Helper()
	check(t, Remove(context.Background(), n.opts))
	for _, name := range []string{"up", "pod1", "pod2", "pod3"} {
		removeVeth(t, name)
	}
}

// killedWhenCommitted has an upgrade killed as soon as it is committed to its maps: the pins of before are still there.
func killedWhenCommitted(t *testing.T, opts Options) {
	t.Helper()
	for number := 0; ; number++ {
		name, killed := killedAt(t, opts, number)
		if !killed {
			t.Fatal("the upgrade was not committed")
		}
		if name == string(stepCommitted) {
			return
		}
	}
}

// TestMapsOfAnInterruptedUpgradeAlone has somebody remove the maps of before
// after an upgrade was killed.
func TestMapsOfAnInterruptedUpgradeAlone(t *testing.T) {
	opts := isolated(t, attach.Auto)
	opts.Spec = stubs(t)
	n := newNode(t, opts)
	killedWhenCommitted(t, opts)
	check(t, os.RemoveAll(opts.Dir.Maps()))
	n.opts.Spec = grown(t)
	mustLoad(t, n.opts)
	// The links tell where programs are attached.
	n.verify(t)
}

// TestWhatWasWrittenAfterAKillStays has the plugin work between an upgrade that was killed and the next start, by the
// build of before, by the new one, and by a third.
func TestWhatWasWrittenAfterAKillStays(t *testing.T) {
	for name, build := range map[string]func(testing.TB) *ebpf.CollectionSpec{
		"the build of before": stubs, "the new build": grown,
		"a third build": func(t testing.TB) *ebpf.CollectionSpec {
			spec := grown(t)
			for _, d := range registry.Pinned() {
				grow(spec, d.Name, 16)
			}
			return spec
		},
	} {
		t.Run(name, func(t *testing.T) {
			opts := isolated(t, attach.Auto)
			opts.Spec = stubs(t)
			n := newNode(t, opts)
			killedWhenCommitted(t, opts)
			added, changed, gone := addr("10.244.1.77"), addr("10.244.1.2"), addr("10.244.1.3")
			m, err := endpoints.Open(opts.Dir.Map(endpoints.Name))
			check(t, err)
			defer m.Close()
			check(t, m.Put(endpoints.Key{Address: added}, endpoints.Value{Ifindex: 7}))
			check(t, m.Put(endpoints.Key{Address: changed}, endpoints.Value{Ifindex: 8}))
			check(t, m.Delete(endpoints.Key{Address: gone}))
			opts.Spec = build(t)
			mustLoad(t, opts)
			now, err := ebpf.LoadPinnedMap(opts.Dir.Map(endpoints.Name), nil)
			check(t, err)
			defer now.Close()
			for address, want := range map[wire.Addr]uint32{added: 7, changed: 8, gone: 0, addr("10.244.1.4"): uint32(n.pods[2])} {
				v, err := raw.Lookup(now, raw.Encode(make([]byte, 16), endpoints.Key{Address: address}))
				check(t, err)
				var got uint32
				if v != nil {
					got = raw.Decode[endpoints.Value](v[0]).Ifindex
				}
				if got != want {
					t.Errorf("the entry of %s leads to %d, want %d", address, got, want)
				}
			}
		})
	}
}

// TestLoadWithFewRights loads with what the DaemonSet has: a program that is
// attached and not pinned can't be opened then, and is replaced all the same.
func TestLoadWithFewRights(t *testing.T) {
	for _, mode := range []attach.Mode{attach.TCX, attach.Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			opts := isolated(t, mode)
			opts.Spec = stubs(t)
			n := newNode(t, opts)
			check(t, os.RemoveAll(opts.Dir.Programs()))
			self, err := os.Executable()
			check(t, err)
			cmd := exec.Command(self)
			cmd.Env = append(childEnviron(opts, math.MaxInt), childFew+"=drop")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			n.verify(t)
		})
	}
}
