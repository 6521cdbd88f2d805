package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Cgroup is the mode of programs on sockets: as pinned links on the cgroup of the node's processes, on no interface.
const Cgroup Mode = "cgroup"

// The hooks of what processes of a cgroup do with sockets.
const (
	Connect4     Hook = "connect4"
	Connect6     Hook = "connect6"
	Sendmsg4     Hook = "sendmsg4"
	Sendmsg6     Hook = "sendmsg6"
	Recvmsg4     Hook = "recvmsg4"
	Recvmsg6     Hook = "recvmsg6"
	Getpeername4 Hook = "getpeername4"
	Getpeername6 Hook = "getpeername6"
	SockRelease  Hook = "sock_release"
)

// SocketHooks are those of a cgroup. What translates back is there before what translates.
func SocketHooks() []Hook {
	return []Hook{SockRelease, Recvmsg4, Recvmsg6, Getpeername4, Getpeername6, Sendmsg4, Sendmsg6, Connect4, Connect6}
}

// OnSockets reports whether it is a hook of a cgroup, not of an interface.
func (h Hook) OnSockets() bool { return slices.Contains(SocketHooks(), h) }

var socketTypes = map[Hook]ebpf.AttachType{
	Connect4: ebpf.AttachCGroupInet4Connect, Connect6: ebpf.AttachCGroupInet6Connect,
	Sendmsg4: ebpf.AttachCGroupUDP4Sendmsg, Sendmsg6: ebpf.AttachCGroupUDP6Sendmsg,
	Recvmsg4: ebpf.AttachCGroupUDP4Recvmsg, Recvmsg6: ebpf.AttachCGroupUDP6Recvmsg,
	Getpeername4: ebpf.AttachCgroupInet4GetPeername, Getpeername6: ebpf.AttachCgroupInet6GetPeername,
	SockRelease: ebpf.AttachCgroupInetSockRelease,
}

// attachCgroup has the pinned link run prog, or makes one. One that is on another cgroup than ours, or whose cgroup is gone,
// is removed afterwards.
func (a Attacher) attachCgroup(hook Hook, prog *ebpf.Program) error {
	state, err := a.linkState(0, hook)
	if err != nil {
		return err
	}
	if state.Mode != "" {
		_, err = a.updateLink(0, hook, prog)
		return err
	}
	return a.newLink(0, hook, func() (link.Link, error) {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: a.Cgroup, Attach: socketTypes[hook], Program: prog})
		if err != nil {
			return nil, err
		}
		if err := a.removeLink(0, hook); err != nil {
			return nil, errors.Join(err, l.Close())
		}
		return l, nil
	})
}

// detachCgroup removes the pinned link, but not from another cgroup than ours.
func (a Attacher) detachCgroup(hook Hook) error {
	path := a.Dir.Link(string(hook), 0)
	info, err := readLink(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read link %s: %w", path, err)
	}
	if ours, err := a.isCgroup(info); err != nil || !ours && info.cgroup() != 0 {
		return err
	}
	return a.removeLink(0, hook)
}

// isCgroup reports whether a link is on our cgroup; without one of ours, on any.
func (a Attacher) isCgroup(info linkInfo) (bool, error) {
	if info.kind != linkCgroup || info.cgroup() == 0 || a.Cgroup == "" {
		return info.kind == linkCgroup && info.cgroup() != 0, nil
	}
	var stat unix.Stat_t
	if err := unix.Stat(a.Cgroup, &stat); err != nil {
		return false, fmt.Errorf("look at cgroup %s: %w", a.Cgroup, err)
	}
	return stat.Ino == info.cgroup(), nil
}
