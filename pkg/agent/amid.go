package agent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// amid is what netfilter's rules are judged by: where pods are, as planned for this node.
func (c Config) amid(s *state, own []netip.Prefix, to map[destinations.Key]destinations.Value) netfilter.Surroundings {
	n := netfilter.Surroundings{Families: numbersOf(s.view.used), Own: heldBy(s.view), Mark: c.Mark}
	pods := map[netip.Prefix]bool{}
	for _, p := range slices.Concat(own, c.Cluster) {
		pods[p.Masked()] = true
	}
	asTheyAre := maps.Clone(pods)
	for key, d := range to {
		if d.Kind == destinations.PodCIDR {
			pods[key.Netip()] = true
		}
		if d.Kind != destinations.World {
			asTheyAre[key.Netip()] = true
		}
	}
	for f, all := range [wire.Families]string{wire.IPv4: "0.0.0.0/0", wire.IPv6: "::/0"} {
		if !c.Masquerade[f] {
			asTheyAre[netip.MustParsePrefix(all)] = true
		}
	}
	for _, p := range c.NonMasquerade {
		asTheyAre[p.Masked()] = true
	}
	n.Pods, n.Unmasqueraded = slices.SortedFunc(maps.Keys(pods), netip.Prefix.Compare), slices.SortedFunc(maps.Keys(asTheyAre), netip.Prefix.Compare)
	n.Links = append([]string{tunnelName, endpoint.HostLinkPrefix + "*"}, c.Bridges...)
	for index := range s.uplinksFor(to) {
		if l, there := s.view.links[int(index)]; there {
			n.Links = append(n.Links, l.Name)
		}
	}
	slices.Sort(n.Links)
	return n
}

// surroundingsBefore is what an earlier agent has left of that. Where there was none, no pod is known.
func (c *modeController) surroundingsBefore() netfilter.Surroundings {
	used, own := usedBefore(c.cfg.BPFFS)
	nowhere := netfilter.Surroundings{Families: numbersOf(used)}
	if c.cfg.KubeProxy != KubeProxyAuto || len(own) == 0 || c.host == nil {
		return nowhere
	}
	m, err := destinations.Open(c.cfg.BPFFS.Map(destinations.Name))
	if err != nil {
		return nowhere
	}
	defer m.Close()
	to, err := m.Content()
	if err != nil {
		return nowhere
	}
	v, err := look(c.host, c.cfg, used, earlier{pods: &podView{}, asked: func() *bart.Lite { return &bart.Lite{} }})
	if err != nil {
		return nowhere
	}
	return c.cfg.amid(&state{view: v}, own, to)
}

// usedBefore are the families in which an earlier agent's pods have addresses, and that of IPv4, with the node's podCIDRs.
func usedBefore(dir bpffs.Dir) (plan.FamilySet, []netip.Prefix) {
	used := plan.FamilySet{wire.IPv4: true}
	m, err := config.Open(dir.Map(config.Name))
	if err != nil {
		return used, nil // there was none
	}
	defer m.Close()
	have, err := m.Get(config.Key{})
	if err != nil {
		return plan.FamilySet{true, true}, nil
	}
	for f := range wire.Families {
		used[f] = used[f] || have.PodCIDR(f).IsValid()
	}
	return used, have.PodCIDRs()
}
