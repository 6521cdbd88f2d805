package cluster

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"unsafe"

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

func (h Hook) attachType() uint32 {
	if h == ToUplink {
		return unix.BPF_TCX_EGRESS
	}
	return unix.BPF_TCX_INGRESS
}

// Detach takes a program from an interface, as a person or a fault would, and makes sure that it is gone; putBack attaches it
// again. It stays away only where no agent runs.
func (m *Machine) Detach(ctx context.Context, hook Hook, ifindex int) (putBack func() error, err error) {
	link := m.inRoot(fmt.Sprintf("%s/links/%s_%d", pins, hook, ifindex))
	if err := os.Remove(link); err != nil {
		return nil, fmt.Errorf("detach %s: %w", hook, err)
	}
	// The kernel takes a moment.
	err = Poll(ctx, fmt.Sprintf("%s is gone from interface %d", hook, ifindex), func(context.Context) error {
		return m.Do(func() error {
			left, err := attached(hook, ifindex)
			if err == nil && left > 0 {
				err = fmt.Errorf("%d programs are there", left)
			}
			return err
		})
	})
	return func() error {
		return m.Do(func() error {
			return attachPinned(m.inRoot(fmt.Sprintf("%s/progs/ec_%s", pins, hook)), hook, ifindex, link)
		})
	}, err
}

// What follows is of the kernel's union bpf_attr.

// pathAttr is for what is pinned.
type pathAttr struct {
	path uint64
	fd   uint32
	_    uint32
}

// linkAttr is for a link to a program at tcx.
type linkAttr struct {
	program, ifindex, attachType uint32
	_                            [5]uint32
}

// queryAttr is for the programs of an interface.
type queryAttr struct {
	ifindex, attachType uint32
	_                   [2]uint64
	count               uint32
	_                   [9]uint32
}

func bpf[T any](command uintptr, attr *T) (int, error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr)) //nolint:gosec // what the system call takes
	if errno != 0 {
		return 0, errno
	}
	return int(result), nil
}

// pinned does something with a file of a BPF file system.
func pinned(command uintptr, path string, fd int) (int, error) {
	raw, err := unix.BytePtrFromString(path)
	if err != nil {
		return 0, err
	}
	result, err := bpf(command, &pathAttr{path: uint64(uintptr(unsafe.Pointer(raw))), fd: uint32(fd)}) //nolint:gosec // what the system call takes
	runtime.KeepAlive(raw)
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return result, err
}

// attached counts the programs that an interface of this network has at a hook.
func attached(hook Hook, ifindex int) (int, error) {
	query := queryAttr{ifindex: uint32(ifindex), attachType: hook.attachType()}
	_, err := bpf(unix.BPF_PROG_QUERY, &query)
	if err != nil {
		err = fmt.Errorf("look for programs of interface %d: %w", ifindex, err)
	}
	return int(query.count), err
}

// attachPinned attaches a program that is pinned and pins the link.
func attachPinned(program string, hook Hook, ifindex int, link string) error {
	from, err := pinned(unix.BPF_OBJ_GET, program, 0)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	made, err := bpf(unix.BPF_LINK_CREATE, &linkAttr{program: uint32(from), ifindex: uint32(ifindex), attachType: hook.attachType()})
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", program, ifindex, err)
	}
	defer unix.Close(made)
	_, err = pinned(unix.BPF_OBJ_PIN, link, made)
	return err
}
