package endpoint

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// tables are the pinned maps that an endpoint stands in. A map that is not pinned is nil, and nothing stands in it.
type tables struct {
	endpoints    *endpoints.Map
	devices      *devices.Map
	destinations *destinations.Map
}

func openTables(pins bpffs.Dir) (*tables, error) {
	t := &tables{}
	err := errors.Join(
		openIfPinned(&t.endpoints, endpoints.Open, pins.Map(endpoints.Name)),
		openIfPinned(&t.devices, devices.Open, pins.Map(devices.Name)),
		openIfPinned(&t.destinations, destinations.Open, pins.Map(destinations.Name)),
	)
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

func openIfPinned[K comparable, V any](into **typed.Map[K, V], open func(string) (*typed.Map[K, V], error), path string) error {
	m, err := open(path)
	if err == nil {
		*into = m
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (t *tables) close() {
	if t.endpoints != nil {
		t.endpoints.Close()
	}
	if t.devices != nil {
		t.devices.Close()
	}
	if t.destinations != nil {
		t.destinations.Close()
	}
}

// forgetAddress removes the entries that lead to the address, unless they lead to another endpoint: the address may
// have been given on.
func (t *tables) forgetAddress(a netip.Addr, indexes []int) error {
	if t.endpoints == nil {
		return nil
	}
	key := endpoints.Key{Address: wire.AddrFrom(a)}
	v, err := t.endpoints.Get(key)
	switch {
	case errors.Is(err, typed.ErrKeyNotExist):
	case err != nil:
		return err
	case !slices.Contains(indexes, int(v.Ifindex)):
		return nil
	default:
		if err := t.endpoints.Delete(key); err != nil {
			return err
		}
	}
	return t.forgetDestination(a)
}

// forgetDestination removes the entry that a pod with an address outside the podCIDRs has of its own.
func (t *tables) forgetDestination(a netip.Addr) error {
	if t.destinations == nil {
		return nil
	}
	key := destinations.KeyFrom(netip.PrefixFrom(a, a.BitLen()))
	v, err := t.destinations.Get(key) // the longest match: another prefix's value when there is no such entry
	if errors.Is(err, typed.ErrKeyNotExist) || (err == nil && v.Kind != destinations.Local) {
		return nil
	}
	if err != nil {
		return err
	}
	return t.destinations.Delete(key)
}

func (t *tables) forgetDevice(index int) error {
	if t.devices == nil {
		return nil
	}
	return t.devices.Delete(devices.Key{Ifindex: uint32(index)})
}

// endpointIndexes returns the addresses in the endpoints map by link.
func (t *tables) endpointIndexes() (map[int][]netip.Addr, error) {
	found := map[int][]netip.Addr{}
	if t.endpoints == nil {
		return found, nil
	}
	for e, err := range t.endpoints.All() {
		if err != nil {
			return nil, err
		}
		index := int(e.Value.Ifindex)
		found[index] = append(found[index], e.Key.Address.Netip())
	}
	return found, nil
}

func (t *tables) deviceIndexes() ([]int, error) {
	if t.devices == nil {
		return nil, nil
	}
	var found []int
	for e, err := range t.devices.All() {
		if err != nil {
			return nil, err
		}
		found = append(found, int(e.Key.Ifindex))
	}
	return found, nil
}
