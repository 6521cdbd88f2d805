package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// The actions that a program may return (linux/pkt_cls.h). TC_ACT_OK is not among
// them: it would keep other programs from seeing the packet.
const (
	actUnspec   = 0xffffffff
	actShot     = 2
	actRedirect = 7
)

// A test packet comes from the loopback interface, which always has index 1.
const testIfindex = 1

// loadTested loads copies of the programs with maps of their own, so that test packets are not counted on a node that has programs at work.
// The maps are small, since for a moment they take memory beside the node's: what counts
// is whole, and no test packet gets as far as to a flow, a fragment or a Service.
func (l *loader) loadTested() (err error) {
	spec := l.spec.Copy()
	// Those on a cgroup can't be run, and the verifier has seen them already.
	maps.DeleteFunc(spec.Programs, func(_ string, p *ebpf.ProgramSpec) bool { return isOnSockets(p.Type) })
	for _, d := range registry.All() {
		if m := spec.Maps[d.Name]; m.Type != ebpf.PerCPUArray {
			m.MaxEntries = min(m.MaxEntries, 16)
		}
	}
	if l.tested, err = loadCollection(spec, nil); err != nil {
		return fmt.Errorf("for the self-test: %w", err)
	}
	return nil
}

// closeTested gives up what the self-test has run.
func (l *loader) closeTested() {
	if l.tested != nil {
		l.tested.Close()
	}
	l.tested = nil
}

// selfTest runs every program once on each test packet. Programs that are used on have been tested before. On a node that had no maps they are tested as
// they are, and what comes of that is removed.
func (l *loader) selfTest() error {
	switch {
	case l.reused:
		return nil
	case l.tested == nil:
		tables := l.tables.Maps()
		return errors.Join(runTests(l.programs, tables), forgetCounts(tables))
	}
	defer l.closeTested()
	return runTests(l.tested.Programs, l.tested.Maps)
}

// runTests sends each program all test packets. In the maps, be they copies or new, is nothing that one could get as far as: no endpoint, destination or uplink.
func runTests(programs map[string]*ebpf.Program, tables map[string]*ebpf.Map) error {
	if err := addTestPod(tables[devices.Name]); err != nil {
		return err
	}
	for name, p := range programs {
		if isOnSockets(p.Type()) {
			continue
		}
		if err := testProgram(name, p); err != nil {
			return err
		}
	}
	return nil
}

// testKey is the test interface's in the map devices.
func testKey(m *ebpf.Map) []byte {
	return raw.Encode(make([]byte, m.KeySize()), devices.Key{Ifindex: testIfindex})
}

// addTestPod makes the test interface a pod's.
func addTestPod(m *ebpf.Map) error {
	dev := devices.Value{Addresses: wire.Addresses{wire.Addr{10: 0xff, 11: 0xff, 12: 192, 13: 0, 14: 2, 15: 1}}}
	if err := raw.Update(m, testKey(m), raw.Value{raw.Encode(make([]byte, m.ValueSize()), dev)}, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write map %s for the self-test: %w", devices.Name, err)
	}
	return nil
}

// forgetTestPod removes the test interface, be it from the first start of a node that was killed in its self-test. What that has counted stays.
func (l *loader) forgetTestPod() error {
	m := l.tables.Maps()[devices.Name]
	if err := m.Delete(testKey(m)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the self-test's interface from map %s: %w", devices.Name, err)
	}
	return nil
}

// forgetCounts removes what test packets were counted as.
func forgetCounts(tables map[string]*ebpf.Map) error {
	for name, m := range tables {
		if m.Type() != ebpf.PerCPUArray {
			continue
		}
		err := raw.Each(m, func(key []byte, v raw.Value) error {
			if v.Zero() {
				return nil
			}
			for _, one := range v {
				clear(one)
			}
			return raw.Update(m, key, v, ebpf.UpdateAny)
		})
		if err != nil {
			return fmt.Errorf("forget what the self-test has counted in map %s: %w", name, err)
		}
	}
	return nil
}

func testProgram(name string, p *ebpf.Program) error {
	if p.Type() == ebpf.Syscall {
		for t := range usage.Tables {
			for stage := CollectBegin; stage <= CollectEnd; stage++ {
				if _, err := collect(p, collectArgs{Table: t, Stage: stage, Count: 1}); err != nil {
					return fmt.Errorf("%w: %s: %w", ErrSelfTest, name, err)
				}
			}
		}
		return nil
	}
	for what, packet := range testPackets() {
		action, err := p.Run(&ebpf.RunOptions{Data: packet})
		if err != nil {
			return fmt.Errorf("%w: %s on %s: %w", ErrSelfTest, name, what, err)
		}
		switch action {
		case actUnspec, actShot, actRedirect:
		default:
			return fmt.Errorf("%w: %s on %s: unknown action %d", ErrSelfTest, name, what, int32(action))
		}
	}
	return nil
}

// testPackets are frames of each kind, those of IPv4 from 192.0.2.1 (TEST-NET-1).
func testPackets() map[string][]byte {
	return map[string][]byte{
		"an empty frame":         ethernet(0x88b5, nil),
		"an ARP request":         ethernet(0x0806, make([]byte, 28)),
		"an IPv6 packet":         ethernet(0x86dd, append([]byte{0x60}, make([]byte, 39)...)),
		"a truncated TCP packet": ethernet(0x0800, ipv4(6, testPorts())),
		"a TCP SYN":              ethernet(0x0800, ipv4(6, append(testPorts(), 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0))),
		"a UDP datagram":         ethernet(0x0800, ipv4(17, append(testPorts(), 0, 8, 0, 0))),
		"an ICMP echo request":   ethernet(0x0800, ipv4(1, []byte{8, 0, 0, 0, 0, 1, 0, 1})),
		"an SCTP packet":         ethernet(0x0800, ipv4(132, append(testPorts(), make([]byte, 8)...))),
	}
}

func ethernet(protocol uint16, payload []byte) []byte {
	frame := binary.BigEndian.AppendUint16(make([]byte, 12), protocol)
	return append(frame, payload...)
}

func testPorts() []byte { return []byte{0xc0, 0, 0, 53} }

// ipv4 is a packet from 192.0.2.1 to 198.51.100.1, both documentation addresses.
func ipv4(protocol byte, payload []byte) []byte {
	p := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0, 192, 0, 2, 1, 198, 51, 100, 1}
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)+len(payload)))
	var sum uint32
	for i := 0; i < len(p); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum+sum>>16))
	return append(p, payload...)
}
