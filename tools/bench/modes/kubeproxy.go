package modes

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// kubeProxyPlane is this project on nodes where kube-proxy translates: its rules stand in netfilter, each packet between pods is asked
// for in the kernel's table of connections, and what leaves walks the stack. As on kubeadm's nodes upstream's plugins are there, so that the
// agent chains portmap after ours.
type kubeProxyPlane struct {
	*ebpfPlane

	// plugins is where buildPlugins has put them.
	plugins string
}

func (k kubeProxyPlane) prepare(ctx context.Context) error {
	for _, node := range k.lab.Nodes {
		if err := installPlugins(node, k.plugins); err != nil {
			return err
		}
		for _, setting := range kubeProxySysctls() {
			if err := node.WriteSysctl(setting[0], setting[1]); err != nil {
				return err
			}
		}
	}
	if err := k.setServices(ctx, 0); err != nil {
		return err
	}
	return k.lab.StartAgents(ctx, "--kube-proxy", "on")
}

// setServices writes kube-proxy's rules alone: masquerading is the programs'.
func (k kubeProxyPlane) setServices(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, node := range k.lab.Nodes {
		group.Go(func() error {
			return apply(ctx, node, iptablesRules(nil, false, n), "iptables-restore", "-w", "10")
		})
	}
	return group.Wait()
}

func (k kubeProxyPlane) count(ctx context.Context, into Counters) error {
	for _, node := range k.lab.Nodes {
		if err := countTracking(into, node); err != nil {
			return err
		}
	}
	return k.ebpfPlane.count(ctx, into)
}

// proof: between pods as without kube-proxy; what leaves goes by the stack, and is masqueraded on its way out.
func (k kubeProxyPlane) proof(path Path) proof {
	p := k.ebpfPlane.proof(path)
	if path == SNAT {
		p = proof{
			through: []string{
				client + " from_pod", carriedName("n1", wire.FromPod, traffic.Stack),
				carriedName("n1", wire.ToUplink, traffic.Stack), "n1 eth0 tx",
			},
			opened: []string{carriedName("n1", wire.ToUplink, traffic.SnatAllocated)},
			few: []string{
				carriedName("n1", wire.FromPod, traffic.Forwarded), carriedName("n1", wire.FromPod, traffic.Delivered), "n2 eth0 rx",
			},
			none: p.none,
		}
	}
	for _, node := range k.lab.Nodes {
		p.none = append(p.none, trackingFaults(nodeName(node)))
	}
	return p
}

// forget empties both tables: the programs' and netfilter's.
func (k kubeProxyPlane) forget(node *lab.Node) error {
	if err := flushTracking(node); err != nil {
		return err
	}
	return k.ebpfPlane.forget(node)
}
