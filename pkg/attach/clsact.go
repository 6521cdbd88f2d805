package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Our filter is told from others' by all three.
const (
	filterPriority = 142
	filterHandle   = 0xec
)

func (h Hook) parent() uint32 {
	if h.egress() {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// replaceFilter makes prog our filter's program, and the clsact qdisc if there
// is none; it reports whether it made one.
func replaceFilter(ifindex int, hook Hook, prog *ebpf.Program) (bool, error) {
	created, err := ensureQdisc(ifindex)
	if err != nil {
		return false, err
	}
	if !created {
		if err := placeFree(ifindex, hook); err != nil {
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

// placeFree fails when somebody else's filter has our priority and handle:
// replacing would take it away.
func placeFree(ifindex int, hook Hook) error {
	filters, err := listFilters(ifindex, hook)
	if err != nil {
		return err
	}
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if ok && b.Priority == filterPriority && b.Handle == filterHandle && b.Name != hook.Program() {
			return fmt.Errorf("filter %q, not ours, has priority %d and handle %#x: give it others", b.Name, filterPriority, filterHandle)
		}
	}
	return nil
}

func ensureQdisc(ifindex int) (bool, error) {
	err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}})
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return false, fmt.Errorf("add clsact qdisc: %w", err)
	}
	return false, nil
}

// removeFilter deletes our filter and leaves the qdisc.
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

// RemoveQdisc deletes the interface's clsact qdisc unless it holds filters. No
// qdisc, or no such interface, is no error.
func RemoveQdisc(ifindex int) error {
	for _, hook := range UplinkHooks() {
		filters, err := listFilters(ifindex, hook)
		if err != nil || len(filters) > 0 {
			return err
		}
	}
	err := netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}})
	if err != nil && !gone(err) {
		return fmt.Errorf("delete clsact qdisc of interface %d: %w", ifindex, err)
	}
	return nil
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
	for _, f := range filters {
		b, ok := f.(*netlink.BpfFilter)
		if ok && b.Priority == filterPriority && b.Handle == filterHandle && b.Name == hook.Program() {
			return b, nil
		}
	}
	return nil, nil
}

func listFilters(ifindex int, hook Hook) ([]netlink.Filter, error) {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil, nil
		}
		return nil, fmt.Errorf("find interface %d: %w", ifindex, err)
	}
	filters, err := netlink.FilterList(l, hook.parent())
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters of interface %d: %w", ifindex, err)
	}
	return filters, nil
}

// Filter is a clsact filter of ours.
type Filter struct {
	Ifindex int
	Hook    Hook
}

// Filters finds every filter of ours by looking at all interfaces.
func Filters() ([]Filter, error) {
	indexes, err := clsactInterfaces()
	if err != nil {
		return nil, err
	}
	var out []Filter
	for _, i := range indexes {
		for _, hook := range Hooks() {
			f, err := findFilter(i, hook)
			if err != nil {
				return nil, err
			}
			if f != nil {
				out = append(out, Filter{i, hook})
			}
		}
	}
	return out, nil
}

// clsactInterfaces lists the interfaces that can have filters.
func clsactInterfaces() ([]int, error) {
	const attempts = 10
	var all []netlink.Qdisc
	err := error(netlink.ErrDumpInterrupted)
	// Interfaces that come or go meanwhile interrupt a list, which is then incomplete.
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

// gone says that the thing is not there: no device, no qdisc, no filter.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
