package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Hook is a place where the dataplane attaches a program.
type Hook string

// The hooks: of a pod's link on its node, and of the node's uplink.
const (
	FromPod    Hook = "from_pod"
	FromUplink Hook = "from_uplink"
	ToUplink   Hook = "to_uplink"
)

// pins is where a node has what this project pins.
const pins = "/sys/fs/bpf/ebpf-cni"

func (h Hook) attachType() ebpf.AttachType {
	if h == ToUplink {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

// Detach takes a program from an interface, as a person or a fault would, and makes sure that it is gone; putBack attaches it
// again. It stays away only where no agent runs.
func (m *Machine) Detach(ctx context.Context, hook Hook, ifindex int) (putBack func() error, err error) {
	pin := m.inRoot(fmt.Sprintf("%s/links/%s_%d", pins, hook, ifindex))
	if err := os.Remove(pin); err != nil {
		return nil, fmt.Errorf("detach %s: %w", hook, err)
	}
	// The kernel takes a moment.
	err = Poll(ctx, fmt.Sprintf("%s is gone from interface %d", hook, ifindex), func(context.Context) error {
		return m.Do(func() error {
			left, err := Attached(ifindex, hook.attachType())
			if err == nil && left > 0 {
				err = fmt.Errorf("%d programs are there", left)
			}
			return err
		})
	})
	return func() error {
		return m.Do(func() error {
			return attachPinned(m.inRoot(fmt.Sprintf("%s/progs/ec_%s", pins, hook)), hook, ifindex, pin)
		})
	}, err
}

// Attached counts the programs that an interface of the calling thread's network has by tcx: none where the kernel has no tcx.
func Attached(ifindex int, at ebpf.AttachType) (int, error) {
	found, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: at})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look for programs of interface %d: %w", ifindex, err)
	}
	return len(found.Programs), nil
}

// attachPinned attaches a program that is pinned and pins the link.
func attachPinned(program string, hook Hook, ifindex int, pin string) error {
	from, err := ebpf.LoadPinnedProgram(program, nil)
	if err != nil {
		return err
	}
	defer from.Close()
	made, err := link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: from, Attach: hook.attachType()})
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", program, ifindex, err)
	}
	defer made.Close()
	return made.Pin(pin)
}

// Forget empties the map in which a node's agent has left what it knew of other nodes, so that the next one finds nothing. No
// agent may run.
func (m *Machine) Forget() error {
	table, err := ebpf.LoadPinnedMap(m.inRoot(pins+"/maps/destinations"), nil)
	if err != nil {
		return err
	}
	defer table.Close()
	var key, value []byte
	var keys [][]byte
	entries := table.Iterate()
	for entries.Next(&key, &value) {
		keys = append(keys, bytes.Clone(key))
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read what %s knows of other nodes: %w", m.Name, err)
	}
	if len(keys) == 0 {
		return fmt.Errorf("%s knows of no other node as it is", m.Name)
	}
	for _, key := range keys {
		if err := table.Delete(key); err != nil {
			return fmt.Errorf("empty what %s knows of other nodes: %w", m.Name, err)
		}
	}
	return nil
}
