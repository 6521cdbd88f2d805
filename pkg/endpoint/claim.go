package endpoint

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// An address may already be another pod's: a second network configuration list has the same range, or an ipam plugin
// has allocated it that does not know our store. The pod that has the address keeps it.

// TakenError is returned for an address that is somebody else's.
type TakenError struct {
	Address netip.Addr
	// Holder describes who has it, as in "pod shop/web (...)".
	Holder string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("address %s is taken by %s", e.Address, e.Holder)
}

// CheckFree fails with a *TakenError when an address of the endpoint is somebody else's. Writing the routes and the
// entries checks again.
func (w *Work) CheckFree() error {
	for _, a := range w.Addresses {
		if err := w.free(a); err != nil {
			return err
		}
		v, err := lookUp(w.Destinations, destinations.KeyFrom(hostPrefix(a)))
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

// free returns a *TakenError when the address leads to a link that exists and is not the endpoint's.
func (w *Work) free(a netip.Addr) error {
	owner, err := w.Owner(a)
	if err != nil || owner == 0 || owner == w.HostIndex {
		return err
	}
	return &TakenError{Address: a, Holder: w.holder(owner)}
}

// Owner returns the index of the link that the address leads to, 0 if that does not exist.
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

// routeTaken is the error for a route of somebody else in the place of the pod's.
func (w *Work) routeTaken(a netip.Addr) error {
	r, _, err := w.Host.RouteTo(hostPrefix(a))
	if err != nil {
		return err
	}
	holder := fmt.Sprintf("a route (protocol %d) without an interface", r.Protocol)
	if r.Index != 0 {
		holder = fmt.Sprintf("a route (protocol %d) over %s", r.Protocol, w.holder(r.Index))
	}
	return &TakenError{Address: a, Holder: holder}
}

// holder is Holder for all endpoints of the node, whose state files it reads.
func (n *Node) holder(index int) string {
	list, _ := List(n.StateDir) // an endpoint whose file can't be read is not named
	return Holder(index, list, n.Host)
}

// Holder describes for operators whose link that is: of one of these endpoints, or unknown.
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
	return fmt.Sprintf("link %s (index %d), which is in no state file", l.Name, index)
}

// Name describes the endpoint for operators.
func (e Endpoint) Name() string {
	where := fmt.Sprintf("interface %s of container %s, link %s", e.IfName, e.ContainerID, e.HostName)
	if e.Pod == "" {
		return where
	}
	return fmt.Sprintf("pod %s (%s)", e.Pod, where)
}

// Short names the endpoint by its pod, or by its ID where the pod's name is not known.
func (e Endpoint) Short() string {
	if e.Pod == "" {
		return "endpoint " + e.ID.String()
	}
	return "pod " + e.Pod
}
