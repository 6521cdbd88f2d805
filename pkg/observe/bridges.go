package observe

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
)

// Bridge is one whose containers are treated as pods, with their subnets.
type Bridge struct {
	Ifindex   uint32         `json:"ifindex"`
	Interface string         `json:"interface"`
	Subnets   []netip.Prefix `json:"subnets"`
}

// bridges reads what is behind bridges. They have entries as devices, and are no pods.
func (s *survey) bridges() error {
	entries, err := load[bridges.Key, bridges.Value](s.Dir, bridges.Name)
	if missing(err) {
		return nil // an older agent does without it
	}
	slices.SortFunc(entries, func(a, b typed.Entry[bridges.Key, bridges.Value]) int {
		return cmp.Or(cmp.Compare(a.Value.Ifindex, b.Value.Ifindex), a.Key.Prefix.Compare(b.Key.Prefix))
	})
	for _, e := range entries {
		index := e.Value.Ifindex
		if index == 0 {
			continue // an address of the host's
		}
		if n := len(s.Bridges); n == 0 || s.Bridges[n-1].Ifindex != index {
			s.Bridges = append(s.Bridges, Bridge{Ifindex: index, Interface: s.interfaces[index]})
		}
		b := &s.Bridges[len(s.Bridges)-1]
		b.Subnets = append(b.Subnets, e.Key.Netip())
	}
	s.Node.Pods -= len(s.Bridges)
	return err
}
