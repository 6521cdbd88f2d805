package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// lacking is a kernel that has everything but what it lacks.
func lacking(programs []ebpf.ProgramType, helpers []asm.BuiltinFunc, maps []ebpf.MapType, with error) kernel {
	return kernel{
		programType: func(t ebpf.ProgramType) error { return if1(slices.Contains(programs, t), with) },
		helper:      func(_ ebpf.ProgramType, h asm.BuiltinFunc) error { return if1(slices.Contains(helpers, h), with) },
		mapType:     func(t ebpf.MapType) error { return if1(slices.Contains(maps, t), with) },
		tcx:         func() error { return nil },
		release:     func() string { return "5.4.0-test" },
		function:    func(string) bool { return false },
		realtime:    func() bool { return false },
	}
}

func if1(cond bool, err error) error {
	if cond {
		return fmt.Errorf("probed: %w", err)
	}
	return nil
}

func TestProbeNamesAllThatIsMissing(t *testing.T) {
	spec := embedded(t)
	old := lacking(nil, []asm.BuiltinFunc{asm.FnRedirectPeer, asm.FnRedirectNeigh}, []ebpf.MapType{ebpf.LPMTrie}, ebpf.ErrNotSupported)
	_, err := probe(spec, attach.Auto, old)
	refused(t, "an old kernel", err, ErrKernelTooOld, "5.4.0-test", "6.1", "bpf_redirect_peer for SchedCLS programs",
		"bpf_redirect_neigh", "maps of type LPMTrie")
	if err != nil && strings.Contains(err.Error(), "bpf_fib_lookup") {
		t.Errorf("%v names what is there", err)
	}
	older := lacking([]ebpf.ProgramType{ebpf.Syscall}, []asm.BuiltinFunc{asm.FnForEachMapElem}, nil, ebpf.ErrNotSupported)
	_, err = probe(spec, attach.Auto, older)
	refused(t, "an older kernel", err, ErrKernelTooOld, "programs of type Syscall")
	if err != nil && strings.Contains(err.Error(), "for Syscall programs") {
		t.Errorf("%v names helpers of programs that cannot be", err)
	}
	if _, err := probe(spec, attach.TCX, lacking(nil, nil, nil, nil)); err != nil {
		t.Errorf("a good kernel: %v", err)
	}
	inconclusive := lacking(nil, []asm.BuiltinFunc{asm.FnFibLookup}, nil, errors.New("odd answer"))
	if _, err := probe(spec, attach.Auto, inconclusive); err != nil {
		t.Errorf("an answer that says nothing: %v", err)
	}
	user := lacking(nil, []asm.BuiltinFunc{asm.FnFibLookup}, nil, unix.EPERM)
	_, err = probe(spec, attach.Auto, user)
	refused(t, "no rights", err, unix.EPERM, "root")
}

// TestProbeOfTCX: what is used when present is missed only by who insists on it.
func TestProbeOfTCX(t *testing.T) {
	spec := embedded(t)
	without := lacking(nil, []asm.BuiltinFunc{asm.FnRedirectPeer}, nil, ebpf.ErrNotSupported)
	without.tcx = func() error { return fmt.Errorf("probed: %w", ebpf.ErrNotSupported) }
	_, err := probe(spec, attach.TCX, without)
	refused(t, "no tcx, but --attach=tcx", err, ErrKernelTooOld, "--attach=tcx", "6.6", "bpf_redirect_peer")
	without.helper = func(ebpf.ProgramType, asm.BuiltinFunc) error { return nil }
	for _, mode := range []attach.Mode{attach.Auto, attach.Clsact} {
		if found, err := probe(spec, mode, without); err != nil || found != (Kernel{Release: "5.4.0-test"}) {
			t.Errorf("%s on a kernel without tcx: %+v, %v", mode, found, err)
		}
	}
	if found, err := probe(spec, attach.Auto, lacking(nil, nil, nil, nil)); err != nil || !found.TCX {
		t.Errorf("on a kernel with tcx: %+v, %v", found, err)
	}
}

// A PREEMPT_RT kernel is refused, although it has everything.
func TestProbeRefusesRealtimeKernels(t *testing.T) {
	k := lacking(nil, nil, nil, nil)
	k.realtime = func() bool { return true }
	_, err := probe(embedded(t), attach.Auto, k)
	refused(t, "a PREEMPT_RT kernel", err, ErrRealtime, "PREEMPT_RT", "5.4.0-test", "boot a kernel without")
	if err != nil && strings.Contains(err.Error(), "\n") {
		t.Errorf("%q is more than a line", err)
	}
	file := filepath.Join(t.TempDir(), "realtime")
	const plain = "#1 SMP PREEMPT_DYNAMIC Debian 6.12.57-1"
	for _, c := range []struct {
		said, version string
		want          bool
	}{
		{"1\n", plain, true}, {"0\n", plain, false}, {"", plain, false}, {"", "#1 SMP PREEMPT_RT Debian 6.12.57-1", true}, {"", "", false},
	} {
		check(t, os.WriteFile(file, []byte(c.said), 0o600))
		if got := isRealtime(file, version(c.version)); got != c.want {
			t.Errorf("the file says %q, the kernel %q: %v", c.said, c.version, got)
		}
	}
	if isRealtime(file+"-none", version(plain)) || !isRealtime(file+"-none", version("#1 SMP PREEMPT_RT")) {
		t.Error("a kernel without the file is judged by something else than its version")
	}
}

// version is that of a kernel as uname says it.
func version(text string) (v [65]byte) {
	copy(v[:], text)
	return v
}

// A locked down kernel forbids a helper that the programs want on old kernels only.
func TestProbeOfALockedDownKernel(t *testing.T) {
	k := lacking(nil, []asm.BuiltinFunc{asm.FnProbeReadKernel}, nil, ebpf.ErrNotSupported)
	_, err := probe(embedded(t), attach.Auto, k)
	refused(t, "an old kernel, locked down", err, ErrKernelTooOld, "bpf_probe_read_kernel")
	k.function = func(name string) bool { return name == "bpf_cast_to_kern_ctx" }
	if _, err := probe(embedded(t), attach.Auto, k); err != nil {
		t.Errorf("a newer kernel, locked down: %v", err)
	}
}

func TestProbeAsksForWhatTheProgramsUse(t *testing.T) {
	asked := make(map[string]bool)
	for _, n := range needs(embedded(t), attach.Auto) {
		asked[n.what] = true
	}
	for _, what := range []string{
		"maps of type Hash", "maps of type LRUHash", "maps of type LPMTrie", "maps of type Array", "maps of type PerCPUArray",
		"programs of type SchedCLS", "programs of type Syscall", "bpf_fib_lookup for SchedCLS programs",
		"bpf_skc_lookup_tcp for SchedCLS programs", "bpf_redirect_neigh for SchedCLS programs",
	} {
		if !asked[what] {
			t.Errorf("nobody asks for %s", what)
		}
	}
}

func TestProbeOfTheRunningKernel(t *testing.T) {
	priv.Require(t)
	found, err := Probe(Options{Attach: attach.Auto})
	if err != nil || found.TCX != kernelHasTCX(t) || found.Release == "" {
		t.Errorf("%+v, %v", found, err)
	}
}
