package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// Two living pods may have one address, which a plugin of before gave to both. The
// one that the endpoints map leads to keeps it, or the older one where there is no
// entry. What the other lacks for it is not repaired, but told. A route that stands
// in the place of a pod's makes nobody a holder: the pod's is written over it.

// holder returns an *endpoint.TakenError when somebody else has an address of an endpoint, another error when that
// can't be told now.
func (r *reconciler) holder(w *endpoint.Work, a netip.Addr) error {
	owner, err := w.Owner(a)
	if err != nil || owner == w.HostIndex {
		return err
	}
	if owner != 0 {
		return &endpoint.TakenError{Address: a, Holder: endpoint.Holder(owner, r.view.endpoints, r.host)}
	}
	for _, other := range r.view.endpoints {
		alive := !other.Releasing && r.view.links[other.HostIndex].Name == other.HostName
		if alive && slices.Contains(other.Addresses, a) && older(other, w.Endpoint) {
			return &endpoint.TakenError{Address: a, Holder: other.Name()}
		}
	}
	return nil
}

// older says that a came first; of itself nobody is older.
func older(a, b endpoint.Endpoint) bool {
	if c := a.Created.Compare(b.Created); c != 0 {
		return c < 0
	}
	return a.ID.String() < b.ID.String()
}

// contest says which address of an endpoint somebody else has; nil: none.
func (r *reconciler) contest(w *endpoint.Work) error {
	for _, a := range w.Addresses {
		err := w.Held[a]
		if _, taken := errors.AsType[*endpoint.TakenError](err); !taken {
			continue // it can't be told now
		}
		// One that has ended since its state was read has lost nothing.
		if now, err := endpoint.Read(r.cfg.State, w.ID); err != nil || now.Releasing {
			return nil
		}
		return fmt.Errorf("%w, which keeps it; end one of the two", err)
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
