package datapath

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

func modes() []attach.Mode { return []attach.Mode{attach.TCX, attach.Clsact} }

func TestLoadOnAFreshNode(t *testing.T) {
	opts := isolated(t, attach.Auto)
	dp := mustLoad(t, opts)
	for name := range embedded(t).Programs {
		if dp.ids[name] != pinnedID(t, opts, name) {
			t.Errorf("%s is not the program that was loaded", name)
		}
	}
	v, err := dp.Maps.Config.Get(config.Key{})
	check(t, err)
	if v.Layout != wire.LayoutVersion {
		t.Errorf("layout %d, want %d", v.Layout, wire.LayoutVersion)
	}
	for _, d := range registry.Pinned() {
		if d.Name == config.Name {
			continue
		}
		m, err := raw.Open(opts.Dir.Map(d.Name))
		check(t, err)
		check(t, raw.Each(m, func(key []byte, v raw.Value) error {
			if !v.Zero() {
				t.Errorf("the self-test has left in map %s: %x: %x", d.Name, key, v)
			}
			return nil
		}))
		check(t, m.Close())
	}
	if _, err := os.Stat(migrate.Dir(opts.Dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there", migrate.Dir(opts.Dir))
	}
	if got := dp.Maps.Capacity(snat.ReverseName); got != opts.SnatEntries {
		t.Errorf("capacity %d, want %d", got, opts.SnatEntries)
	}
}

// A first start that is killed in its self-test leaves the test interface among the pods'. The next one removes it, whatever it loads.
func TestTestPodOfAKilledStart(t *testing.T) {
	opts := isolated(t, attach.Auto)
	mustLoad(t, opts)
	for range 2 { // the second time the programs are other ones
		m, err := raw.Open(opts.Dir.Map(devices.Name))
		check(t, err)
		check(t, addTestPod(m))
		mustLoad(t, opts)
		if v, err := raw.Lookup(m, testKey(m)); err != nil || v != nil {
			t.Errorf("the test interface is still there: %x, error %v", v, err)
		}
		check(t, m.Close())
		opts.Spec = stubs(t)
	}
}

func TestUpgradeReplacesEveryAttachment(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, isolated(t, mode))
			before, old := n.pins(t), n.attached(t)
			n.opts.Spec = stubs(t)
			mustLoad(t, n.opts)
			n.verify(t)
			for p, state := range n.attached(t) {
				if state.ProgramID == old[p].ProgramID || state.Mode != mode {
					t.Errorf("%s of interface %d: %+v, was %+v", p.Hook, p.Ifindex, state, old[p])
				}
			}
			for path, id := range n.pins(t) {
				isProgram := strings.HasPrefix(path, n.opts.Dir.Programs())
				if same := id == before[path]; same == isProgram && id != 0 {
					t.Errorf("pin %s: object %d, was %d", path, id, before[path])
				}
			}
		})
	}
}

func TestLoadChangesHowProgramsAreAttached(t *testing.T) {
	opts := isolated(t, attach.TCX)
	opts.Attach = attach.Clsact
	n := newNode(t, opts)
	for _, mode := range []attach.Mode{attach.Auto, attach.Clsact} {
		n.opts.Attach = mode
		mustLoad(t, n.opts)
		n.verify(t)
		want := map[attach.Mode]attach.Mode{attach.Auto: attach.TCX, attach.Clsact: attach.Clsact}[mode]
		for p, state := range n.attached(t) {
			if state.Mode != want {
				t.Errorf("%s of interface %d is attached by %s, want %s", p.Hook, p.Ifindex, state.Mode, want)
			}
		}
	}
}

// bad is a build that must not get onto a node, and what its refusal says.
type bad struct {
	name    string
	change  func(*Options, *ebpf.CollectionSpec)
	matches error
	says    []string
}

func badBuilds() []bad {
	program := func(name string, ins ...asm.Instruction) func(*Options, *ebpf.CollectionSpec) {
		return func(_ *Options, s *ebpf.CollectionSpec) { s.Programs[name].Instructions = ins }
	}
	layout := func(name string, change func(*ebpf.MapSpec)) func(*Options, *ebpf.CollectionSpec) {
		return func(_ *Options, s *ebpf.CollectionSpec) {
			s.Maps[name].Key, s.Maps[name].Value = nil, nil
			change(s.Maps[name])
		}
	}
	return []bad{
		{"the verifier refuses", program("ec_from_uplink", asm.Mov.Reg(asm.R0, asm.R5), asm.Return()), nil, []string{"ec_from_uplink", "R5"}},
		{"an unknown action", program("ec_to_uplink", asm.Mov.Imm(asm.R0, 5), asm.Return()), ErrSelfTest, []string{"ec_to_uplink", "action 5"}},
		{"the chain is ended", program("ec_from_pod", asm.Mov.Imm(asm.R0, 0), asm.Return()), ErrSelfTest, []string{"ec_from_pod", "action 0"}},
		{"the collector fails", program("ec_collect", asm.Mov.Imm(asm.R0, 1), asm.Return()), ErrSelfTest, []string{"ec_collect"}},
		{"a value shrinks", layout("snat", func(m *ebpf.MapSpec) { m.ValueSize -= 8 }), ErrLayout, []string{"snat", "value is 72, was 80", "drain the node and reboot"}},
		{"a key changes", layout("conntrack", func(m *ebpf.MapSpec) { m.KeySize += 4 }), ErrLayout, []string{"conntrack", "key is 44, was 40"}},
		{"a type changes", layout("snat", func(m *ebpf.MapSpec) { m.Type = ebpf.LRUHash }), ErrLayout, []string{"snat", "type is LRUHash, was Hash"}},
		{"too small a table", func(o *Options, _ *ebpf.CollectionSpec) { o.SnatEntries = nodeFlows - 50 }, ErrLayout, []string{"snat", "250"}},
	}
}

