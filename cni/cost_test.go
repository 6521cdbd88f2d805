package cni

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// TestCostDoesNotGrow counts the plugin's system calls: with pods and routes on the node there are no more files to
// read, and nothing is listed.
func TestCostDoesNotGrow(t *testing.T) {
	const pods, routes, noise = 20, 200, 6
	w := newFixture(t)
	w.conf["addressQuarantine"], w.conf["logLevel"] = "0s", "error"
	conf, err := json.Marshal(w.conf)
	w.must(err)
	name := fmt.Sprintf("p%07x", os.Getpid()) // the processes' own, of eight letters
	w.must(os.Symlink(filepath.Join(w.plugins, "ebpf-cni"), filepath.Join(w.plugins, name)))
	calls := countCalls(t, name)
	cost := func() map[string]uint64 {
		least := map[string]uint64{}
		for range 3 {
			p := w.newPod()
			for _, verb := range []string{"ADD", "DEL"} {
				before := calls()
				cmd := w.command(verb, p, conf)
				cmd.Path = filepath.Join(w.plugins, name)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", verb, err, out)
				}
				if n := calls() - before; least[verb] == 0 || n < least[verb] {
					least[verb] = n
				}
			}
		}
		return least
	}
	few := cost()
	for range pods {
		w.add(w.newPod(), nil)
	}
	lo, err := w.host.LinkByName("lo")
	w.must(err)
	for i := range routes {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)}), 32)
		w.must(w.host.ReplaceRoute(device.Route{Dst: dst, Index: lo.Index, Foreign: true}))
	}
	for verb, n := range cost() {
		t.Logf("%s: %d system calls on an empty node, %d with %d pods and %d routes", verb, few[verb], n, pods, routes)
		if few[verb] == 0 || n > few[verb]+noise {
			t.Errorf("%s: %d system calls on an empty node, %d with %d pods and %d routes", verb, few[verb], n, pods, routes)
		}
	}
}

// countCalls counts the system calls of all processes of that name, of eight letters, that work may grow by: those on
// files, sockets and maps. Go's scheduler makes others as it likes.
func countCalls(t *testing.T, name string) func() uint64 {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 512})
	must(err)
	t.Cleanup(func() { m.Close() })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Reg(asm.R1, asm.R10), asm.Add.Imm(asm.R1, -16), asm.Mov.Imm(asm.R2, 16), asm.FnGetCurrentComm.Call(),
		asm.LoadMem(asm.R1, asm.R10, -16, asm.DWord),
		asm.LoadImm(asm.R2, int64(binary.NativeEndian.Uint64([]byte(name))), asm.DWord),
		asm.JNE.Reg(asm.R1, asm.R2, "out"),
		asm.LoadMem(asm.R1, asm.R6, 8, asm.DWord), // the second argument of sys_enter: the call's number
		asm.StoreMem(asm.R10, -4, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1), asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"), asm.Return(),
	}})
	must(err)
	defer program.Close()
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: "sys_enter", Program: program})
	must(err)
	t.Cleanup(func() { l.Close() })
	return func() (sum uint64) {
		for _, number := range []uint32{
			unix.SYS_OPENAT, unix.SYS_READ, unix.SYS_GETDENTS64, unix.SYS_UNLINKAT, unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_RECVMSG, unix.SYS_BPF,
		} {
			var n uint64
			must(m.Lookup(number, &n))
			sum += n
		}
		return sum
	}
}
