package agent

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// Two living pods may have one address: a plugin of before gave it to both, or
// somebody wrote a route to it. The one that the endpoints map leads to keeps it,
// or the older one where there is no entry. What the other lacks for it is not
// repaired, but told.

func (r *reconciler) claimer() endpoint.Claimer {
	return endpoint.Claimer{StateDir: r.cfg.State, Host: r.host, Endpoints: r.dp.Maps.Endpoints}
}

// claim writes the entry of an address that no other link that is there has.
func (r *reconciler) claim(a netip.Addr, v endpoints.Value) error {
	return r.claimer().Claim(atOnce(), a, v)
}

// holder says who else has an address of an endpoint; empty: nobody.
func (r *reconciler) holder(e endpoint.Endpoint, a netip.Addr) (string, error) {
	v, err := r.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
	if err == nil && int(v.Ifindex) == e.HostIndex {
		return "", nil
	}
	err = r.claimer().Free(a, e.HostIndex)
	if taken, ok := errors.AsType[*endpoint.TakenError](err); ok {
		return taken.Holder, nil
	}
	if err != nil {
		return "", err
	}
	for _, other := range r.view.claims[a] {
		if other.ID != e.ID && older(other, e) {
			return other.Name(), nil
		}
	}
	return "", nil
}

func older(a, b endpoint.Endpoint) bool {
	if c := a.Created.Compare(b.Created); c != 0 {
		return c < 0
	}
	return a.ID.String() < b.ID.String()
}

// routeHolder says whose route stands where the host's way to a pod should; empty:
// nobody's. Another pod's is in its place: that one does not have the address.
func (r *reconciler) routeHolder(e endpoint.Endpoint, a netip.Addr) string {
	for _, have := range r.view.podRoutes[netip.PrefixFrom(a, a.BitLen())] {
		name := r.view.links[have.Index].Name
		switch {
		case have.Index == e.HostIndex, endpoint.IsHostLinkName(name):
		case name != "":
			return fmt.Sprintf("a route over link %s", name)
		case have.Protocol != device.Protocol:
			return fmt.Sprintf("a route of protocol %d", have.Protocol)
		}
	}
	return ""
}

// contest says which address of an endpoint somebody else has; nil: none.
func (r *reconciler) contest(e endpoint.Endpoint) error {
	for _, a := range e.Addresses {
		who, err := r.holder(e, a)
		if err != nil {
			continue // it can't be told now
		}
		if who == "" {
			who = r.routeHolder(e, a)
		}
		if who == "" {
			continue
		}
		// One that has ended since its state was read has lost nothing.
		if now, err := endpoint.Read(r.cfg.State, e.ID); err != nil || now.Releasing {
			return nil
		}
		return fmt.Errorf("%w, which keeps it; end one of the two", &endpoint.TakenError{Address: a, Holder: who})
	}
	return nil
}

// tellConflicts tells of endpoints whose address somebody else has: in the log
// once, in the metrics for as long as it lasts. ebpfctl finds them in the maps.
func (r *reconciler) tellConflicts(found map[endpoint.ID]error) {
	about := func(id endpoint.ID) string { return "address of " + aboutEndpoint(id) }
	for id := range r.contested {
		if found[id] == nil {
			r.settled(about(id))
		}
	}
	for id, err := range found {
		r.complain(about(id), err)
	}
	r.contested = found
	r.status.setConflicts(len(found))
}