func TestBadBuildsLeaveEverythingAsItWas(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	before, old := n.pins(t), n.attached(t)
	for _, b := range badBuilds() {
		opts := n.opts
		opts.Spec = stubs(t)
		b.change(&opts, opts.Spec)
		_, err := Load(context.Background(), opts)
		refused(t, b.name, err, b.matches, b.says...)
		if diff := cmp.Diff(before, n.pins(t)); diff != "" {
			t.Errorf("%s: pins (-before +after):\n%s", b.name, diff)
		}
		if diff := cmp.Diff(old, n.attached(t)); diff != "" {
			t.Errorf("%s: attachments (-before +after):\n%s", b.name, diff)
		}
		n.verify(t)
	}
}

func refused(t *testing.T, name string, err, matches error, says ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: not refused", name)
		return
	}
	if matches != nil && !errors.Is(err, matches) {
		t.Errorf("%s: %v does not match %v", name, err, matches)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %q does not say %q", name, err, s)
		}
	}
}

// A map whose content may be lost becomes one of another kind.
func TestMapOfAnotherKindBeginsEmpty(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	path := n.opts.Dir.Map(fragments.Name)
	check(t, os.Remove(path))
	old, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 40, ValueSize: 4, MaxEntries: 8192})
	check(t, err)
	defer old.Close()
	check(t, old.Put(make([]byte, 40), make([]byte, 4)))
	check(t, old.Pin(path))
	d, err := Load(context.Background(), n.opts)
	check(t, err)
	defer d.Close()
	m, err := typed.Open[fragments.Key, fragments.Value](path)
	check(t, err)
	defer m.Close()
	if m.Type() != ebpf.Array {
		t.Errorf("the pinned map is %v", m)
	}
	n.verify(t)
}

func TestNewerLayoutIsRefused(t *testing.T) {
	n := newNode(t, isolated(t, attach.Auto))
	m, err := config.Open(n.opts.Dir.Map(config.Name))
	check(t, err)
	defer m.Close()
	check(t, m.Put(config.Key{}, config.Value{Layout: wire.LayoutVersion + 1}))
	old := n.attached(t)
	_, err = Load(context.Background(), n.opts)
	refused(t, "newer layout", err, ErrLayout, "newer build", "drain the node and reboot")
	if diff := cmp.Diff(old, n.attached(t)); diff != "" {
		t.Errorf("attachments (-before +after):\n%s", diff)
	}
}

func TestLoadWaitsForPodsWithinBounds(t *testing.T) {
	opts := isolated(t, attach.Auto)
	lock, err := bpffs.Shared(context.Background(), opts.StateDir, "test")
	check(t, err)
	defer lock.Release()
	opts.LockTimeout = 20e6
	_, err = Load(context.Background(), opts)
	refused(t, "locked", err, bpffs.ErrLocked, opts.StateDir)
}

func TestLoadSaysWhatItHoldsTheLockFor(t *testing.T) {
	opts := isolated(t, attach.Auto)
	var inTheWay error
	opts.begin = func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_, inTheWay = bpffs.Shared(ctx, opts.StateDir, "ADD")
	}
	mustLoad(t, opts)
	refused(t, "start", inTheWay, bpffs.ErrLocked, " start (")
	opts.work = "mode change"
	mustLoad(t, opts)
	refused(t, "mode change", inTheWay, bpffs.ErrLocked, " mode change (")
}

func TestPinDirectoryMustBeOnBPFFS(t *testing.T) {
	opts := isolated(t, attach.Auto)
	opts.Dir = bpffs.Dir(t.TempDir())
	_, err := Load(context.Background(), opts)
	refused(t, "not bpffs", err, bpffs.ErrNotBPFFS, string(opts.Dir))
}

func TestDeadLinksAreSwept(t *testing.T) {
	n := newNode(t, isolated(t, attach.TCX))
	gone := addVeth(t, "gone")
	dp := mustLoad(t, n.opts)
	check(t, dp.Attach(gone, attach.FromPod))
	removeVeth(t, "gone")
	mustLoad(t, n.opts)
	if _, err := os.Stat(n.opts.Dir.Link(string(attach.FromPod), gone)); !errors.Is(err, os.ErrNotExist) {
		t.Error("the link of a device that is gone is still pinned")
	}
	n.verify(t)
}

// TestMapsHaveNamedFields: what bpftool prints of a map stands in the BTF that the kernel has of it, and the kernel
// takes it or, without an error that anybody sees, does not.
func TestMapsHaveNamedFields(t *testing.T) {
	opts := isolated(t, attach.Auto)
	mustLoad(t, opts)
	for _, d := range registry.Pinned() {
		name := d.Name
		m, err := ebpf.LoadPinnedMap(opts.Dir.Map(name), nil)
		check(t, err)
		info, err := m.Info()
		check(t, err)
		if _, ok := info.BTFID(); !ok {
			t.Errorf("map %s has no BTF", name)
		}
		if info.Name != kernelPrefix+name {
			t.Errorf("map %s is called %s in the kernel", name, info.Name)
		}
		check(t, m.Close())
	}
}
