package e2e

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/test/etcd"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const registryConfig = "/coreos.com/network/config"

// startRegistry starts an etcd with this configuration, and the nodes' agents, which lease subnets there, all at once.
func startRegistry(t *testing.T, l *lab.Lab, config string) *etcd.Process {
	t.Helper()
	server, err := l.StartEtcd(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	inRegistry(t, server, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.Put(ctx, registryConfig, config)
		return err
	})
	for _, node := range l.Nodes {
		node.Etcd = server.URL()
	}
	startAgents(t, l)
	return server
}

// A registry that loses leases, goes away and comes back empty takes nothing away from pods, and the nodes lease the same subnets anew.
func TestRegistry(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{`{"Type": "host-gw"}`, `{"Type": "vxlan"}`} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := lab.ForTest(t, lab.Options{})
			server := startRegistry(t, l, `{"Network": "10.5.0.0/16", "Backend": `+backend+`}`)
			subnets := map[string]bool{}
			for _, node := range l.Nodes {
				subnets[subnetOf(t, node)] = true
			}
			if len(subnets) != len(l.Nodes) {
				t.Fatalf("%d nodes have the subnets %v", len(l.Nodes), subnets)
			}
			a, b := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")
			tr := startTraffic(t, a, b.Namespace, l.Nodes[1].Namespace, l.Outside)
			leases := func() (keys []string) {
				inRegistry(t, server, func(ctx context.Context, c *clientv3.Client) error {
					answer, err := c.Get(ctx, "/coreos.com/network/subnets/", clientv3.WithPrefix())
					for _, kv := range answer.Kvs {
						keys = append(keys, string(kv.Key))
					}
					return err
				})
				return keys
			}
			before := strings.Join(leases(), " ")
			same := func() bool { return strings.Join(leases(), " ") == before }
			inRegistry(t, server, func(ctx context.Context, c *clientv3.Client) error {
				_, err := c.Delete(ctx, "/coreos.com/network/subnets/", clientv3.WithPrefix())
				return err
			})
			eventually(t, 10*time.Second, "the same subnets are leased after all leases were deleted", same)
			if err := server.Kill(); err != nil {
				t.Fatal(err)
			}
			// An agent that starts goes on with what it had.
			if err := errors.Join(l.Nodes[0].KillAgent(), l.Nodes[0].StartAgent()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
			if err := server.Empty(t.Context()); err != nil {
				t.Fatal(err)
			}
			eventually(t, 15*time.Second, "the same subnets are leased in an empty etcd", same)
			if err := l.Nodes[0].WaitReady(within(t, readyLimit)); err != nil {
				t.Error(err)
			}
			tr.end(t)
		})
	}
}

// subnetOf is the subnet in a node's subnet file.
func subnetOf(t *testing.T, node *lab.Node) string {
	t.Helper()
	content, err := os.ReadFile(node.SubnetFile())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		if subnet, ok := strings.CutPrefix(strings.TrimSpace(line), "FLANNEL_SUBNET="); ok {
			if _, err := netip.ParsePrefix(subnet); err != nil {
				t.Fatal(err)
			}
			return subnet
		}
	}
	t.Fatalf("no subnet in %s", content)
	return ""
}

// inRegistry asks the registry something.
func inRegistry(t *testing.T, server *etcd.Process, ask func(context.Context, *clientv3.Client) error) {
	t.Helper()
	c, err := server.Client()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ask(within(t, 10*time.Second), c); err != nil {
		t.Fatal(err)
	}
}
