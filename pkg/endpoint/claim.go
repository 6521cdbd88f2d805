package endpoint

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// An address may be another pod's already: of a second list with the same range, or given by an ipam plugin that knows
// nothing of ours. Who has it keeps it.

// TakenError is returned for an address that is somebody else's.
type TakenError struct {
	Address netip.Addr
	// Holder says whose it is, as in "pod shop/web (...)".
	Holder string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("address %s is taken by %s", e.Address, e.Holder)
}

// CheckFree fails with a *TakenError when an address of the endpoint is somebody else's. That they still are free when
// they are written, the routes and the entries see to.
func (w *Work) CheckFree() error {
	for _, a := range w.Addresses {
		if err := w.free(a); err != nil {
			return err
		}
		v, err := lookUp(w.Destinations, destinations.KeyFrom(whole(a)))
		if err != nil {
			return err
		}
		holders := map[destinations.Kind]string{destinations.Host: "this node itself", destinations.Node: "another node"}
		if holder, bad := holders[v.Kind]; bad {
			return &TakenError{Address: a, Holder: holder}
		}
	}
	return nil
}

// free returns nil when the address leads to nothing that exists but the endpoint's link, else a *TakenError.
func (w *Work) free(a netip.Addr) error {
	owner, err := w.Owner(a)
	if err != nil || owner == 0 || owner == w.HostIndex {
		return err
	}
	return &TakenError{Address: a, Holder: w.holder(owner)}
}

// Owner is the index of the link that the address leads to; 0: it leads to none that exists.
func (w *Work) Owner(a netip.Addr) (int, error) {
	v, err := lookUp(w.Endpoints, entryKey(a))
	if err != nil || v.Ifindex == 0 || int(v.Ifindex) == w.HostIndex {
		return int(v.Ifindex), err
	}
	l, err := w.Host.LinkByIndex(int(v.Ifindex))
	if errors.Is(err, device.ErrNotFound) {
		return 0, nil
	}
	return l.Index, err
}

// routeTaken says whose route stands where the pod's should.
func (w *Work) routeTaken(a netip.Addr) error {
	r, _, err := w.Host.RouteTo(whole(a))
	if err != nil {
		return err
	}
	holder := fmt.Sprintf("a route of protocol %d that leads nowhere", r.Protocol)
	if r.Index != 0 {
		holder = fmt.Sprintf("a route (protocol %d) over %s", r.Protocol, w.holder(r.Index))
	}
	return &TakenError{Address: a, Holder: holder}
}

// holder reads every state file.
func (n *Node) holder(index int) string {
	list, _ := List(n.StateDir) // those that can't be read can't be named
	return Holder(index, list, n.Host)
}

// Holder says in words whose link that is, one of these endpoints' or nobody's.
func Holder(index int, all []Endpoint, host *device.Handle) string {
	for _, e := range all {
		if e.HostIndex == index {
			return e.Name()
		}
	}
	l, err := host.LinkByIndex(index)
	if err != nil {
		return fmt.Sprintf("link %d", index)
	}
	return fmt.Sprintf("link %s (index %d), of which no state file knows", l.Name, index)
}

// Name is the endpoint in words.
func (e Endpoint) Name() string {
	where := fmt.Sprintf("interface %s of container %s, link %s", e.IfName, e.ContainerID, e.HostName)
	if e.Pod == "" {
		return where
	}
	return fmt.Sprintf("pod %s (%s)", e.Pod, where)
}
