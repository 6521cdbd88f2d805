package observe

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Program is a pinned program.
type Program struct {
	Name string         `json:"name"`
	ID   ebpf.ProgramID `json:"id"`
	Tag  string         `json:"tag"`
}

// Attachment is a hook of an interface that has our program, or should; or, with the index 0, one of the cgroup of the node's
// processes.
type Attachment struct {
	Hook      attach.Hook `json:"hook"`
	Ifindex   int         `json:"ifindex"`
	Interface string      `json:"interface"`
	// Pod is the address of the pod whose interface it is, empty on an uplink; PodName what it is called.
	Pod string `json:"pod"`
	PodName
	// Mode is tcx, clsact or cgroup, empty when nothing of ours is attached.
	Mode      attach.Mode    `json:"mode"`
	ProgramID ebpf.ProgramID `json:"program_id"`
}

// programs reads the pinned programs, and reports those that are missing.
func (s *survey) programs() error {
	files, err := os.ReadDir(s.Dir.Programs())
	if err != nil {
		return fmt.Errorf("list pinned programs: %w", err)
	}
	for _, f := range files {
		p, err := describe(s.Dir, f.Name())
		if missing(err) {
			continue // the agent has just renamed it
		}
		if err != nil {
			return err
		}
		s.Programs = append(s.Programs, p)
	}
	for _, h := range attach.Hooks() {
		if slices.Contains(attach.BareHooks(), h) {
			continue // few nodes have an uplink for them
		}
		if s.pinned(h.Program()) == 0 {
			s.problem("program %s is not pinned at %s; a running agent pins it again", h.Program(), s.Dir.Program(h.Program()))
		}
	}
	return nil
}

func describe(dir bpffs.Dir, name string) (Program, error) {
	p, err := ebpf.LoadPinnedProgram(dir.Program(name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return Program{}, fmt.Errorf("open pinned program %s: %w", dir.Program(name), err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return Program{}, fmt.Errorf("read program %s: %w", name, err)
	}
	id, _ := info.ID()
	return Program{Name: name, ID: id, Tag: info.Tag}, nil
}

// pinned returns the ID of the pinned program of that name, 0 when there is none.
func (s *survey) pinned(name string) ebpf.ProgramID {
	for _, p := range s.Programs {
		if p.Name == name {
			return p.ID
		}
	}
	return 0
}

// attachments looks at every place that should have a program and at every
// link that is pinned.
func (s *survey) attachments() error {
	pinned, err := attach.PinnedLinks(s.Dir)
	if err != nil {
		return err
	}
	wanted := map[attach.Place]bool{}
	for _, at := range s.wanted() {
		wanted[at] = true
	}
	for _, at := range union(s.wanted(), pinned) {
		state, err := attach.Attacher{Dir: s.Dir}.Attached(at.Ifindex, at.Hook)
		if missing(err) {
			continue // detached between the listing and the look
		}
		if err != nil {
			return err
		}
		index := uint32(at.Ifindex)
		a := Attachment{at.Hook, at.Ifindex, s.interfaces[index], addressOf(s.devices[index]), s.names.byLink[index], state.Mode, state.ProgramID}
		s.judge(a, wanted[at])
		s.Attachments = append(s.Attachments, a)
	}
	return nil
}

// judge says what is wrong with an attachment.
func (s *survey) judge(a Attachment, wanted bool) {
	program := a.Hook.Program()
	where := fmt.Sprintf("%d (%s)", a.Ifindex, a.Interface)
	if a.Interface == "" {
		where = strconv.Itoa(a.Ifindex)
	}
	if a.Pod != "" {
		where += " of pod " + s.called(uint32(a.Ifindex), a.Pod)
	}
	pin := s.Dir.Link(string(a.Hook), a.Ifindex)
	switch {
	case a.Hook.OnSockets():
		s.judgeSockets(a)
	case wanted && a.Interface == "" && slices.Contains(attach.TunnelHooks(), a.Hook):
		s.problemOf("tunnel", "the tunnel device, interface %s, is gone: what other nodes send through it is lost, and so is what they are sent; a running agent makes it again", where)
	case wanted && a.Interface == "":
		s.problem("interface %s is gone, but has entries in the maps: its pod was not deleted properly; a running agent removes them", where)
	case wanted && a.Mode == "":
		s.problem("%s is not attached to interface %s; a running agent attaches it again", program, where)
	case a.Mode == "":
		s.problem("link %s is severed, its interface is gone; a running agent removes it", pin)
	case !wanted && a.Hook == attach.ToPod && a.Pod != "": // it does nothing there
	case !wanted && slices.Contains(attach.TunnelHooks(), a.Hook): // on a tunnel device that does not work, which the agent says
	case !wanted:
		s.problem("%s is attached to interface %s, which belongs to no pod and is neither uplink nor tunnel; a running agent removes it", program, where)
	case s.pinned(program) != 0 && a.ProgramID != s.pinned(program):
		s.problem("interface %s runs program %d, not %d, which is pinned as %s: an update has not reached it; restart the agent",
			where, a.ProgramID, s.pinned(program), program)
	}
}

// judgeSockets says what is wrong with a program on the cgroup.
func (s *survey) judgeSockets(a Attachment) {
	program := a.Hook.Program()
	switch pinned := s.pinned(program); {
	case a.Mode == "":
		s.problem("%s is not attached to the cgroup of the node's processes, which do not reach Services; a running agent attaches it again", program)
	case a.ProgramID != pinned:
		s.problem("the cgroup of the node's processes runs program %d, not %d, which is pinned as %s: an update has not reached it; restart the agent",
			a.ProgramID, pinned, program)
	}
}

// addressOf returns a pod's address, empty when there is no pod.
func addressOf(v devices.Value) string {
	return cmp.Or(typed.OrEmpty(v.Addresses[wire.IPv4].String()), typed.OrEmpty(v.Addresses[wire.IPv6].String()))
}

// wanted lists where programs of ours belong.
func (s *survey) wanted() []attach.Place {
	var out []attach.Place
	hooks := []attach.Hook{attach.FromPod}
	if s.services {
		hooks = attach.PodHooks()
	}
	for index := range s.devices {
		for _, hook := range hooks {
			out = append(out, attach.Place{Ifindex: int(index), Hook: hook})
		}
	}
	for _, u := range s.uplinks {
		hooks := attach.UplinkHooks()
		if u.Value.Flags&uplinks.Bare != 0 {
			hooks = attach.BareHooks()
		}
		for _, hook := range hooks {
			out = append(out, attach.Place{Ifindex: int(u.Key.Ifindex), Hook: hook})
		}
	}
	if index := s.Node.Tunnel; index != 0 {
		for _, hook := range attach.TunnelHooks() {
			out = append(out, attach.Place{Ifindex: int(index), Hook: hook})
		}
	}
	for _, hook := range attach.SocketHooks() {
		if s.services && s.pinned(hook.Program()) != 0 {
			out = append(out, attach.Place{Hook: hook})
		}
	}
	return out
}

// union returns each place once, sorted.
func union(a, b []attach.Place) []attach.Place {
	all := slices.Concat(a, b)
	slices.SortFunc(all, attach.Place.Compare)
	return slices.Compact(all)
}

// comparePrefixText orders prefixes by number; what is no prefix comes first.
func comparePrefixText(a, b string) int {
	p, _ := netip.ParsePrefix(a)
	q, _ := netip.ParsePrefix(b)
	return cmp.Or(p.Addr().Compare(q.Addr()), cmp.Compare(p.Bits(), q.Bits()))
}
