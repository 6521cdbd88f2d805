package agent

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// A namespace's share of host ports, and the node's, are problems before a pod is refused.
func TestHostPortShares(t *testing.T) {
	t.Parallel()
	type count struct {
		pod string
		n   int
	}
	const room = 1000
	for name, tt := range map[string]struct {
		counts []count
		about  []string
	}{
		"few":                      {counts: []count{{"shop/web", 10}, {"other/web", 10}}},
		"below":                    {counts: []count{{"shop/web", 200}, {"shop/more", 199}}},
		"nearly all of a share":    {counts: []count{{"shop/web", 200}, {"shop/more", 200}}, about: []string{"shop"}},
		"more than a share":        {counts: []count{{"shop/web", 600}}, about: []string{"shop"}},
		"a share beside others":    {counts: []count{{"shop/web", 240}, {"other/web", 400}}, about: []string{"other", "shop"}},
		"nobody's":                 {counts: []count{{"", 400}, {"other/web", 10}}},
		"the node's":               {counts: []count{{"", 800}}, about: []string{""}},
		"a small one, of the rest": {counts: []count{{"", 790}, {"shop/web", 85}}, about: []string{"", "shop"}},
	} {
		s := state{view: &view{}, hostPorts: hostPorts{entries: map[hostports.Key]hostports.Value{}, room: room}}
		for i, c := range tt.counts {
			s.view.endpoints = append(s.view.endpoints, endpoint.Endpoint{HostIndex: i + 1, Pod: c.pod})
			for port := range c.n {
				k := hostports.KeyFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), uint16(port+1), 6)
				s.hostPorts.entries[k] = hostports.Value{Ifindex: uint32(i + 1)}
			}
		}
		var about []string
		for _, p := range (circumstances{state: &s}).hostPortShares() {
			about = append(about, p.About)
		}
		slices.Sort(about)
		if diff := cmp.Diff(tt.about, about); diff != "" {
			t.Errorf("%s: problems (-want +got):\n%s", name, diff)
		}
	}
}
