package datapath

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// attachment is a program of ours on a hook, and what is needed to restore it.
type attachment struct {
	attach.Place
	mode attach.Mode // empty: there is none yet
	id   ebpf.ProgramID
	// prog is nil if this process may not open it: then it can be replaced, but not
	// restored.
	prog *ebpf.Program
}

// findAttachments finds every program of ours that is attached, at all
// knownPlaces. It unpins links whose device is gone.
func findAttachments(opts Options) (out []attachment, err error) {
	places, err := knownPlaces(opts)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			closeAttachments(out)
			out = nil
		}
	}()
	programs := make(map[ebpf.ProgramID]*ebpf.Program)
	for _, p := range places {
		state, err := opts.attacher().Attached(p.Ifindex, p.Hook)
		if err != nil {
			return out, err
		}
		if state.Mode == "" {
			if err := unpinDead(opts, p); err != nil {
				return out, err
			}
			continue
		}
		prog, seen := programs[state.ProgramID]
		if !seen {
			if prog, err = openProgram(opts.Dir, p.Hook, state.ProgramID); err != nil {
				return out, err
			}
			programs[state.ProgramID] = prog
		}
		out = append(out, attachment{Place: p, mode: state.Mode, id: state.ProgramID, prog: prog})
	}
	return out, nil
}

// unpinDead unpins the link of a device, or of the cgroup, that is gone.
func unpinDead(opts Options, p attach.Place) error {
	if p.Ifindex > 0 && !gone(p) {
		return nil
	}
	return opts.attacher().Detach(p.Ifindex, p.Hook)
}

// openProgram opens an attached program: by its pin, which needs only the right to
// read that, or else by its ID, which needs CAP_SYS_ADMIN. Without that capability
// it returns nil for a program that is not pinned, as after a killed upgrade.
func openProgram(dir bpffs.Dir, hook attach.Hook, id ebpf.ProgramID) (*ebpf.Program, error) {
	if p, err := openPinned(dir.Program(hook.Program()), id); err == nil {
		return p, nil
	}
	p, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, unix.EPERM) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open program %d that is attached as %s: %w", id, hook, err)
	}
	return p, nil
}

// openPinned opens a pinned program if it has that ID.
func openPinned(path string, id ebpf.ProgramID) (*ebpf.Program, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return nil, err
	}
	info, err := p.Info()
	if err == nil {
		if is, ok := info.ID(); ok && is == id {
			return p, nil
		}
	}
	return nil, errors.Join(err, fmt.Errorf("%s is not program %d", path, id), p.Close())
}

func closeAttachments(all []attachment) {
	for _, a := range all {
		// Attachments share programs; closing one twice does nothing.
		_ = a.prog.Close()
	}
}

// knownPlaces lists where programs of ours may be attached: the places of pinned
// links, the interfaces of pods and uplinks, those on which we made a qdisc, and
// those with a filter of ours, which a process may have attached and been killed
// before it could record that; and the sockets.
func knownPlaces(opts Options) ([]attach.Place, error) {
	out, err := attach.PinnedLinks(opts.Dir)
	pods, err1 := ifindexes(opts.Dir.Map(devices.Name))
	ups, err2 := ifindexes(opts.Dir.Map(uplinks.Name))
	made, err3 := qdiscs{opts.StateDir}.list()
	filters, err4 := attach.Filters()
	if err := errors.Join(err, err1, err2, err3, err4); err != nil {
		return nil, err
	}
	for _, i := range pods {
		for _, hook := range attach.PodHooks() {
			out = append(out, attach.Place{Ifindex: i, Hook: hook})
		}
	}
	made = slices.DeleteFunc(made, func(i int) bool { return slices.Contains(pods, i) })
	for _, i := range append(ups, made...) {
		for _, hook := range slices.Concat(attach.UplinkHooks(), attach.BareHooks()) {
			out = append(out, attach.Place{Ifindex: i, Hook: hook})
		}
	}
	out = append(out, filters...)
	for _, hook := range attach.SocketHooks() {
		out = append(out, attach.Place{Hook: hook})
	}
	slices.SortFunc(out, attach.Place.Compare)
	return slices.Compact(out), nil
}

// ifindexes lists the keys of a pinned map, of any build, whose key is an ifindex. Entry 0 is no interface's.
func ifindexes(path string) ([]int, error) {
	m, err := raw.Open(path)
	if m == nil || err != nil {
		return nil, err
	}
	defer m.Close()
	var out []int
	err = raw.Each(m, func(key []byte, _ raw.Value) error {
		if i := int(raw.Decode[uint32](key)); i != 0 {
			out = append(out, i)
		}
		return nil
	})
	return out, err
}

func interfaceExists(ifindex int) bool {
	_, err := net.InterfaceByIndex(ifindex)
	return err == nil
}

// gone reports whether a place is on an interface that does not exist any more.
func gone(p attach.Place) bool { return p.Ifindex > 0 && !interfaceExists(p.Ifindex) }
