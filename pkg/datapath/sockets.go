package datapath

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// hostNetns is the cookie of the network namespace that this process is in, the host's; 0 where Services are not served.
func hostNetns(node config.NodeConfig) (uint64, error) {
	if node.Services == 0 {
		return 0, nil
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("make a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("find the network namespace: %w", err)
	}
	return cookie, nil
}

// AttachSockets attaches the programs for sockets to the cgroup where they are not, and returns to which hooks.
func (d *Datapath) AttachSockets() (attached []attach.Hook, err error) {
	for _, hook := range attach.SocketHooks() {
		there, err := d.Attached(0, hook)
		if err == nil && !there {
			err = d.Attach(0, hook)
			attached = append(attached, hook)
		}
		if err != nil {
			return attached, err
		}
	}
	return attached, nil
}
