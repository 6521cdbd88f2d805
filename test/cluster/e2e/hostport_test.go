package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// The ports of the node behind which a pod answers.
const hostPort, hostPortUDP = 18080, 18081

// The plugin portmap, found where kubeadm's packages put it, opens the host ports that pods ask for, and closes them.
func testHostPorts(t *testing.T, s *stage) {
	node := s.Nodes[0]
	installPortmap(t, s, node)
	departs(t, s.standing, "hosted")
	pod, err := s.AddPodWith(t.Context(), "hosted", node, nil, func(spec *core.PodSpec) {
		spec.Containers[0].Ports = []core.ContainerPort{
			{ContainerPort: cluster.HTTPPort, HostPort: hostPort},
			{ContainerPort: cluster.UDPPort, HostPort: hostPortUDP, Protocol: core.ProtocolUDP},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	to := target{at(node.Addr, hostPort), at(node.Addr, hostPortUDP)}
	loopback := netip.MustParseAddr("127.0.0.1")
	visits := []visit{
		{"the pod itself by its host port", pod, to, node.Addr},
		{"its node by the loopback address", node, target{at(loopback, hostPort), at(loopback, hostPortUDP)}, node.Addr},
	}
	// It masquerades nobody else.
	for _, from := range append(clients(s.standing), outside(s.standing)) {
		visits = append(visits, visit{from.name + " by the host port", from, to, from.addr})
	}
	makeVisits(t, visits)
	if err := s.DeletePods(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	for i := range visits {
		visits[i].what += " of a pod that is gone"
	}
	mustBeVain(t, visits[1:])
}

// installPortmap gives a node the plugin for as long as the test takes, and waits until the agent chains it.
func installPortmap(t *testing.T, s *stage, node *cluster.Machine) {
	t.Helper()
	const file = "/opt/cni/bin/portmap"
	chained := func(ctx context.Context, want ...string) error {
		return cluster.Poll(ctx, fmt.Sprintf("the plugins of %s are %v", node.Name, want), func(ctx context.Context) error {
			got, err := chain(ctx, node)
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("they are %v", got)
			}
			return err
		})
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if out, err := node.Run(ctx, "rm", file); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if err := chained(ctx, "ebpf-cni"); err != nil {
			t.Error(err)
		}
	})
	if out, err := node.Run(t.Context(), "install", "-D", s.Program("portmap"), file); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := chained(within(t, stepLimit), "ebpf-cni", "portmap of portMappings"); err != nil {
		t.Fatal(err)
	}
}

// chain is what the node's list has plugged pods in: each plugin, and whether it is told of port mappings.
func chain(ctx context.Context, node *cluster.Machine) (plugins []string, err error) {
	raw, err := node.Run(ctx, "cat", "/etc/cni/net.d/10-ebpf-cni.conflist")
	if err != nil {
		return nil, err
	}
	var list struct {
		Plugins []struct {
			Type         string
			Capabilities map[string]bool
		}
	}
	if err := json.Unmarshal([]byte(raw), &list); err != nil {
		return nil, fmt.Errorf("%w: %s", err, raw)
	}
	for _, plugin := range list.Plugins {
		name := plugin.Type
		if plugin.Capabilities["portMappings"] {
			name += " of portMappings"
		}
		plugins = append(plugins, name)
	}
	return plugins, nil
}
