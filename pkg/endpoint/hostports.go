package endpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// A host port is of the pod that came first, for as long as its link lives, or of the Service whose NodePort it was
// before.

// HostPortTakenError is returned for a host port that is somebody else's.
type HostPortTakenError struct {
	HostPort
	// Holder describes who has it, as in "pod shop/web (...)".
	Holder string
}

func (e *HostPortTakenError) Error() string {
	return fmt.Sprintf("%s is taken by %s", e.HostPort, e.Holder)
}

// errNoHostPorts is returned (wrapped, with ErrNoDataplane) where an agent has pinned no map of host ports.
var errNoHostPorts = fmt.Errorf("%w: the agent is of a version without host ports", ErrNoDataplane)

// ServesHostPorts reports whether the programs serve host ports. The error matches ErrNoDataplane where they never will.
func (n *Node) ServesHostPorts() (bool, error) {
	defer n.closePins()
	err := n.readConfig()
	if err == nil {
		err = n.openTables(true)
	}
	if err != nil {
		return false, noDataplane(err)
	}
	if n.Tables.HostPorts == nil {
		return false, errNoHostPorts
	}
	return n.servesServices(), nil
}

func (w *Work) haveHostPorts() error {
	return forAll(w.HostPorts, func(h HostPort) error {
		have, err := lookUp(w.Tables.HostPorts, h.Key())
		if want := w.HostPortEntry(h); have != want {
			w.Wrong("the entry of %s is %+v instead of %+v", h, have, want)
		}
		return err
	})
}

// freeHostPorts fails with a *HostPortTakenError when a host port that ADD asks for is somebody else's, and with a
// *HostPortShareError when it asks for too many. Writing the entries looks at other pods' again.
func (w *Work) freeHostPorts() error {
	if len(w.HostPorts) == 0 {
		return nil
	}
	if err := w.keepGuarded(); err != nil {
		return err
	}
	if _, err := w.deadHostPorts(); err != nil {
		return err
	}
	var frontends *services.Map
	if err := openMap(w.Node, &frontends, typed.Open[services.Key, services.Value], w.Pins.Map(services.Name), false); err != nil {
		return err
	}
	if err := w.passNodePorts(frontends); err != nil {
		return err
	}
	return w.passListeners(frontends, device.Listeners)
}

// passNodePorts fails with a *HostPortTakenError when a host port that ADD asks for is a Service's NodePort.
func (w *Work) passNodePorts(frontends *services.Map) error {
	var names *services.NamesMap
	if err := openMap(w.Node, &names, typed.Open[services.SetKey, services.ServiceName], w.Pins.Map(services.NamesName), false); err != nil {
		return err
	}
	for _, h := range w.HostPorts {
		key := h.Key()
		v, err := lookUp(frontends, services.NodePort(wire.FamilyOf(h.Address), key.Port, key.Proto))
		if err != nil {
			return err
		}
		if v.Set == 0 {
			continue
		}
		name, err := lookUp(names, services.SetKey{Set: v.Set})
		if err != nil {
			return err
		}
		return &HostPortTakenError{HostPort: h, Holder: nodePort(name)}
	}
	return nil
}

// nodePort describes for operators whose NodePort it is.
func nodePort(s services.ServiceName) string {
	port := services.Text(s.PortName)
	if port == "" {
		port = s.Port.String()
	}
	return fmt.Sprintf("the NodePort of Service %s/%s port %s", services.Text(s.Namespace), services.Text(s.Name), port)
}

// deadHostPorts returns the entries of links that are gone in the place of the endpoint's host ports. It fails with a
// *HostPortTakenError when there is one of a link that exists, and, for ADD, with a *HostPortShareError.
func (w *Work) deadHostPorts() (dead []hostPortEntry, err error) {
	if w.Tables.HostPorts == nil {
		return nil, errNoHostPorts
	}
	own, others := NewHostPorts(w.HostPorts...), map[int]int{}
	for e, err := range w.Tables.HostPorts.All() {
		if err != nil {
			return nil, err
		}
		index := int(e.Value.Ifindex)
		if index == w.HostIndex {
			continue
		}
		met := own.Meeting(e.Key)
		if len(met) == 0 {
			others[index]++
			continue
		}
		_, err := w.Host.LinkByIndex(index)
		switch {
		case err == nil:
			return nil, &HostPortTakenError{HostPort: met[0], Holder: w.holder(index)}
		case !errors.Is(err, device.ErrNotFound):
			return nil, err
		}
		dead = append(dead, e)
	}
	return dead, w.shareHostPorts(others)
}

// writeHostPorts claims the endpoint's host ports: of two endpoints that want one, the second finds the first one's entry.
func (w *Work) writeHostPorts() error {
	if len(w.HostPorts) == 0 {
		return nil
	}
	l, err := w.lockHostPorts(w.ctx)
	if err != nil {
		return err
	}
	defer l.Release()
	dead, err := w.deadHostPorts()
	if err != nil {
		return err
	}
	if err := forAll(dead, func(e hostPortEntry) error { return w.Tables.HostPorts.Delete(e.Key) }); err != nil {
		return err
	}
	for _, h := range w.HostPorts { // where the map is full, one of thousands says it
		if err := w.Tables.HostPorts.Put(h.Key(), w.HostPortEntry(h)); err != nil {
			return err
		}
	}
	return nil
}

// lockHostPorts locks all host ports of the node, since that of all addresses meets each other one. No endpoint has this ID.
func (n *Node) lockHostPorts(ctx context.Context) (*Lock, error) {
	return Acquire(ctx, n.StateDir, ID{IfName: "host ports"})
}

// deleteHostPorts removes the entries of the endpoint's link, also those that no state file has.
func (w *Work) deleteHostPorts() error {
	if len(w.indexes) == 0 || w.written && len(w.HostPorts) == 0 {
		return nil
	}
	found, err := w.hostPortsOf(func(index int) bool { return slices.Contains(w.indexes, index) })
	return errors.Join(err, w.forgetHostPorts(w.ctx, found))
}

type hostPortEntry = typed.Entry[hostports.Key, hostports.Value]

// hostPortsOf returns the entries that lead to the links asked for.
func (n *Node) hostPortsOf(asked func(index int) bool) (found []hostPortEntry, err error) {
	if n.Tables.HostPorts == nil {
		return nil, nil
	}
	for e, err := range n.Tables.HostPorts.All() {
		if err != nil {
			return nil, err
		}
		if asked(int(e.Value.Ifindex)) {
			found = append(found, e)
		}
	}
	return found, nil
}

// forgetHostPorts removes entries, but not those that another endpoint has replaced meanwhile.
func (n *Node) forgetHostPorts(ctx context.Context, entries []hostPortEntry) error {
	if len(entries) == 0 {
		return nil
	}
	l, err := n.lockHostPorts(ctx)
	if err != nil {
		return err
	}
	defer l.Release()
	return forAll(entries, func(e hostPortEntry) error {
		now, err := lookUp(n.Tables.HostPorts, e.Key)
		if err != nil || now != e.Value {
			return err
		}
		return n.Tables.HostPorts.Delete(e.Key)
	})
}
