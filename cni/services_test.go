package cni

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	mapconfig "github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// serveServices says that the programs serve Services, or not.
func (w *fixture) serveServices(on bool) {
	w.t.Helper()
	v := w.config()
	if on {
		v.Flags |= mapconfig.Services
	}
	w.setConfig(v)
}

// TestProgramToThePod is attached where Services are served, and only there.
func TestProgramToThePod(t *testing.T) {
	w := newFixture(t)
	for _, on := range []bool{false, true} {
		w.serveServices(on)
		p := w.newPod()
		r := w.add(p, nil)
		link, err := w.host.LinkByName(p.id.HostLinkName())
		w.must(err)
		state, err := attach.Attacher{Dir: w.pins}.Attached(link.Index, attach.ToPod)
		w.must(err)
		if attached := state.Mode != ""; attached != on {
			t.Errorf("Services on: %v; attached by %q", on, state.Mode)
		}
		if on && state.Mode != attach.Clsact {
			t.Error("it is no filter: a second tcx link costs an ADD 16 ms")
		}
		w.ok("CHECK", p, prevResult(t, r))
		w.ok("DEL", p, nil)
	}
}

// lookup finds the TCP socket that is connected from local to remote in the namespace of that number.
func (w *fixture) lookup(netns uint32, local, remote netip.AddrPort) bool {
	w.t.Helper()
	// struct bpf_sock_tuple: in the order of the packets that the socket gets.
	var tuple []byte
	tuple = append(append(tuple, remote.Addr().AsSlice()...), local.Addr().AsSlice()...)
	tuple = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(tuple, remote.Port()), local.Port())
	var ins asm.Instructions
	for i := 0; i < len(tuple); i += 4 {
		ins = append(ins, asm.StoreImm(asm.R10, int16(i-16), int64(int32(binary.NativeEndian.Uint32(tuple[i:]))), asm.Word))
	}
	ins = append(ins,
		asm.Mov.Reg(asm.R2, asm.R10), asm.Add.Imm(asm.R2, -16), asm.Mov.Imm(asm.R3, int32(len(tuple))),
		asm.LoadImm(asm.R4, int64(netns), asm.DWord), asm.Mov.Imm(asm.R5, 0),
		asm.FnSkcLookupTcp.Call(),
		asm.JNE.Imm(asm.R0, 0, "found"), asm.Return(),
		asm.Mov.Reg(asm.R1, asm.R0).WithSymbol("found"), asm.FnSkRelease.Call(),
		asm.Mov.Imm(asm.R0, 1), asm.Return(),
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: ins})
	w.must(err)
	defer p.Close()
	found, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	w.must(err)
	return found != 0
}

// TestProgramsFindThePodsSockets by the number of its namespace in the devices entry.
func TestProgramsFindThePodsSockets(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	w.add(p, nil)
	link, err := w.host.LinkByName(p.id.HostLinkName())
	w.must(err)
	d, err := devices.Open(w.pins.Map(devices.Name))
	w.must(err)
	defer d.Close()
	dev, err := d.Get(devices.Key{Ifindex: uint32(link.Index)})
	w.must(err)
	if dev.Netns == 0 {
		t.Fatalf("devices entry %+v has no namespace", dev)
	}
	var listener net.Listener
	w.must(p.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(firstPods[0], 80).String())
		return err
	}))
	defer listener.Close()
	conn, err := net.DialTimeout("tcp", listener.Addr().String(), priv.Patience(2*time.Second))
	w.must(err)
	defer conn.Close()
	accepted, err := listener.Accept()
	w.must(err)
	defer accepted.Close()
	host, pod := conn.LocalAddr().(*net.TCPAddr).AddrPort(), conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	if !w.lookup(dev.Netns-1, pod, host) {
		t.Errorf("the pod's connection from %s to %s is not found in namespace %d", pod, host, dev.Netns-1)
	}
	if other := netip.AddrPortFrom(pod.Addr(), 81); w.lookup(dev.Netns-1, other, host) {
		t.Errorf("a connection from %s, which does not exist, is found", other)
	}
}
