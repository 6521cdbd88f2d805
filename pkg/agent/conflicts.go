package agent

import (
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// Two living pods may have one address, which a plugin of before gave to both. The
// one that the endpoints map leads to keeps it, or the older one where there is no
// entry. What the other lacks for it is not repaired, but told. A route that stands
// in the place of a pod's makes nobody a holder: the pod's is written over it.

func (r *reconciler) claimer() endpoint.Claimer {
	return endpoint.Claimer{StateDir: r.cfg.State, Host: r.host, Endpoints: r.dp.Maps.Endpoints}
}

// claim writes the entry of an address that no other link that is there has.
func (r *reconciler) claim(a netip.Addr, v endpoints.Value) error {
	return r.claimer().Claim(atOnce(), a, v)
}

// holding is who else has an address of an endpoint; empty: nobody. With an error
// it can't be told now.
type holding struct {
	who string
	err error
}

// holders looks at every address of an endpoint.
func (r *reconciler) holders(e endpoint.Endpoint) map[netip.Addr]holding {
	found := make(map[netip.Addr]holding, len(e.Addresses))
	for _, a := range e.Addresses {
		who, err := r.holder(e, a)
		found[a] = holding{who, err}
	}
	return found
}

func (r *reconciler) holder(e endpoint.Endpoint, a netip.Addr) (string, error) {
	v, err := r.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
	if err == nil && int(v.Ifindex) == e.HostIndex {
		return "", nil
	}
	index, err := r.claimer().Other(a, e.HostIndex)
	if err != nil {
		return "", err
	}
	if index != 0 {
		return r.nameOf(index), nil
	}
	for _, other := range r.view.claims[a] {
		if other.ID != e.ID && older(other, e) {
			return other.Name(), nil
		}
	}
	return "", nil
}

// nameOf says in words whose link that is, without reading the state files again.
func (r *reconciler) nameOf(index int) string {
	if e, ok := r.view.owners[index]; ok {
		return e.Name()
	}
	if l, ok := r.view.links[index]; ok {
		return fmt.Sprintf("link %s (index %d), of which no state file knows", l.Name, index)
	}
	return fmt.Sprintf("link %d", index)
}

func older(a, b endpoint.Endpoint) bool {
	if c := a.Created.Compare(b.Created); c != 0 {
		return c < 0
	}
	return a.ID.String() < b.ID.String()
}

// contest says which address of an endpoint somebody else has; nil: none.
func (r *reconciler) contest(e endpoint.Endpoint, held map[netip.Addr]holding) error {
	for _, a := range e.Addresses {
		who := held[a].who
		if held[a].err != nil || who == "" { // after an error it can't be told now
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
