package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// spec returns a copy of the programs, which the caller may change. Those for sockets are left out where they are not attached,
// since they would do nothing and want more of the kernel; those for uplinks without an Ethernet header unless they are asked for, since
// few nodes have any and the verifier takes long.
func (o Options) spec() (spec *ebpf.CollectionSpec, err error) {
	if o.Spec != nil {
		spec = o.Spec.Copy()
	} else if spec, err = bpf.LoadDataplane(); err != nil {
		return nil, fmt.Errorf("read embedded programs: %w", err)
	}
	if !o.onSockets() {
		maps.DeleteFunc(spec.Programs, func(_ string, p *ebpf.ProgramSpec) bool { return isOnSockets(p.Type) })
	}
	for _, hook := range attach.BareHooks() {
		if !o.Bare {
			delete(spec.Programs, hook.Program())
		}
	}
	return spec, nil
}

// isOnSockets reports whether a program is for a cgroup. Such a one can't be run on a test packet.
func isOnSockets(t ebpf.ProgramType) bool { return t == ebpf.CGroupSockAddr || t == ebpf.CGroupSock }

// kernel reports what the kernel supports, in tests a made-up one. An error other than
// ebpf.ErrNotSupported means that it could not be found out.
type kernel struct {
	programType func(ebpf.ProgramType) error
	helper      func(ebpf.ProgramType, asm.BuiltinFunc) error
	mapType     func(ebpf.MapType) error
	tcx         func() error
	release     func() string
	// function reports whether the kernel has a kfunc of that name.
	function func(name string) bool
	// realtime reports a PREEMPT_RT kernel, where runs of programs may interrupt each other.
	realtime func() bool
}

func runningKernel() kernel {
	return kernel{
		programType: features.HaveProgramType,
		helper:      features.HaveProgramHelper,
		mapType:     features.HaveMapType,
		tcx:         haveTCX,
		release:     release,
		function:    haveFunction,
		realtime:    func() bool { return isRealtime("/sys/kernel/realtime", uname().Version) },
	}
}

func uname() (u unix.Utsname) {
	if err := unix.Uname(&u); err != nil {
		copy(u.Release[:], "unknown")
	}
	return u
}

func release() string {
	u := uname()
	return unix.ByteSliceToString(u.Release[:])
}

// isRealtime looks into a file that some kernels have, and at the version, such as "#1 SMP PREEMPT_RT ...".
func isRealtime(file string, version [65]byte) bool {
	said, err := os.ReadFile(file)
	return err == nil && strings.TrimSpace(string(said)) == "1" ||
		slices.Contains(strings.Fields(unix.ByteSliceToString(version[:])), "PREEMPT_RT")
}

// haveTCX queries the programs on the loopback interface, which every network
// namespace has. A kernel without tcx refuses the query.
func haveTCX() error {
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: tcx", ebpf.ErrNotSupported)
	}
	return err
}

func haveFunction(name string) bool {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return false
	}
	var f *btf.Func
	return spec.TypeByName(name, &f) == nil
}

// Kernel is what Probe has found out.
type Kernel struct {
	// Release of the running kernel.
	Release string
	// TCX: programs can be attached by tcx. It is the only feature that is used if
	// present; everything else is required.
	TCX bool
}

// Probe checks that the kernel supports everything that the embedded programs use, as
// opts says, and how they are attached. An error that matches ErrKernelTooOld names all that is missing; one that
// matches ErrRealtime means that the programs cannot run on this kernel.
func Probe(opts Options) (Kernel, error) {
	spec, err := Options{NodeConfig: opts.NodeConfig}.spec()
	if err != nil {
		return Kernel{}, err
	}
	return probe(spec, opts.Attach, runningKernel())
}

func probe(spec *ebpf.CollectionSpec, mode attach.Mode, k kernel) (Kernel, error) {
	found := Kernel{Release: k.release(), TCX: !errors.Is(k.tcx(), ebpf.ErrNotSupported)}
	if k.realtime() {
		return found, fmt.Errorf("%w: on Linux %s programs may interrupt each other on one CPU and mix up their packets; "+
			"boot a kernel without PREEMPT_RT", ErrRealtime, found.Release)
	}
	return found, lacks(needs(spec, mode), k)
}

// lacks returns one error that names everything that the kernel lacks.
func lacks(needs []need, k kernel) error {
	var missing []string
	for _, n := range needs {
		err := n.ask(k)
		if errors.Is(err, ebpf.ErrNotSupported) {
			missing = append(missing, n.what)
			continue
		}
		// Any other error is inconclusive: the verifier will find out.
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("ask the kernel for %s: %w (root, or CAP_BPF and CAP_NET_ADMIN, are needed)", n.what, err)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: Linux %s lacks %s (6.1 or newer has them)", ErrKernelTooOld, k.release(), strings.Join(missing, ", "))
	}
	return nil
}

// need is one thing that the programs want from the kernel.
type need struct {
	what string
	ask  func(kernel) error
}

// needs finds out from the programs themselves what they use. Helpers are checked only
// for program types that the kernel has.
func needs(spec *ebpf.CollectionSpec, mode attach.Mode) []need {
	var out []need
	if mode == attach.TCX {
		out = append(out, need{"tcx, which Linux 6.6 brought and only --attach=tcx needs", func(k kernel) error { return k.tcx() }})
	}
	mapTypes := make(map[ebpf.MapType]bool)
	for _, m := range spec.Maps {
		mapTypes[m.Type] = true
	}
	for _, t := range slices.Sorted(maps.Keys(mapTypes)) {
		out = append(out, need{"maps of type " + t.String(), func(k kernel) error { return k.mapType(t) }})
	}
	helpers := make(map[ebpf.ProgramType]map[asm.BuiltinFunc]bool)
	for _, p := range spec.Programs {
		if helpers[p.Type] == nil {
			helpers[p.Type] = make(map[asm.BuiltinFunc]bool)
		}
		for _, ins := range p.Instructions {
			if ins.IsBuiltinCall() {
				helpers[p.Type][asm.BuiltinFunc(ins.Constant)] = true
			}
		}
	}
	for _, t := range slices.Sorted(maps.Keys(helpers)) {
		out = append(out, need{"programs of type " + t.String(), func(k kernel) error { return k.programType(t) }})
		for _, h := range slices.SortedFunc(maps.Keys(helpers[t]), cmp.Compare[asm.BuiltinFunc]) {
			out = append(out, need{fmt.Sprintf("%s for %s programs", helperName(h), t), func(k kernel) error {
				// Not called where bpf_cast_to_kern_ctx is there: a locked-down kernel has only that.
				if k.programType(t) != nil || h == asm.FnProbeReadKernel && k.function("bpf_cast_to_kern_ctx") {
					return nil
				}
				return k.helper(t, h)
			}})
		}
	}
	return out
}

// helperName is the name in the kernel's documentation: FnFibLookup is
// bpf_fib_lookup.
func helperName(h asm.BuiltinFunc) string {
	var out strings.Builder
	for i, r := range strings.TrimPrefix(h.String(), "Fn") {
		if r >= 'A' && r <= 'Z' {
			if i > 0 {
				out.WriteByte('_')
			}
			r += 'a' - 'A'
		}
		out.WriteRune(r)
	}
	return "bpf_" + out.String()
}
