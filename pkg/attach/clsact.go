package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A filter is ours if priority, handle and name match.
const (
	filterPriority = 142
	filterHandle   = 0xec
)

// errForeignQdisc is returned (wrapped) when somebody else's qdisc has the place of clsact: their ingress qdisc, in which
// filters for both directions would see what arrives.
var errForeignQdisc = errors.New("another qdisc is in the way")

func (h Hook) parent() uint32 {
	if h.egress() {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// replaceFilter makes prog our filter's program. It creates a clsact qdisc if there
// is none, and reports whether it did.
func replaceFilter(ifindex int, hook Hook, prog *ebpf.Program) (bool, error) {
	created, err := ensureQdisc(ifindex)
	if err != nil {
		return false, err
	}
	if !created {
		if err := checkFree(ifindex, hook); err != nil {
			return false, err
		}
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex,
			Parent:    hook.parent(),
			Handle:    filterHandle,
			Protocol:  unix.ETH_P_ALL,
			Priority:  filterPriority,
		},
		Fd:           prog.FD(),
		Name:         hook.Program(),
		DirectAction: true,
	})
	if err != nil {
		return created, fmt.Errorf("replace filter: %w", err)
	}
	return created, nil
}

// checkFree fails when somebody else's filter has our priority and handle, which
// would be replaced.
func checkFree(ifindex int, hook Hook) error {
	filters, err := listFilters(ifindex, hook)
	if err != nil {
		return err
	}
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if ok && b.Priority == filterPriority && b.Handle == filterHandle && b.Name != hook.Program() {
			return fmt.Errorf("filter %q, which is not ours, has our priority %d and handle %#x: change either of them", b.Name, filterPriority, filterHandle)
		}
	}
	return nil
}

func qdisc(ifindex int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
}

func ensureQdisc(ifindex int) (bool, error) {
	err := netlink.QdiscAdd(qdisc(ifindex))
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return false, fmt.Errorf("add clsact qdisc: %w", err)
	}
	return false, checkClsact(ifindex)
}

// checkClsact fails unless the qdisc that has the place of clsact is one.
func checkClsact(ifindex int) error {
	all, err := netlink.QdiscList(byIndex(ifindex))
	if err != nil {
		return fmt.Errorf("list qdiscs of interface %d: %w", ifindex, err)
	}
	for _, q := range all {
		if q.Attrs().Parent == netlink.HANDLE_CLSACT && q.Type() != "clsact" {
			return fmt.Errorf("add clsact qdisc: %w: %s", errForeignQdisc, q.Type())
		}
	}
	return nil
}

// byIndex is an interface by its index alone, for requests.
func byIndex(ifindex int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
}

// removeFilter deletes our filter, not the qdisc.
func removeFilter(ifindex int, hook Hook) error {
	f, err := findFilter(ifindex, hook)
	if err != nil || f == nil {
		return err
	}
	if err := netlink.FilterDel(f); err != nil && !gone(err) {
		return fmt.Errorf("delete filter %s of interface %d: %w", hook, ifindex, err)
	}
	return nil
}

// RemoveQdisc deletes the interface's clsact qdisc, and reports true, unless it has
// filters. It is no error if there is no qdisc, or no such interface.
func RemoveQdisc(ifindex int) (bool, error) {
	for _, hook := range UplinkHooks() {
		filters, err := listFilters(ifindex, hook)
		if err != nil || len(filters) > 0 {
			return false, err
		}
	}
	err := netlink.QdiscDel(qdisc(ifindex))
	if err != nil && !gone(err) {
		return false, fmt.Errorf("delete clsact qdisc of interface %d: %w", ifindex, err)
	}
	return true, nil
}

func filterState(ifindex int, hook Hook) (State, error) {
	f, err := findFilter(ifindex, hook)
	if err != nil || f == nil {
		return State{}, err
	}
	return State{Mode: Clsact, ProgramID: ebpf.ProgramID(f.Id)}, nil
}

func findFilter(ifindex int, hook Hook) (*netlink.BpfFilter, error) {
	filters, err := listFilters(ifindex, hook)
	if err != nil {
		return nil, err
	}
	return ours(filters, hook), nil
}

// ours finds our filter for the hook; nil: there is none.
func ours(filters []netlink.Filter, hook Hook) *netlink.BpfFilter {
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if ok && b.Priority == filterPriority && b.Handle == filterHandle && b.Name == hook.Program() {
			return b
		}
	}
	return nil
}

// listFilters lists those of the hook's direction; of an interface that does not exist none.
func listFilters(ifindex int, hook Hook) ([]netlink.Filter, error) {
	filters, err := netlink.FilterList(byIndex(ifindex), hook.parent())
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters of interface %d: %w", ifindex, err)
	}
	return filters, nil
}

// Filters lists the places of all clsact filters of ours.
func Filters() ([]Place, error) {
	indexes, err := clsactInterfaces()
	if err != nil {
		return nil, err
	}
	var out []Place
	for _, i := range indexes {
		for _, direction := range PodHooks() { // one of each
			filters, err := listFilters(i, direction)
			if err != nil {
				return nil, err
			}
			for _, hook := range Hooks() {
				if hook.parent() == direction.parent() && ours(filters, hook) != nil {
					out = append(out, Place{i, hook})
				}
			}
		}
	}
	return out, nil
}

// clsactInterfaces lists the interfaces that have a clsact qdisc.
func clsactInterfaces() ([]int, error) {
	const attempts = 10
	var all []netlink.Qdisc
	err := error(netlink.ErrDumpInterrupted)
	// If interfaces come or go meanwhile, the list is interrupted and incomplete.
	for i := 0; i < attempts && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		all, err = netlink.QdiscList(nil)
	}
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var out []int
	for _, q := range all {
		if q.Type() == "clsact" {
			out = append(out, q.Attrs().LinkIndex)
		}
	}
	return out, nil
}

// gone reports whether err means that there is no such device, qdisc or filter.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
