// Package attach puts programs onto interfaces and replaces them in place: as
// pinned tcx links where the kernel has them (6.6), as clsact filters where it
// does not. It touches no attachment but our own.
//
// What each costs: the kernel waits for a grace period when a tcx link is made
// and for another when it or its device goes, each 8 to 16 ms at HZ=250, and
// holds its lock of all links meanwhile, so ten pods at once wait for each
// other. clsact waits for none, but a packet takes some 50 ns more (4 % between
// two pods of a node), and anybody who removes the qdisc takes the program off.
package attach

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Mode says by which mechanism programs are attached.
type Mode string

// The modes; Auto is tcx where the kernel has it.
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

// The hooks. FromPod is on a pod's host-side veth, the others are on uplinks.
const (
	FromPod    Hook = "from_pod"
	FromUplink Hook = "from_uplink"
	ToUplink   Hook = "to_uplink"
)

// Program is the name of the program that belongs on the hook.
func (h Hook) Program() string { return "ec_" + string(h) }

func (h Hook) egress() bool { return h == ToUplink }

// UplinkHooks are the hooks of an interface that leads out of the node. What
// leaves is seen before what arrives, so that no packet leaves with a pod's address.
func UplinkHooks() []Hook { return []Hook{ToUplink, FromUplink} }

// Hooks are all of them.
func Hooks() []Hook { return append(UplinkHooks(), FromPod) }

// Attacher attaches programs on one node. The zero Mode is Auto.
type Attacher struct {
	Dir  bpffs.Dir
	Mode Mode
	// New says that the interfaces have just been made by the caller, so that
	// Attach need not look for a filter of ours on them. Each look waits for
	// the kernel's lock of all links, which a tcx attach elsewhere holds for
	// a grace period.
	New bool
}

// State is how a hook of an interface stands.
type State struct {
	// Mode is TCX or Clsact, empty when nothing of ours is attached.
	Mode Mode
	// ProgramID is the kernel's ID of the attached program.
	ProgramID ebpf.ProgramID
}

// Attach makes prog the program on the hook of the interface. One of ours that
// is there already is replaced without a packet passing neither; an attachment
// of ours by the other mechanism is removed afterwards. qdisc says that the
// interface had no clsact qdisc before and has one now.
func (a Attacher) Attach(ifindex int, hook Hook, prog *ebpf.Program) (qdisc bool, err error) {
	if !slices.Contains(Hooks(), hook) || ifindex <= 0 {
		return false, fmt.Errorf("attach to interface %d: no hook %q", ifindex, hook)
	}
	if a.Mode != Clsact {
		err := a.attachTCX(ifindex, hook, prog)
		if err == nil && a.New {
			return false, nil
		}
		if err == nil {
			return false, removeFilter(ifindex, hook)
		}
		if a.Mode == TCX || !errors.Is(err, ebpf.ErrNotSupported) {
			return false, fmt.Errorf("attach %s to interface %d by tcx: %w", hook, ifindex, err)
		}
	}
	qdisc, err = replaceFilter(ifindex, hook, prog)
	if err != nil {
		return false, fmt.Errorf("attach %s to interface %d by clsact: %w", hook, ifindex, err)
	}
	return qdisc, a.removeLink(ifindex, hook)
}

// Detach removes what we attached to the hook, by either mechanism. Nothing
// there, or no such interface, is no error.
func (a Attacher) Detach(ifindex int, hook Hook) error {
	return errors.Join(a.removeLink(ifindex, hook), removeFilter(ifindex, hook))
}

// Attached tells which program of ours is on the hook of the interface.
func (a Attacher) Attached(ifindex int, hook Hook) (State, error) {
	if s, err := a.linkState(ifindex, hook); err != nil || s.Mode != "" {
		return s, err
	}
	return filterState(ifindex, hook)
}
