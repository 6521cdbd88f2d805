package e2e

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// foreignCounter is somebody else's tc program: it counts a family's UDP packets to one port and passes everything on.
type foreignCounter struct {
	program *ebpf.Program
	counter *ebpf.Map
	// egress: it belongs on the way out.
	egress bool
}

func newForeignCounter(t *testing.T, family wire.Family, port uint16) *foreignCounter {
	t.Helper()
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Name: "foreign", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { counter.Close() })
	const pass = -1 // TC_ACT_UNSPEC
	const ethernet, destinationPort = 14, 2
	ip := [wire.Families]struct{ header, protocol int32 }{wire.IPv4: {20, 9}, wire.IPv6: {40, 6}}[family]
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(ethernet+ip.protocol, asm.Byte),
			asm.JNE.Imm(asm.R0, unix.IPPROTO_UDP, "pass"),
			asm.LoadAbs(ethernet+ip.header+destinationPort, asm.Half),
			asm.JNE.Imm(asm.R0, int32(port), "pass"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, counter.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { program.Close() })
	return &foreignCounter{program: program, counter: counter}
}

func (f *foreignCounter) count(t *testing.T) uint64 {
	t.Helper()
	value := make([]byte, 8)
	if err := f.counter.Lookup(uint32(0), &value); err != nil {
		t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(value)
}

// attachTCX puts the program at the front or the back of a hook's chain.
func (f *foreignCounter) attachTCX(t *testing.T, node *lab.Node, ifindex int, where link.Anchor) {
	t.Helper()
	hook := ebpf.AttachTCXIngress
	if f.egress {
		hook = ebpf.AttachTCXEgress
	}
	err := node.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: f.program, Attach: hook, Anchor: where})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// attachClsact adds the program as a filter of the given priority.
func (f *foreignCounter) attachClsact(t *testing.T, node *lab.Node, ifindex int, priority uint16) {
	t.Helper()
	var parent uint32 = netlink.HANDLE_MIN_INGRESS
	if f.egress {
		parent = netlink.HANDLE_MIN_EGRESS
	}
	err := node.Netlink().FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: parent, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: f.program.FD(), Name: "foreign", DirectAction: true,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A program before ours sees all, one after ours sees all that we pass on, and ours goes on working between them.
func TestForeignProgramsBesideOurs(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		pod, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
		uplink, err := node.Netlink().LinkByName(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		const port = 7007
		before, after := newForeignCounter(t, firstFamily(l), port), newForeignCounter(t, firstFamily(l), port)
		if attach == "--attach=tcx" {
			before.attachTCX(t, node, uplink.Attrs().Index, link.Head())
			after.attachTCX(t, node, uplink.Attrs().Index, link.Tail())
		} else {
			before.attachClsact(t, node, uplink.Attrs().Index, 1)
			after.attachClsact(t, node, uplink.Attrs().Index, 0xfff0)
		}
		for _, on := range []*lab.Namespace{pod.Namespace, node.Namespace} {
			if _, err := on.Serve(port); err != nil {
				t.Fatal(err)
			}
		}

		const toPod, toHost = 5, 3
		for range toPod { // ours: delivered to the pod at once
			_, err := far.UDP(t.Context(), netip.AddrPortFrom(pod.Addr(), port), 100)
			if err != nil {
				t.Fatal(err)
			}
		}
		for range toHost { // the host's: passed on
			_, err := l.Outside.UDP(t.Context(), netip.AddrPortFrom(node.Addr(), port), 100)
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := before.count(t); got != toPod+toHost {
			t.Errorf("the program before ours saw %d packets, want all %d", got, toPod+toHost)
		}
		if got := after.count(t); got != toHost {
			t.Errorf("the program after ours saw %d packets, want the %d that we pass on", got, toHost)
		}
	})
}

// On the way out ours passes everything on: what it masquerades, what was masqueraded before, and the host's own.
func TestForeignProgramsOnTheWayOut(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 1, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		pod := addPod(t, node, "a")
		uplink, err := node.Netlink().LinkByName(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		const port = 7007
		before, after := newForeignCounter(t, firstFamily(l), port), newForeignCounter(t, firstFamily(l), port)
		before.egress, after.egress = true, true
		before.attachFirst(t, node, uplink.Attrs().Index, attach)
		after.attachLast(t, node, uplink.Attrs().Index, attach)

		to := netip.AddrPortFrom(lab.OutsideAddr[firstFamily(l)], port)
		outside := listenUDP(t, l.Outside, to)
		const each = 4
		sends := func(who string, from *lab.Namespace) {
			t.Helper()
			conn := dialUDP(t, from, 0, to)
			for range each {
				send(t, conn, who)
				if seen := receive(t, outside, who); seen.Addr() != node.Addr() {
					t.Errorf("%s: seen as %s, want %s", who, seen, node.Addr())
				}
			}
		}
		byStack(t, node, func() { sends("by the stack", pod.Namespace) }) // our program masquerades it here
		sends("directly", pod.Namespace)
		sends("the host", node.Namespace)
		if seen, passed := before.count(t), after.count(t); seen != 3*each || passed != 3*each {
			t.Errorf("the program before ours saw %d packets, the one after ours %d, want all %d", seen, passed, 3*each)
		}
	})
}
