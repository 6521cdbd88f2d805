package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func TestNodesAreReadyWithTheirAgents(t *testing.T) {
	if s := running(t); s.readiness != nil {
		t.Error(s.readiness)
	}
}

// installWatched installs the network and looks meanwhile at what makes the nodes ready.
func installWatched(ctx context.Context, c *cluster.Cluster) (readiness, err error) {
	var findings []error
	for _, node := range c.Nodes {
		if err := c.NodeReady(ctx, node.Name); err == nil {
			findings = append(findings, fmt.Errorf("%s was ready without a network", node.Name))
		}
	}
	started := time.Now()
	var group errgroup.Group
	group.Go(func() error { return c.Install(ctx) })
	watched, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for _, node := range c.Nodes {
		err := cluster.Poll(watched, node.Name+" is ready", func(ctx context.Context) error {
			return c.NodeReady(ctx, node.Name)
		})
		if err != nil {
			findings = append(findings, err)
			continue
		}
		fmt.Printf("%s is ready %.1f s after the manifest was applied\n", node.Name, time.Since(started).Seconds())
		// Ready once, an agent stays so: the question may come later than the kubelet's.
		if err := agentReady(ctx, node); err != nil {
			findings = append(findings, fmt.Errorf("%s is ready, its agent is not: %w", node.Name, err))
		}
	}
	return errors.Join(findings...), group.Wait()
}

// agentReady asks a node's agent.
func agentReady(ctx context.Context, node *cluster.Machine) error {
	_, err := fetch(ctx, node, nil, "http://127.0.0.1:9965/readyz", http.StatusOK)
	return err
}
