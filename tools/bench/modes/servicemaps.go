package modes

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// ServicesOf is an error unless the maps of a node have these Services, with all of their endpoints, and no others.
func ServicesOf(node *lab.Node, all []Service) error {
	if err := compareServices(node, all); err != nil {
		return fmt.Errorf("the maps of %s: %w", node.Name, err)
	}
	return nil
}

func compareServices(node *lab.Node, all []Service) error {
	dir := bpffs.Dir(node.BPFFS())
	frontends, err := content[services.Key, services.Value](dir, services.Name)
	if err != nil {
		return err
	}
	// The node's own addresses, on which NodePorts answer, are there as well.
	maps.DeleteFunc(frontends, func(_ services.Key, v services.Value) bool { return v.Flags&services.Node != 0 })
	want := len(all) // each has an entry of its address
	for _, s := range all {
		for _, p := range s.Ports {
			want++
			if p.NodePort != 0 {
				want++
			}
		}
	}
	if len(frontends) != want {
		return fmt.Errorf("%d frontends and addresses of Services, want %d", len(frontends), want)
	}
	sets, err1 := values[services.SetKey, services.Set](dir, services.SetsName)
	slots, err2 := values[backends.SlotKey, backends.Slot](dir, backends.SlotsName)
	known, err3 := values[backends.Key, backends.Value](dir, backends.Name)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	for _, s := range all {
		for _, p := range s.Ports {
			block := sets[frontends[s.key(p)].Set].Block
			var got []netip.AddrPort
			for _, slot := range slots[block.First():][:block.Cluster()] {
				if b := known[slot.Backend]; b.Flags&backends.Serving != 0 {
					got = append(got, netip.AddrPortFrom(b.Address.Netip(), b.Port.Host()))
				}
			}
			if want := s.backends(p); !slices.Equal(slices.SortedFunc(slices.Values(got), netip.AddrPort.Compare), want) {
				return fmt.Errorf("%s, %s leads to %v, want %v", s.Name, p.Title(), got, want)
			}
		}
	}
	return nil
}

// key is that of a port's frontend.
func (s Service) key(p ServicePort) services.Key {
	return services.Key{Address: wire.AddrFrom(s.IP), Port: wire.PortFrom(p.Port), Proto: map[string]wire.Protocol{"tcp": wire.TCP, "udp": wire.UDP}[p.Protocol]}
}

// backends are where a port's endpoints listen, sorted.
func (s Service) backends(p ServicePort) (all []netip.AddrPort) {
	for _, e := range s.Endpoints {
		all = append(all, netip.AddrPortFrom(e.Addr, p.Target))
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return all
}

// content is all that a hash has.
func content[K comparable, V any](dir bpffs.Dir, name string) (map[K]V, error) {
	m, err := typed.Open[K, V](dir.Map(name))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.Content()
}

// values are all of an array's.
func values[K comparable, V any](dir bpffs.Dir, name string) ([]V, error) {
	m, err := typed.Open[K, V](dir.Map(name))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.Values(int(m.MaxEntries()))
}
