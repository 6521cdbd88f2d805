package endpoint

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func entryKey(a netip.Addr) endpoints.Key { return endpoints.Key{Address: wire.AddrFrom(a)} }

// Entry is the value of the endpoint's addresses in the endpoints map.
func (e Endpoint) Entry() endpoints.Value {
	return endpoints.Value{Ifindex: uint32(e.HostIndex), PodMAC: e.PodMAC, HostMAC: e.HostMAC}
}

func (w *Work) haveEntries() error {
	return w.each(func(a netip.Addr) error {
		have, err := lookUp(w.Endpoints, entryKey(a))
		if want := w.Entry(); have != want {
			w.Wrong("endpoints entry of %s is %+v instead of %+v", a, have, want)
		}
		return err
	})
}

func (w *Work) writeEntries() error { return w.each(w.claim) }

// claim makes the address lead to the endpoint's link. It fails with a *TakenError when the address leads to another
// link that exists.
func (w *Work) claim(a netip.Addr) error {
	// A lock per address (no endpoint has this ID): of two endpoints that find an entry of a dead link only one may
	// replace it.
	l, err := Acquire(w.ctx, w.StateDir, ID{IfName: a.String()})
	if err != nil {
		return err
	}
	defer l.Release()
	if err := w.Endpoints.Insert(entryKey(a), w.Entry()); !errors.Is(err, typed.ErrKeyExist) {
		return err
	}
	if err := w.free(a); err != nil {
		return err
	}
	return w.Endpoints.Put(entryKey(a), w.Entry())
}

// forgetEntries removes host ports first, so that none leads to an address that is nobody's.
func (w *Work) forgetEntries() error {
	ports := w.deleteHostPorts()
	return errors.Join(ports, forAll(w.Addresses, func(a netip.Addr) error { return w.forgetAddress(a, w.indexes) }))
}

// forgetAddress removes the address's entries from both maps, unless they lead to a link other than these: the address
// may belong to another pod by now.
func (n *Node) forgetAddress(a netip.Addr, indexes []int) error {
	if n.Endpoints == nil {
		return nil
	}
	v, err := lookUp(n.Endpoints, entryKey(a))
	if err != nil || v.Ifindex != 0 && !slices.Contains(indexes, int(v.Ifindex)) {
		return err
	}
	if err := n.Endpoints.Delete(entryKey(a)); err != nil {
		return err
	}
	key := destinations.KeyFrom(hostPrefix(a))
	d, err := lookUp(n.Destinations, key) // the longest match
	if err != nil || d.Kind != destinations.Local {
		return err
	}
	return n.Destinations.Delete(key)
}

// outside calls do for every address outside the node's podCIDRs, which another ipam plugin can allocate.
func (w *Work) outside(do func(netip.Addr) error) error {
	return w.each(func(a netip.Addr) error {
		if slices.ContainsFunc(w.Config.PodCIDRs(), func(p netip.Prefix) bool { return p.Contains(a) }) {
			return nil
		}
		return do(a)
	})
}

// destination is the destinations entry of an address. The agent's plan may have more in it than the kind.
func (w *Work) destination(a netip.Addr) (key destinations.Key, want destinations.Value, planned bool) {
	key = destinations.KeyFrom(hostPrefix(a))
	if want, planned = w.Planned[key]; !planned {
		want.Kind = destinations.Local
	}
	return key, want, planned
}

func (w *Work) haveDestinations() error {
	return w.outside(func(a netip.Addr) error {
		key, want, planned := w.destination(a)
		have, err := lookUp(w.Destinations, key) // the longest match: the value of a shorter prefix if there is no entry
		if planned && !destinations.Same(have, want) || have.Kind != want.Kind {
			w.Wrong("destinations entry of %s is %+v instead of %+v", a, have, want)
		}
		return err
	})
}

func (w *Work) writeDestinations() error {
	return w.outside(func(a netip.Addr) error {
		key, want, _ := w.destination(a)
		return w.Destinations.Put(key, want)
	})
}
