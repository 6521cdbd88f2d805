// Package attach attaches programs to interfaces and replaces them in place: as
// pinned tcx links where the kernel has tcx (6.6), otherwise as clsact filters.
// Those on sockets are pinned links on a cgroup (cgroup.go). It touches no
// attachment but our own.
//
// What each costs: the kernel waits for an RCU grace period when a tcx link is
// made and for another when the link or its device is removed, 8 to 16 ms each at
// HZ=250. It holds the lock of all links (RTNL) meanwhile, so ten pods at once
// wait for each other. clsact needs no grace period, but each packet takes some
// 50 ns more (4 % between two pods of a node), and whoever removes the qdisc
// removes the program. So ToPod is a clsact filter also where others are tcx links:
// what it sees has walked the host's stack, beside which 50 ns are nothing, and a
// pod's ADD takes half a millisecond more instead of sixteen.
package attach

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Mode is the mechanism by which programs are attached.
type Mode string

// The modes. Auto is TCX where the kernel has it, else Clsact; of ToPod Clsact, unless somebody else's qdisc is in the way.
const (
	Auto   Mode = "auto"
	TCX    Mode = "tcx"
	Clsact Mode = "clsact"
)

// ParseMode accepts the text of a mode; the empty text is Auto.
func ParseMode(s string) (Mode, error) {
	switch Mode(s) {
	case "":
		return Auto, nil
	case Auto, TCX, Clsact:
		return Mode(s), nil
	}
	return "", fmt.Errorf("%q is not one of auto, tcx, clsact", s)
}

// Hook is a place on an interface that carries one of our programs.
type Hook string

// The hooks. FromPod is on a pod's host-side veth, ToPod as well where the programs serve Services, FromTunnel and ToTunnel are on the tunnel device, the others on
// uplinks: FromL3 and ToL3 on those without an Ethernet header.
const (
	FromPod    Hook = "from_pod"
	ToPod      Hook = "to_pod"
	FromUplink Hook = "from_uplink"
	ToUplink   Hook = "to_uplink"
	FromL3     Hook = "from_l3"
	ToL3       Hook = "to_l3"
	FromTunnel Hook = "from_tunnel"
	ToTunnel   Hook = "to_tunnel"
)

// Program is the name of the program for the hook.
func (h Hook) Program() string { return "ec_" + string(h) }

func (h Hook) egress() bool { return h == ToPod || h == ToUplink || h == ToL3 || h == ToTunnel }

// UplinkHooks are the hooks of an interface that leads out of the node. What
// leaves is seen before what arrives, so that no packet leaves with a pod's address.
func UplinkHooks() []Hook { return []Hook{ToUplink, FromUplink} }

// BareHooks are UplinkHooks of an interface without an Ethernet header.
func BareHooks() []Hook { return []Hook{ToL3, FromL3} }

// TunnelHooks are the hooks of the tunnel device.
func TunnelHooks() []Hook { return []Hook{ToTunnel, FromTunnel} }

// PodHooks are the hooks of a pod's host-side veth.
func PodHooks() []Hook { return []Hook{ToPod, FromPod} }

// Hooks are all of interfaces.
func Hooks() []Hook { return slices.Concat(UplinkHooks(), BareHooks(), TunnelHooks(), PodHooks()) }

// Attacher attaches programs on one node. The zero Mode is Auto.
type Attacher struct {
	Dir  bpffs.Dir
	Mode Mode
	// Cgroup is the directory of the cgroup to whose processes' sockets programs are attached.
	Cgroup string
	// New says that the caller has just created the interfaces, so that Attach
	// need not look for a filter of ours on them. That look would wait for RTNL,
	// which a tcx attach elsewhere holds for a grace period.
	New bool
}

// State is what is attached to a hook of an interface.
type State struct {
	// Mode is TCX, Clsact or Cgroup, empty when nothing of ours is attached.
	Mode Mode
	// ProgramID is the kernel's ID of the attached program.
	ProgramID ebpf.ProgramID
}

// Attach makes prog the program on the hook of the interface. A program of ours
// that is there already is replaced atomically; one that is attached by the other
// mechanism is removed afterwards. qdisc says that the interface had no clsact
// qdisc before and has one now.
// The hooks of sockets have the index 0.
func (a Attacher) Attach(ifindex int, hook Hook, prog *ebpf.Program) (qdisc bool, err error) {
	if hook.OnSockets() && ifindex == 0 {
		if err = a.attachCgroup(hook, prog); err != nil {
			err = fmt.Errorf("attach %s to cgroup %s: %w", hook, a.Cgroup, err)
		}
		return false, err
	}
	if !slices.Contains(Hooks(), hook) || ifindex <= 0 {
		return false, fmt.Errorf("attach to interface %d: no hook %q", ifindex, hook)
	}
	if a.linksFirst(hook) {
		err = a.byLink(ifindex, hook, prog)
		if a.Mode == TCX || !errors.Is(err, ebpf.ErrNotSupported) {
			return false, err
		}
	}
	qdisc, err = a.byFilter(ifindex, hook, prog)
	if errors.Is(err, errForeignQdisc) && a.Mode != Clsact && hook == ToPod {
		if linkErr := a.byLink(ifindex, hook, prog); !errors.Is(linkErr, ebpf.ErrNotSupported) {
			return false, linkErr
		}
	}
	return qdisc, err
}

// linksFirst reports whether the hook gets a tcx link if the kernel has tcx.
func (a Attacher) linksFirst(hook Hook) bool {
	return a.Mode == TCX || a.Mode != Clsact && hook != ToPod
}

func (a Attacher) byLink(ifindex int, hook Hook, prog *ebpf.Program) error {
	if err := a.attachTCX(ifindex, hook, prog); err != nil {
		return fmt.Errorf("attach %s to interface %d by tcx: %w", hook, ifindex, err)
	}
	if a.New {
		return nil
	}
	return removeFilter(ifindex, hook)
}

func (a Attacher) byFilter(ifindex int, hook Hook, prog *ebpf.Program) (qdisc bool, err error) {
	qdisc, err = replaceFilter(ifindex, hook, prog)
	if err != nil {
		return qdisc, fmt.Errorf("attach %s to interface %d by clsact: %w", hook, ifindex, err)
	}
	return qdisc, a.removeLink(ifindex, hook)
}

// Detach removes what we attached to the hook, by either mechanism; what is on
// another cgroup than Cgroup stays, until Attach has moved it. It is no error if
// there is nothing, or no such interface.
func (a Attacher) Detach(ifindex int, hook Hook) error {
	if hook.OnSockets() {
		return a.detachCgroup(hook)
	}
	return errors.Join(a.removeLink(ifindex, hook), removeFilter(ifindex, hook))
}

// Attached returns which program of ours is on the hook of the interface.
func (a Attacher) Attached(ifindex int, hook Hook) (State, error) {
	if s, err := a.linkState(ifindex, hook); err != nil || s.Mode != "" || hook.OnSockets() {
		return s, err
	}
	return filterState(ifindex, hook)
}
