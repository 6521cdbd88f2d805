// Package pins makes what the agent pins, for tests that need maps to read and
// programs to attach, but none that carry packets.
package pins

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Entries is the largest capacity of a map that Maps makes.
const Entries = 4096

// Maps pins the dataplane's maps, empty, below dir, which must be on a BPF file
// system, such as priv.Isolate returns.
func Maps(tb testing.TB, dir bpffs.Dir) {
	tb.Helper()
	if err := dir.Prepare(); err != nil {
		tb.Fatal(err)
	}
	spec, err := bpf.LoadDataplane()
	if err != nil {
		tb.Fatal(err)
	}
	for name, m := range spec.Maps {
		if name[0] != '.' { // .rodata belongs to the programs
			pin(tb, dir, name, m)
		}
	}
}

func pin(tb testing.TB, dir bpffs.Dir, name string, spec *ebpf.MapSpec) {
	tb.Helper()
	spec.MaxEntries = min(spec.MaxEntries, Entries)
	m, err := ebpf.NewMap(spec)
	if err != nil {
		tb.Fatalf("make map %s: %v", name, err)
	}
	defer m.Close()
	if err := m.Pin(dir.Map(name)); err != nil {
		tb.Fatalf("pin map %s: %v", name, err)
	}
}

// Stubs are programs that do nothing, in the place of the real ones: they go with any layout of the maps, and are verified
// in no time. Those on interfaces pass every packet on, TC_ACT_UNSPEC, those on sockets every call.
func Stubs(tb testing.TB) *ebpf.CollectionSpec {
	tb.Helper()
	spec, err := bpf.LoadDataplane()
	if err != nil {
		tb.Fatal(err)
	}
	for _, p := range spec.Programs {
		result := int32(-1)
		switch p.Type {
		case ebpf.Syscall:
			result = 0
		case ebpf.CGroupSockAddr, ebpf.CGroupSock:
			result = 1
		}
		p.Instructions = asm.Instructions{asm.Mov.Imm(asm.R0, result), asm.Return()}
	}
	return spec
}

// Program loads a program that passes every packet on, TC_ACT_UNSPEC. Programs
// with different tags are told apart by it.
func Program(tb testing.TB, name string, tag int32) *ebpf.Program {
	tb.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, tag),
			asm.Mov.Imm(asm.R0, -1),
			asm.Return(),
		},
	})
	if err != nil {
		tb.Fatalf("load program %s: %v", name, err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

// ID returns the kernel's ID of a program.
func ID(tb testing.TB, p *ebpf.Program) ebpf.ProgramID {
	tb.Helper()
	info, err := p.Info()
	if err != nil {
		tb.Fatal(err)
	}
	id, ok := info.ID()
	if !ok {
		tb.Fatal("the kernel gives programs no ID")
	}
	return id
}
