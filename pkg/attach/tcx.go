package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

func (h Hook) attachType() ebpf.AttachType {
	if h.egress() {
		return ebpf.AttachTCXEgress
	}
	return ebpf.AttachTCXIngress
}

func (a Attacher) attachTCX(ifindex int, hook Hook, prog *ebpf.Program) error {
	return a.attachLink(ifindex, hook, prog, func() (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{Interface: ifindex, Program: prog, Attach: hook.attachType()})
	})
}

// attachLink updates the pinned link, or makes and pins one.
func (a Attacher) attachLink(ifindex int, hook Hook, prog *ebpf.Program, attach func() (link.Link, error)) error {
	done, err := a.updateLink(ifindex, hook, prog)
	if done || err != nil {
		return err
	}
	return a.newLink(ifindex, hook, attach)
}

// newLink makes a link and pins it.
func (a Attacher) newLink(ifindex int, hook Hook, attach func() (link.Link, error)) error {
	l, err := attach()
	if err != nil {
		return fmt.Errorf("make link: %w", err)
	}
	defer l.Close()
	if err := l.Pin(a.Dir.Link(string(hook), ifindex)); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

// openLink opens a pinned link; nil: nothing is pinned at path.
func openLink(path string) (link.Link, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open link %s: %w", path, err)
	}
	return l, nil
}

// updateLink replaces the program of the pinned link. It reports false when there
// is none; a link whose device is gone is unpinned.
func (a Attacher) updateLink(ifindex int, hook Hook, prog *ebpf.Program) (bool, error) {
	path := a.Dir.Link(string(hook), ifindex)
	l, err := openLink(path)
	if l == nil || err != nil {
		return false, err
	}
	defer l.Close()
	err = l.Update(prog)
	if errors.Is(err, unix.ENOLINK) {
		return false, os.Remove(path)
	}
	if err != nil {
		return false, fmt.Errorf("update link %s: %w", path, err)
	}
	return true, nil
}

func (a Attacher) removeLink(ifindex int, hook Hook) error {
	path := a.Dir.Link(string(hook), ifindex)
	l, err := openLink(path)
	if l == nil || err != nil {
		return err
	}
	defer l.Close()
	if err := l.Unpin(); err != nil {
		return fmt.Errorf("unpin link %s: %w", path, err)
	}
	return nil
}

func (a Attacher) linkState(ifindex int, hook Hook) (State, error) {
	path := a.Dir.Link(string(hook), ifindex)
	info, err := readLink(path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("read link %s: %w", path, err)
	}
	if hook.OnSockets() {
		if ours, err := a.isCgroup(info); !ours || err != nil {
			return State{}, err
		}
		return State{Mode: Cgroup, ProgramID: info.program}, nil
	}
	if info.kind != linkTCX || int(info.ifindex) != ifindex {
		return State{}, nil
	}
	return State{Mode: TCX, ProgramID: info.program}, nil
}
