package agent

import (
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// forwardController owns the accepts in forward chains whose policy drops. The host's stack forwards some packets of pods: among others
// the first one to a neighbour whose Ethernet address is not known yet.
type forwardController struct {
	*node
	chains netfilter.Forward
	said   map[string]bool // of which chains the log has said that they have accepts
}

// follow looks at the forward chains, and has diagnose know of those that drop packets of pods.
func (c *forwardController) follow(s *state) error {
	found, accepted, err := c.chains.Look(time.Now(), c.forwarding(s))
	s.forwardDrops = found
	for _, chain := range accepted {
		if !c.said[chain] {
			c.said[chain] = true
			c.log.Info("forward policy drops, packets of pods accepted", "chain", chain, "pods", listOf(s.plan.Standing.Own))
		}
	}
	if err != nil {
		return fmt.Errorf("accept packets of pods in forward chains: %w", err)
	}
	return nil
}

// forwarding are the packets that this node forwards for its pods.
func (c *forwardController) forwarding(s *state) netfilter.Forwarding {
	f := netfilter.Forwarding{
		Pods: s.plan.Standing.Own, Accept: c.cfg.ForwardAccept == ForwardAcceptAuto,
		Inner: append([]string{endpoint.HostLinkPrefix + "*"}, c.cfg.Bridges...),
	}
	for _, u := range s.view.uplinks {
		f.Outer = append(f.Outer, u.Name)
	}
	if s.view.tunnel != 0 {
		f.Outer = append(f.Outer, tunnelName)
	}
	return f
}
