package endpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// A pod may have several attachments, each with a link of its own, as multus makes them. The node drops a packet of a pod whose source
// is not an address of the link that it comes by. So with several attachments the pod has a routing rule for each of their addresses, which
// leads to a table in which the address's own link is the only way out. The routes of the first attachment stay as they are in the
// main table; those of later ones stand behind them there by a larger metric, and are used once the first attachment is gone.

// firstTable plus the index of the host's end is the number of an endpoint's table in the pod, see tableOf.
const firstTable = 1 << 27

func tableOf(hostIndex int) int { return firstTable + hostIndex }

// defaultPrefix has all destinations of the address's family.
func defaultPrefix(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// ownTable are the routes of the table of the endpoint's addresses, over its interface of that index in the pod.
func (e Endpoint) ownTable(index int) (all []device.Route) {
	for _, a := range e.Addresses {
		table := tableOf(e.HostIndex)
		if a.Is4() {
			all = append(all, device.Route{Dst: hostPrefix(Gateway(a)), Index: index, Table: table, Foreign: true})
		}
		all = append(all, device.Route{Dst: defaultPrefix(a), Gateway: Gateway(a), Index: index, Table: table, Foreign: true})
	}
	return all
}

// otherRoutes are the routes of the pod's main table over interfaces that it had before this one.
func (w *Work) otherRoutes() ([]device.Route, error) {
	const loopback = 1
	all, err := w.Inside.Routes()
	return slices.DeleteFunc(all, func(r device.Route) bool { return r.Index == loopback }), err
}

// behind gives a route a larger metric than others have to the same destination.
func behind(r device.Route, others []device.Route) device.Route {
	for _, o := range others {
		if o.Dst == r.Dst && r.Priority <= o.Priority {
			r.Priority = o.Priority + 1
		}
	}
	return r
}

// writeSourceRules has each address of the endpoint, and of the pod's other attachments, leave by its own link.
func (w *Work) writeSourceRules(index int) error {
	if err := writeSourceRules(w.Inside, w.Endpoint, index); err != nil {
		return err
	}
	siblings, err := w.siblings()
	if err != nil {
		return err
	}
	return forAll(siblings, func(e Endpoint) error {
		l, err := w.Inside.LinkByName(e.IfName)
		if errors.Is(err, device.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return writeSourceRules(w.Inside, e, l.Index)
	})
}

func writeSourceRules(inside *device.Handle, e Endpoint, index int) error {
	if err := forAll(e.ownTable(index), inside.ReplaceRoute); err != nil {
		return err
	}
	return forAll(e.Addresses, func(a netip.Addr) error { return inside.AddSourceRule(a, tableOf(e.HostIndex)) })
}

// haveSourceRules checks the rules of the endpoint's addresses.
func (w *Work) haveSourceRules() error {
	siblings, err := w.siblings()
	if err != nil || !w.SourceRules && len(siblings) == 0 {
		return err
	}
	return forAll(w.Addresses, func(a netip.Addr) error {
		there, err := w.Inside.HasSourceRule(a, tableOf(w.HostIndex))
		if err == nil && !there {
			w.Wrong("the pod has no routing rule for packets from %s", a)
		}
		return err
	})
}

// deleteSourceRules deletes the rules of the endpoint's addresses in the pod, if that still exists; the routes of its table have gone
// with its link. If one attachment is left that ADD made as the only one, its rules are deleted as well. Without its link, what could not be
// deleted leads nowhere, so it is no reason for a release to fail.
func (w *Work) deleteSourceRules() error {
	siblings, err := w.siblings()
	if err != nil || !w.SourceRules && len(siblings) == 0 {
		return err
	}
	pod := w.Endpoint
	if pod.NetNS == "" { // a killed ADD, which has written no state file
		pod = siblings[0]
	}
	err = pod.inside(func(h *device.Handle) error {
		err := forAll(w.indexes, func(index int) error { return deleteRules(h, w.Endpoint, index) })
		if len(siblings) == 1 && !siblings[0].SourceRules {
			err = errors.Join(err, deleteRules(h, siblings[0], siblings[0].HostIndex), deleteTable(h, siblings[0]))
		}
		return err
	})
	if err != nil {
		w.log().Warn("routing rules in the pod not deleted", "endpoint", w.ID.String(), "error", err)
	}
	return nil
}

func deleteRules(h *device.Handle, e Endpoint, hostIndex int) error {
	return forAll(e.Addresses, func(a netip.Addr) error { return h.DeleteSourceRule(a, tableOf(hostIndex)) })
}

func deleteTable(h *device.Handle, e Endpoint) error {
	l, err := h.LinkByName(e.IfName)
	if err != nil {
		return nil //nolint:nilerr // its routes are gone with it
	}
	all := e.ownTable(l.Index)
	slices.Reverse(all) // the gateway's route last, which the default route needs
	return forAll(all, h.DeleteForeignRoute)
}

// inside calls do with the network of the pod, unless its namespace is gone.
func (e Endpoint) inside(do func(*device.Handle) error) error {
	ns, err := device.OpenNetNS(e.NetNS)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	var st unix.Stat_t
	if err := unix.Fstat(ns.FD(), &st); err != nil {
		return fmt.Errorf("stat network namespace %s: %w", e.NetNS, err)
	}
	if st.Ino != e.NetNSInode {
		return nil
	}
	h, err := device.OpenIn(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	return do(h)
}

// siblings are the other attachments of the endpoint's container. They are found by the names of the state files, which have the
// container's ID unless that is very long.
func (w *Work) siblings() (all []Endpoint, err error) {
	files, err := os.ReadDir(Dir(w.StateDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range files {
		rest, same := strings.CutPrefix(f.Name(), w.ContainerID+":")
		ifname, isState := strings.CutSuffix(rest, suffix)
		if !same || !isState || ifname == w.IfName {
			continue
		}
		if e, err := Read(w.StateDir, ID{w.ContainerID, ifname}); err == nil && !e.Releasing {
			all = append(all, e)
		}
	}
	return all, nil
}
