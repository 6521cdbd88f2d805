package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// product is the root of the product's module, as seen from this package's directory.
const product = "../.."

// edit changes a source file of the product for a build of a test: each old text, which must stand there exactly once,
// becomes the new one. The tree itself stays as it is.
type edit struct {
	file     string
	replaced [][2]string
}

// build compiles programs of the product with changed and added source files, into a directory, and returns that.
func build(t *testing.T, edits []edit, added map[string]string, programs ...string) string {
	t.Helper()
	root, err := filepath.Abs(product)
	if err != nil {
		t.Fatal(err)
	}
	dir, sources := t.TempDir(), t.TempDir()
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	put := func(file, content string) {
		t.Helper()
		path := filepath.Join(sources, strings.ReplaceAll(file, "/", "-"))
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		overlay.Replace[filepath.Join(root, file)] = path
	}
	for _, e := range edits {
		raw, err := os.ReadFile(filepath.Join(root, e.file))
		if err != nil {
			t.Fatal(err)
		}
		content := string(raw)
		for _, r := range e.replaced {
			if n := strings.Count(content, r[0]); n != 1 {
				t.Fatalf("build for a test: %s has %q %d times, want once", e.file, r[0], n)
			}
			content = strings.Replace(content, r[0], r[1], 1)
		}
		put(e.file, content)
	}
	for file, content := range added {
		put(file, content)
	}
	raw, err := json.Marshal(overlay)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(sources, "overlay.json")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"build", "-buildvcs=false", "-overlay", file, "-ldflags", "-s -w", "-o", dir + "/"}
	for _, program := range programs {
		args = append(args, "./cmd/"+program)
	}
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = root
	// As `make` has it, or every dependency would be compiled once more.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	started := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build for a test: %v\n%s", err, out)
	}
	t.Logf("built in %v", time.Since(started).Round(time.Millisecond))
	return dir
}

// otherPrograms puts a change between the embedded programs and whoever loads them.
func otherPrograms() edit {
	return edit{"bpf/dataplane_bpfel.go", [][2]string{{"func LoadDataplane() (", "func loadCompiled() ("}}}
}

// programsThatDiffer has one more instruction in each program: of a build in a directory named refused one that the
// verifier must refuse, else one without effect.
const programsThatDiffer = `package bpf

import (
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

func LoadDataplane() (*ebpf.CollectionSpec, error) {
	spec, err := loadCompiled()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	more := asm.Mov.Imm(asm.R0, 7)
	if filepath.Base(filepath.Dir(self)) == "refused" {
		more = asm.Mov.Reg(asm.R0, asm.R9)
	}
	for _, p := range spec.Programs {
		// Second, since the first one carries the function's name. Jumps are relative.
		if p.Instructions[0].OpCode.Class().IsJump() {
			panic("a program begins with a jump")
		}
		p.Instructions = append(p.Instructions[:1:1], append(asm.Instructions{more}, p.Instructions[1:]...)...)
	}
	return spec, nil
}
`

// programsThatGrow have values of 8 more bytes in both halves of snat. Values are written from the scratch record or the stack: the frame of each
// function that does so is moved down by 8 bytes, and what that makes room for is set to zero, so that it ends the value.
const programsThatGrow = `package bpf

import (
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

const grown = 8

func LoadDataplane() (*ebpf.CollectionSpec, error) {
	spec, err := loadCompiled()
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"snat", "snat_reverse"} {
		m := spec.Maps[name]
		m.ValueSize += grown
		m.Key, m.Value = nil, nil
	}
	// The programs make some values at the end of their scratch record.
	scratch := spec.Maps["scratch"]
	scratch.ValueSize += grown
	scratch.Key, scratch.Value = nil, nil
	for _, p := range spec.Programs {
		var out asm.Instructions
		for _, function := range functions(p.Instructions) {
			if writes(function) {
				function = shift(function)
			}
			out = append(out, function...)
		}
		p.Instructions = out
	}
	return spec, nil
}

func functions(ins asm.Instructions) (all []asm.Instructions) {
	for i := range ins {
		if btf.FuncMetadata(&ins[i]) != nil {
			all = append(all, nil)
		}
		all[len(all)-1] = append(all[len(all)-1], ins[i])
	}
	return all
}

func writes(function asm.Instructions) bool {
	var updates, table bool
	for _, i := range function {
		updates = updates || i.IsBuiltinCall() && i.Constant == int64(asm.FnMapUpdateElem)
		table = table || strings.HasPrefix(i.Reference(), "snat")
	}
	return updates && table
}

func shift(function asm.Instructions) asm.Instructions {
	var pointer asm.Register // that has just become the frame's end
	for n := range function {
		i := &function[n]
		class := i.OpCode.Class()
		switch {
		case class.IsLoad() && i.Src == asm.RFP, class.IsStore() && i.Dst == asm.RFP:
			i.Offset -= grown
		case pointer != 0:
			if i.OpCode.ALUOp() != asm.Add || i.Dst != pointer {
				panic("a pointer to the frame is not followed by its offset: " + i.OpCode.String())
			}
			i.Constant -= grown
		}
		pointer = 0
		if class.IsALU() && i.OpCode.ALUOp() == asm.Mov && i.OpCode.Source() == asm.RegSource && i.Src == asm.RFP {
			pointer = i.Dst
		}
	}
	// Second, since the first one carries the function's name.
	zero := asm.Instructions{asm.StoreImm(asm.RFP, -grown, 0, asm.Word), asm.StoreImm(asm.RFP, -grown/2, 0, asm.Word)}
	if first := &function[0]; first.OpCode.Class().IsJump() && first.OpCode.JumpOp() != asm.Call {
		first.Offset += int16(len(zero))
	}
	return append(function[:1:1], append(zero, function[1:]...)...)
}
`
