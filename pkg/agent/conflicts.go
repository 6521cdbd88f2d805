package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// Two living pods may have one address, given to both by an earlier version's plugin. The one that the endpoints map
// leads to keeps it, or the older one where there is no entry. What the other lacks for it is not repaired, but reported.
// A route that stands in the place of a pod's makes nobody an owner: the pod's is written over it.

// alive says that an endpoint has its link, and that no DEL is at work on it.
func (v *view) alive(e endpoint.Endpoint) bool {
	return !e.Releasing && v.links[e.HostIndex].Name == e.HostName
}

// owner returns an *endpoint.TakenError when somebody else has an address of an endpoint, another error when that
// can't be found out now.
func (v *view) owner(w *endpoint.Work, a netip.Addr) error {
	index, err := w.Owner(a)
	if err != nil || index == w.HostIndex {
		return err
	}
	if index != 0 {
		return &endpoint.TakenError{Address: a, Holder: endpoint.Holder(index, v.endpoints, w.Host)}
	}
	for _, other := range v.endpoints {
		if v.alive(other) && slices.Contains(other.Addresses, a) && older(other, w.Endpoint) {
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
func (c *endpointController) contest(w *endpoint.Work) error {
	for _, a := range w.Addresses {
		err := w.Held[a]
		if _, taken := errors.AsType[*endpoint.TakenError](err); !taken {
			continue // it can't be found out now
		}
		// One that has ended since its state was read has lost nothing.
		if now, err := endpoint.Read(c.cfg.State, w.ID); err != nil || now.Releasing {
			return nil
		}
		return fmt.Errorf("%s: %w, which keeps it; delete one of the two pods", w.Short(), err)
	}
	return nil
}
