package observe

import (
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// hostPorts counts the host ports of this node's pods, and looks at whether they lead to them.
func (s *survey) hostPorts() error {
	entries, err := load[hostports.Key, hostports.Value](s.Dir, hostports.Name)
	if missing(err) {
		return nil // an older agent does without it
	}
	if s.Node.HostPorts = len(entries); len(entries) == 0 || err != nil {
		return err
	}
	if !s.services {
		s.problem("the programs serve no host ports, and pods of this node have %d: a running agent starts anew for the first one; its log says why it has not", len(entries))
	}
	pods := make(map[wire.Addr]uint32, len(s.endpoints))
	for _, e := range s.endpoints {
		pods[e.Key.Address] = e.Value.Ifindex
	}
	slices.SortFunc(entries, func(a, b typed.Entry[hostports.Key, hostports.Value]) int { return a.Key.Compare(b.Key) })
	for _, e := range entries {
		if pods[e.Value.PodAddress] != e.Value.Ifindex {
			s.problem("host port %v is of pod %s, which is gone: nobody answers there; a running agent removes it", e.Key, s.called(e.Value.Ifindex, e.Value.PodAddress.String()))
		}
	}
	return nil
}
