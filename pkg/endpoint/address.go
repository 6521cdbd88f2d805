package endpoint

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// HostLocal is the ipam type whose addresses package ipam stores.
const HostLocal = "host-local"

func (w *Work) haveAddresses() error {
	if w.IPAM != HostLocal {
		return nil
	}
	owned, err := w.owned(w.Network)
	for _, a := range w.Addresses {
		if !slices.Contains(owned, a) {
			w.Wrong("address %s is not the pod's in the address store", a)
		}
	}
	return err
}

// owned returns the addresses that the endpoint has in the store of a network.
func (w *Work) owned(network string) ([]netip.Addr, error) {
	s, err := ipam.Open(w.StateDir, network, ipam.Options{})
	if err != nil {
		return nil, err
	}
	return s.Owned(ipam.Owner(w.ID))
}

func (w *Work) takeAddresses() error {
	if w.Pool != nil {
		if err := w.allocate(); err != nil {
			return err
		}
	}
	if err := w.CheckFree(); err != nil {
		return err
	}
	if err := w.OnAddresses(); err != nil {
		return err
	}
	return w.freeHostPorts()
}

func (w *Work) allocate() error {
	s, err := ipam.Open(w.StateDir, w.Network, ipam.Options{Quarantine: w.Quarantine})
	if err != nil {
		return err
	}
	got, err := s.Allocate(w.ctx, ipam.Owner(w.ID), *w.Pool)
	if errors.Is(err, ipam.ErrAllocated) {
		if err := w.releaseLeftovers(err.Error()); err != nil {
			return err
		}
		got, err = s.Allocate(w.ctx, ipam.Owner(w.ID), *w.Pool)
	}
	if err != nil {
		return err
	}
	w.Addresses = got
	return nil
}

// freeAddresses keeps the addresses of a link that could not be deleted: they are still in use.
func (w *Work) freeAddresses() error {
	if w.linkStays {
		return nil
	}
	return forAll(w.networks, func(n string) error {
		s, err := ipam.Open(w.StateDir, n, ipam.Options{Quarantine: w.Quarantine})
		if err != nil {
			return err
		}
		release := s.Release
		if w.Unused {
			release = s.Discard
		}
		_, err = release(w.ctx, ipam.Owner(w.ID))
		return err
	})
}

// MinMTU is the least MTU, in bytes, of an interface with an address of that family (RFC 791, RFC 8200). The kernel takes
// IPv6 addresses off an interface with less.
func MinMTU(a netip.Addr) int {
	if a.Is6() {
		return 1280
	}
	return 68
}
