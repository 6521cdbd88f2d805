package datapath

import (
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// stackFree is how many of the 512 bytes of stack that the kernel allows to a chain of calls every program leaves, by the
// reckoning of the kernel that the test runs on: room for what comes.
const stackFree = 128

// TestStackLeft loads each program called by another one that holds stackFree bytes of the stack itself, in the two configurations
// that have all code between them.
func TestStackLeft(t *testing.T) {
	priv.Require(t)
	for _, name := range []string{"services", "bridges"} {
		t.Run(name, func(t *testing.T) {
			if err := loadBelow(t, configurations()[name], stackFree); err != nil {
				t.Errorf("with %d bytes of stack taken: %v", stackFree, err)
			}
		})
	}
}

// What a program cannot leave is refused, so the test above can fail.
func TestStackLeftCanFail(t *testing.T) {
	priv.Require(t)
	if err := loadBelow(t, configurations()["masquerade"], 512); err == nil {
		t.Error("the programs load with no stack left at all")
	}
}

func loadBelow(t *testing.T, node config.NodeConfig, held int16) error {
	t.Helper()
	spec, err := configure(Options{NodeConfig: node, Cgroup: "/any"})
	check(t, err)
	for name, p := range spec.Programs {
		below(t, name, p, held)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return err
	}
	coll.Close()
	return nil
}

// below puts a function in front of the program that takes so much stack and calls it.
func below(t *testing.T, name string, p *ebpf.ProgramSpec, held int16) {
	t.Helper()
	main := btf.FuncMetadata(&p.Instructions[0])
	if main == nil {
		t.Fatalf("%s has no function in its BTF", name)
	}
	caller := &btf.Func{Name: "below", Type: main.Type, Linkage: btf.GlobalFunc}
	called := *main
	called.Linkage = btf.StaticFunc
	p.Instructions[0] = btf.WithFuncMetadata(p.Instructions[0], &called)
	front := asm.Instructions{
		btf.WithFuncMetadata(asm.StoreImm(asm.RFP, -held, 0, asm.Word).WithSymbol("below"), caller).WithSource(asm.Comment("below")),
		asm.Call.Label(name),
		asm.Return(),
	}
	p.Instructions = slices.Concat(front, p.Instructions)
	if sym := p.Instructions[len(front)].Symbol(); sym != name {
		t.Fatalf("%s begins at %q", name, sym)
	}
}
