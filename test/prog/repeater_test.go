package prog

import (
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// The one value of a repeater's map: a count of runs, then the packet.
const templateAt = 8

// repeater loads a program that writes the frame and the mark anew and calls the target. With fresh, each run's packet
// has ports of its own; its transport checksum is then wrong, which nothing on the way looks at.
func (b *bed) repeater(target *ebpf.Program, frame []byte, mark uint32, fresh bool) *ebpf.Program {
	b.Helper()
	size := templateAt + (len(frame)+7)/8*8
	template, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: uint32(size), MaxEntries: 1})
	must(b, err)
	b.Cleanup(func() { template.Close() })
	must(b, template.Put(uint32(0), append(make([]byte, templateAt), append(frame, make([]byte, size-templateAt-len(frame))...)...)))
	targets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	must(b, err)
	b.Cleanup(func() { targets.Close() })
	must(b, targets.Put(uint32(0), uint32(target.FD())))

	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1), asm.LoadMapValue(asm.R7, template.FD(), 0)}
	if fresh {
		code = append(code, freshPorts(int16(templateAt+l4Of(frame)))...)
	}
	code = append(code,
		asm.Mov.Reg(asm.R1, asm.R6), // bpf_skb_store_bytes(ctx, 0, frame, len, 0)
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Reg(asm.R3, asm.R7),
		asm.Add.Imm(asm.R3, templateAt),
		asm.Mov.Imm(asm.R4, int32(len(frame))),
		asm.Mov.Imm(asm.R5, 0),
		asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R1, int32(mark)),
		asm.StoreMem(asm.R6, skbMark, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, targets.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, actShot),
		asm.Return(),
	)
	return b.loadCode(code)
}

// freshPorts counts the runs and makes source ports 32768 to 36863 of the count, then the next destination port, from that
// place on. They are not in the range of ports to masquerade to, so that one is chosen.
func freshPorts(sport int16) asm.Instructions {
	dport := sport + 2
	return asm.Instructions{
		asm.LoadMem(asm.R1, asm.R7, 0, asm.Word),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R7, 0, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R1),
		asm.And.Imm(asm.R2, 0xfff),
		asm.Or.Imm(asm.R2, 0x8000),
		asm.HostTo(asm.BE, asm.R2, asm.Half),
		asm.StoreMem(asm.R7, sport, asm.R2, asm.Half),
		asm.RSh.Imm(asm.R1, 12),
		asm.And.Imm(asm.R1, 0xff),
		asm.Add.Imm(asm.R1, 1000),
		asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.StoreMem(asm.R7, dport, asm.R1, asm.Half),
	}
}

// nothing is a program that does nothing.
func (b *bed) nothing() *ebpf.Program {
	b.Helper()
	return b.loadCode(asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()})
}

func (b *bed) loadCode(code asm.Instructions) *ebpf.Program {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: code, License: "Dual BSD/GPL"})
	if err != nil {
		b.Fatalf("%+v", err)
	}
	b.Cleanup(func() { p.Close() })
	return p
}

// repeat runs a program that many times in one system call, and returns how long each took, in ns.
func (b *bed) repeat(p *ebpf.Program, l veth, frame []byte, times int) float64 {
	b.Helper()
	var ctx skb
	ctx.set(skbIfindex, uint32(l.index))
	begin := time.Now()
	_, err := p.Run(&ebpf.RunOptions{Data: frame, Context: ctx[:], Repeat: uint32(times)})
	must(b, err)
	return float64(time.Since(begin).Nanoseconds()) / float64(times)
}
