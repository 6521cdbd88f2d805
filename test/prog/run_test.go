package prog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The actions that the programs may return.
const (
	actUnspec   = 0xffffffff
	actShot     = 2
	actRedirect = 7
)

// skb is struct __sk_buff (include/uapi/linux/bpf.h) as BPF_PROG_TEST_RUN takes it and gives it back.
type skb [192]byte

// The fields of it that a test may set, by offset.
const (
	skbMark           = 8
	skbIngressIfindex = 36
	skbIfindex        = 40
	skbGSOSize        = 176
)

func (s *skb) set(field int, v uint32) { binary.NativeEndian.PutUint32(s[field:], v) }

func (s *skb) get(field int) uint32 { return binary.NativeEndian.Uint32(s[field:]) }

// result is what became of a packet.
type result struct {
	b     *bed
	in    []byte
	frame []byte // the packet as the program left it
	mark  uint32
	act   uint32 // the action
	what  string // the counter that moved: a traffic event, or "drop REASON"
}

// program is what BPF_PROG_TEST_RUN is to run for a direction.
func (b *bed) program(d wire.Direction) *ebpf.Program {
	if d == wire.FromTunnel {
		return b.far
	}
	return b.programs[d]
}

// act sends a frame through a program and returns the action alone, which is quicker than all that run looks at.
func (b *bed) act(d wire.Direction, ifindex int, frame []byte) uint32 {
	b.Helper()
	var in skb
	in.set(skbIfindex, uint32(ifindex))
	action, err := b.program(d).Run(&ebpf.RunOptions{Data: frame, Context: in[:]})
	if err != nil {
		b.Fatalf("run %v on % x: %v", d, frame, err)
	}
	return action
}

// run sends a frame through a program as if seen on that interface.
func (b *bed) run(d wire.Direction, ifindex int, frame []byte, fields map[int]uint32) result {
	b.Helper()
	var in skb
	in.set(skbIfindex, uint32(ifindex))
	for field, v := range fields {
		in.set(field, v)
	}
	before := b.counters(d)
	out := make([]byte, skbSize)
	options := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: in[:], ContextOut: out, Flags: b.sumFlag()}
	action, err := b.program(d).Run(options)
	if err != nil {
		b.Fatalf("run %v on % x: %v", d, frame, err)
	}
	r := result{b: b, in: frame, frame: options.DataOut, mark: (*skb)(out).get(skbMark), act: action}
	r.what = b.account(before, b.counters(d), r)
	b.judge(d, r)
	return r
}

const skbSize = len(skb{})

// sumComplete has a packet come with the sum of all its bytes, as cards compute it (BPF_F_TEST_SKB_CHECKSUM_COMPLETE), and
// the run fail if that is another than the one of the packet that left.
const sumComplete = 4

// knowsSums says whether the kernel has that.
var knowsSums = sync.OnceValue(func() bool {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, Instructions: asm.Instructions{asm.LoadImm(asm.R0, 0, asm.DWord), asm.Return()},
	})
	if err != nil {
		return false
	}
	defer program.Close()
	_, err = program.Run(&ebpf.RunOptions{Data: make([]byte, 64), Flags: sumComplete})
	return err == nil
})

// sumFlag has every packet of a story come with its sum, unless programs write new ones there.
func (b *bed) sumFlag() uint32 {
	if b.answers || !knowsSums() {
		return 0
	}
	return sumComplete
}

// counters are all counters of one program by name.
func (b *bed) counters(d wire.Direction) map[string]counters.Value {
	b.Helper()
	all := make(map[string]counters.Value)
	for e := range traffic.Events {
		v, err := b.traffic.Sum(d, e)
		must(b, err)
		all[e.String()] = v
	}
	for r := range drops.Reason(drops.Slots) {
		v, err := b.drops.Sum(d, r)
		must(b, err)
		all["drop "+r.String()] = v
	}
	return all
}

// account returns the one counter of outcomes that moved by one packet.
func (b *bed) account(before, after map[string]counters.Value, r result) string {
	b.Helper()
	what := ""
	for name, v := range after {
		moved := counters.Value{Packets: v.Packets - before[name].Packets, Bytes: v.Bytes - before[name].Bytes}
		if moved.Packets == 0 || name == traffic.SnatAllocated.String() || name == traffic.SnatRetried.String() {
			continue
		}
		if want := counted(name, r.in, r.frame); what != "" || moved != want {
			b.Errorf("counter %q moved by %+v for one packet, want %+v, besides %q", name, moved, want, what)
		}
		what = name
	}
	if what == "" {
		b.Error("a packet was not counted")
	}
	return what
}

// counted is by how much an outcome's counter moves for a packet. An answer may be longer than the question.
func counted(what string, in, out []byte) counters.Value {
	if what == traffic.Answered.String() {
		in = out
	}
	return counters.Value{Packets: 1, Bytes: uint64(len(in))}
}

// actions are the only ones that each outcome may come with, but for what actionOf knows.
var actions = map[string]uint32{
	"delivered": actRedirect, "forwarded": actRedirect, "answered": actRedirect, "stack": actUnspec,
	"drop NO_ENDPOINT": actUnspec, "drop NODE_OFF_LINK": actUnspec,
}

