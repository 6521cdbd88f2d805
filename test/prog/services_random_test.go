package prog

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/counters"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Whatever meets Services, from whichever side: only known actions, no checksum broken, nothing leaves with a ClusterIP as
// destination or a pod as source, the stack gets no martian, and the tables agree.
func TestRandomServices(t *testing.T) {
	for name, more := range map[string]option{"alone": withPaths(10 * time.Millisecond), "beside netfilter": besideNetfilter} {
		t.Run(name, func(t *testing.T) {
			for f := range wire.Families {
				b := newBed(t, family{f}, withServices, withPorts(50000, 50063), withTables(512, 512), more)
				for i, proto := range []wire.Protocol{wire.TCP, wire.UDP, sctpProto} {
					port := []uint16{80, 53, 80}[i]
					s := b.serve(vip, port, proto)
					var all []string
					for _, end := range []string{podA, podB, podC, remote, beyond, node2IP, nodeIP, world, native, lost, foreign} {
						all = append(all, fmt.Sprintf("%s:%d", end, port))
					}
					s.swap(all...)
					s.nodePort(port, 0).nodePort(50001, 0).loadBalancer(external, port, 0)
				}
				b.hostPort(nodeOtherIP, 53, wire.UDP, podB)
				b.hostPort(nodeOtherIP, 80, wire.TCP, podC)
				b.rain(*packets / 8)
			}
		})
	}
}

// rain throws packets at the node, most of them in ways of Services.
func (b *bed) rain(count int) {
	b.Helper()
	s := &storm{
		sentBy: node5IP, bed: b, generator: newGenerator(*seed), buffer: make([]byte, 0, 4096), out: make([]byte, 4096),
		actions: make(map[wire.Direction]map[uint32]counters.Value),
	}
	directions := []wire.Direction{wire.FromPod, wire.FromUplink, wire.ToUplink, wire.FromTunnel, wire.ToTunnel, wire.ToPod}
	for i := range count {
		for _, d := range directions {
			s.served(d)
		}
		if b.Failed() {
			b.Fatalf("after %d packets into each program, seed %d", i+1, *seed)
		}
		if i%500 == 499 {
			s.sweep(usage.Snat, time.Duration(s.IntN(300))*time.Second, false)
			s.sweep(usage.Conntrack, time.Duration(s.IntN(300))*time.Second, false)
		}
	}
	s.tablesAgree()
}

// served runs one program on one packet.
func (s *storm) served(d wire.Direction) {
	l, ifindex := s.uplink, s.uplink.index
	pod := []string{podA, podB, podC}[s.IntN(3)]
	switch d {
	case wire.FromPod, wire.ToPod:
		l = s.pods[pod]
		ifindex = l.index
	case wire.FromTunnel, wire.ToTunnel:
		ifindex = s.tunnel
	}
	frame := s.frame(s.buffer, l.mac)
	s.aim(d, pod, frame)
	s.sum(frame)
	s.ctx = skb{}
	s.ctx.set(skbIfindex, uint32(ifindex))
	action, err := s.program(d).Run(&ebpf.RunOptions{Data: frame, DataOut: s.out, Context: s.ctx[:]})
	must(s, err)
	if err := s.right(d, frame, s.out[:len(frame)+256], action); err != nil {
		out, _ := read(s.out)
		s.Errorf("%v: action %d: %v\n in %v % x\nout %v % x", d, int32(action), err, describe(frame), frame, out, s.out[:len(frame)])
	}
	if action != actShot && s.IntN(4) != 0 {
		s.saw(s.out[:len(frame)])
	}
}

// aim gives most frames ends that meet a Service, or what it has answered.
func (s *storm) aim(d wire.Direction, pod string, frame []byte) {
	f, ok := familyOf(frame)
	if !ok || s.IntN(6) == 0 {
		return
	}
	put := func(at at, names ...string) { copy(at.of(frame), f.ip(names[s.IntN(len(names))]).AsSlice()) }
	switch d {
	case wire.FromPod:
		put(sourceAt, pod)
	case wire.FromTunnel:
		put(sourceAt, beyond, node5IP)
	case wire.ToUplink, wire.ToTunnel:
		put(sourceAt, nodeIP)
	}
	if s.IntN(2) == 0 {
		return
	}
	switch d {
	case wire.FromTunnel:
		put(destinationAt, nodeIP)
	case wire.FromUplink:
		put(destinationAt, nodeIP, nodeIP, vip, external)
	case wire.ToUplink:
		put(destinationAt, vip, external, world)
	default:
		put(destinationAt, nodeIP, vip, external)
	}
	if at := l4Of(frame); len(frame) >= at+4 && s.IntN(2) == 0 {
		binary.BigEndian.PutUint16(frame[at+2:], []uint16{80, 53, 50001}[s.IntN(3)])
	}
}

// right says what rule a run has broken.
func (s *storm) right(d wire.Direction, in, out []byte, action uint32) error {
	if action != actRedirect && action != actShot && action != actUnspec {
		return fmt.Errorf("unknown action")
	}
	sent, err := read(in)
	if action == actShot || err != nil {
		return nil
	}
	v, err := read(out)
	if err != nil {
		return fmt.Errorf("the packet can't be read any more: %w", err)
	}
	changed := v.src != sent.src || v.dst != sent.dst
	switch {
	case action == actRedirect && v.dst == vip:
		return fmt.Errorf("sent to a Service")
	case d == wire.ToUplink && v.dst == vip:
		return fmt.Errorf("leaves for a Service")
	case (d == wire.FromUplink || d == wire.FromTunnel) && action == actUnspec && changed && s.own(v.src) && v.dst != nodeIP:
		return fmt.Errorf("the stack gets a martian")
	case d == wire.FromUplink && action == actRedirect && changed && slices.Contains([]string{podA, podB, podC}, v.src):
		return fmt.Errorf("leaves with a pod's address")
	}
	return nil
}

// own says whether an address is of this node.
func (s *storm) own(address string) bool {
	return slices.Contains([]string{nodeIP, nodeOtherIP, tunnelIP, podA, podB, podC}, address)
}
