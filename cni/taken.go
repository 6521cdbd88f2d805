package cni

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// An address may be another pod's already: of a second list with the same range, or given by an ipam plugin that knows
// nothing of ours. Who has it keeps it.

func (a *addition) claimer() endpoint.Claimer {
	return endpoint.Claimer{StateDir: a.stateDir, Host: a.host, Endpoints: a.plane.endpoints}
}

// checkFree refuses addresses that are somebody else's than the link's of that index. That they still are free when
// they are written, AddRoute and Claim see to.
func (a *addition) checkFree(addresses []netip.Addr, index int) error {
	for _, addr := range addresses {
		if err := a.claimer().Free(addr, index); err != nil {
			return refusal(err)
		}
		v, err := a.plane.destinations.Get(destinations.KeyFrom(whole(addr)))
		if err != nil && !errors.Is(err, typed.ErrKeyNotExist) {
			return err
		}
		holders := map[destinations.Kind]string{destinations.Host: "this node itself", destinations.Node: "another node"}
		if holder, bad := holders[v.Kind]; bad {
			return refusal(&endpoint.TakenError{Address: addr, Holder: holder})
		}
	}
	return nil
}

// routeTaken says whose route stands where the pod's should.
func (a *addition) routeTaken(addr netip.Addr) error {
	r, _, err := a.host.RouteTo(whole(addr))
	if err != nil {
		return err
	}
	holder := fmt.Sprintf("a route of protocol %d that leads nowhere", r.Protocol)
	if r.Index != 0 {
		holder = fmt.Sprintf("a route (protocol %d) over %s", r.Protocol, a.claimer().Name(r.Index))
	}
	return refusal(&endpoint.TakenError{Address: addr, Holder: holder})
}

// refusal is the error for the runtime when an address is taken.
func refusal(err error) error {
	if taken, ok := errors.AsType[*endpoint.TakenError](err); ok {
		return types.NewError(codeNoAddress, taken.Error()+", which keeps it; "+
			"remove that, or see to it that no two networks of this node give the same addresses", "")
	}
	return err
}