// actionOf is the one action that a program returns with an outcome.
func actionOf(d wire.Direction, what string) uint32 {
	if d == wire.FromUplink && what == "drop FRAG_NOT_FOUND" {
		return actUnspec // it may be the node's own
	}
	if d == wire.ToTunnel && what == "drop NODE_OFF_LINK" {
		return actShot // no route answers any more
	}
	if action, ok := actions[what]; ok {
		return action
	}
	return actShot
}

// answerable are the drops of which a pod may be told by a packet in the place of its own.
var answerable = []string{
	"drop NO_MAPPING", "drop TOO_BIG", "drop NO_BACKEND", "drop NO_SERVICE_PORT", "drop BACKEND_GONE", "drop SERVICE_TTL",
	"drop UNKNOWN_PROTOCOL", "drop SNAT_EXHAUSTED", "drop SNAT_LIMIT", "drop SNAT_FULL", "drop PORT_LIMIT",
}

// answered says whether an answer stands in the place of a packet that was dropped.
func (r result) answered() bool { return r.act == actRedirect && slices.Contains(answerable, r.what) }

// reset says whether a RST stands in the place of the packet.
func (r result) reset() bool { return r.what == "drop NO_MAPPING" && r.answered() }

// told says whether an error about its size stands in the place of the packet.
func (r result) told() bool { return r.what == "drop TOO_BIG" && r.answered() }

// judge holds a run against what is true of every run.
func (b *bed) judge(d wire.Direction, r result) {
	b.Helper()
	action, want := r.act, actionOf(d, r.what)
	if r.answered() {
		if bytes.Equal(r.in, r.frame) {
			b.Errorf("%v: a packet that is dropped is sent as it came", d)
		}
		return
	}
	if action != want {
		b.Errorf("%v: action %d with outcome %q, want %d", d, int32(action), r.what, int32(want))
	}
	if r.what == "answered" {
		return
	}
	if err := sumsKept(r.in, r.frame); err != nil && want != actShot {
		b.Errorf("%v: %v", d, err)
	}
	if marked := r.mark&mark != 0; r.what == "forwarded" && !marked {
		b.Errorf("%v: a packet was sent out of an uplink without our mark", d)
	}
	if d == wire.FromPod && r.what == "stack" && !bytes.Equal(r.in, r.frame) && !b.translates {
		b.Errorf("%v: the stack gets a changed packet:\n% x\n% x", d, r.in, r.frame)
	}
}

// fromPod sends a packet from the pod that has its source address.
func (b *bed) fromPod(p packet) result {
	b.Helper()
	l, ok := b.pods[p.src]
	if !ok {
		b.Fatalf("no pod has address %s", p.src)
	}
	p.macTo, p.macFrom = l.mac, l.peer
	return b.run(wire.FromPod, l.index, p.bytes(b.family), nil)
}

// fromUplink has a packet arrive at the first uplink.
func (b *bed) fromUplink(p packet) result {
	b.Helper()
	return b.arrive(b.uplink, p)
}

// arrive has a packet arrive at an uplink.
func (b *bed) arrive(l veth, p packet) result {
	b.Helper()
	if p.macTo == nil {
		p.macTo = l.mac
	}
	return b.run(wire.FromUplink, l.index, p.bytes(b.family), nil)
}

// outcome is a packet, and what is to become of it.
type outcome struct {
	name string
	p    packet
	want string
}

// becomes sends packets one after the other, and compares what becomes of them.
func (b *bed) becomes(send func(packet) result, all []outcome) {
	b.Helper()
	for _, c := range all {
		if r := send(c.p); r.what != c.want {
			b.Errorf("%s: outcome %q, want %q", c.name, r.what, c.want)
		}
	}
}

// toUplink has the stack send a packet out of the first uplink.
func (b *bed) toUplink(p packet) result {
	b.Helper()
	p.macTo, p.macFrom = b.uplink.peer, b.uplink.mac
	return b.run(wire.ToUplink, b.uplink.index, p.bytes(b.family), nil)
}

// is asserts the outcome and returns the result.
func (r result) is(what string) result {
	r.b.Helper()
	if r.what != what {
		r.b.Fatalf("%s: outcome %q, want %q", describe(r.in), r.what, what)
	}
	return r
}

// flow asserts the addresses and ports that the packet left with.
func (r result) flow(want string) result {
	r.b.Helper()
	v, err := read(r.frame)
	must(r.b, err)
	if v.String() != want {
		r.b.Fatalf("%s: left as %q, want %q", describe(r.in), v, want)
	}
	return r
}

// valid asserts that gopacket finds every checksum right.
func (r result) valid() result {
	r.b.Helper()
	if err := sumsValid(r.frame); err != nil {
		r.b.Errorf("%s: %v", describe(r.in), err)
	}
	return r
}

// view reads the packet that left.
func (r result) view() view {
	r.b.Helper()
	v, err := read(r.frame)
	must(r.b, err)
	return v
}

func describe(frame []byte) string {
	v, err := read(frame)
	if err != nil {
		return fmt.Sprintf("% x", frame)
	}
	return v.String()
}

// fromPodAt sends a packet from the interface that pod had when the node was built.
func (b *bed) fromPodAt(pod string, p packet) result {
	b.Helper()
	l := b.pods[pod]
	p.macTo, p.macFrom = l.mac, l.peer
	return b.run(wire.FromPod, l.index, p.bytes(b.family), nil)
}
