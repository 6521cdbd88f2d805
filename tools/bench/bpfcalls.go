package main

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// bpfCommands is how many commands the system call bpf may have, at most.
const bpfCommands = 64

// firstArgument is where struct pt_regs has that of a system call.
var firstArgument = map[string]int32{"amd64": 112, "arm64": 0}

// bpfCalls counts the system calls bpf of a process, by command. A program does that which runs at each
// system call of the machine: for a moment all of them are a little slower. (Tracing bpf alone takes what not every kernel is built with.)
type bpfCalls struct {
	counts   *ebpf.Map
	program  *ebpf.Program
	attached link.Link
}

func countBPFCalls(pid int) (c *bpfCalls, err error) {
	c = &bpfCalls{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("count system calls: %w", err), c.close())
		}
	}()
	spec := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: bpfCommands}
	if c.counts, err = ebpf.NewMap(spec); err != nil {
		return c, err
	}
	c.program, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.RawTracepoint, License: "GPL", Instructions: countingProgram(pid, c.counts.FD())})
	if err != nil {
		return c, err
	}
	c.attached, err = link.AttachRawTracepoint(link.RawTracepointOptions{Name: "sys_enter", Program: c.program})
	return c, err
}

// countingProgram counts by the first argument, in an array of 64-bit numbers.
func countingProgram(pid, counts int) asm.Instructions {
	const registers, number, command = 0, 8, -4 // the tracepoint's arguments; on the stack
	return asm.Instructions{
		asm.LoadMem(asm.R0, asm.R1, number, asm.DWord),
		asm.JNE.Imm(asm.R0, unix.SYS_BPF, "another"),
		asm.LoadMem(asm.R6, asm.R1, registers, asm.DWord),
		asm.FnGetCurrentPidTgid.Call(),
		asm.RSh.Imm(asm.R0, 32),
		asm.JNE.Imm(asm.R0, int32(pid), "another"),
		asm.Mov.Reg(asm.R1, asm.RFP),
		asm.Add.Imm(asm.R1, command),
		asm.Mov.Imm(asm.R2, 4),
		asm.Mov.Reg(asm.R3, asm.R6),
		asm.Add.Imm(asm.R3, firstArgument[runtime.GOARCH]),
		asm.FnProbeReadKernel.Call(),
		asm.LoadMapPtr(asm.R1, counts),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, command),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "another"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("another"),
		asm.Return(),
	}
}

func (c *bpfCalls) close() (err error) {
	if c.attached != nil {
		err = c.attached.Close()
	}
	return errors.Join(err, c.program.Close(), c.counts.Close())
}

// The commands that write maps.
var writing = []uint32{unix.BPF_MAP_UPDATE_ELEM, unix.BPF_MAP_DELETE_ELEM, unix.BPF_MAP_UPDATE_BATCH, unix.BPF_MAP_DELETE_BATCH}

// writes is how many calls there were that write maps; of many entries in a batch, one.
func (c *bpfCalls) writes() (calls uint64, err error) {
	for _, command := range writing {
		var of uint64
		if err := c.counts.Lookup(command, &of); err != nil {
			return 0, fmt.Errorf("read how many system calls there were: %w", err)
		}
		calls += of
	}
	return calls, nil
}

// during is how many such calls there are while fn runs.
func (c *bpfCalls) during(fn func() error) (calls float64, err error) {
	before, err1 := c.writes()
	err = fn()
	after, err2 := c.writes()
	return float64(after - before), errors.Join(err1, err, err2)
}
