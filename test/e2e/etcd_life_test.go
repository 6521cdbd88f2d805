package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// etcdAway is for how long etcd is away: longer than a client waits before it looks for it again.
const etcdAway = 3 * time.Second

// etcdLimit is how long nodes may take to follow what an etcd says that has come back.
const etcdLimit = 15 * time.Second

// With etcd away nothing changes on nodes, also where the agent starts again, and pods come. What etcd says afterwards is in force.
func TestEtcdAway(t *testing.T) {
	t.Parallel()
	r := startRegistered(t, lab.Options{Nodes: 3}, backends["vxlan"])
	r.startOurs(t, r.Nodes[0], r.Nodes[1])
	a, b := addPod(t, r.Nodes[0], "a"), addPod(t, r.Nodes[1], "b")
	tr := startTraffic(t, a, b.Namespace)
	if err := r.etcd.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Nodes[0].StopAgent(); err != nil {
		t.Fatal(err)
	}
	if err := r.Nodes[0].StartAgent(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(etcdAway)
	another := addPod(t, r.Nodes[1], "another")
	meet(t, a.Namespace, another.Namespace)
	if err := r.etcd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Nodes[0].WaitReady(within(t, readyLimit)); err != nil {
		t.Error(err)
	}
	r.startOurs(t, r.Nodes[2])
	meet(t, a.Namespace, addPod(t, r.Nodes[2], "late").Namespace)
	tr.end(t)
}

// An agent that looks away while etcd changes and forgets the changes lists anew, and what is gone meanwhile is gone.
func TestEtcdCompactedDuringAWatch(t *testing.T) {
	t.Parallel()
	r := startRegistered(t, lab.Options{Nodes: 2}, backends["host-gw"])
	gone, came := netip.MustParsePrefix("10.5.200.0/24"), netip.MustParsePrefix("10.5.201.0/24")
	r.putLease(t, gone, "172.18.0.200")
	r.startOurs(t, r.Nodes...)
	a, b := addPod(t, r.Nodes[0], "a"), addPod(t, r.Nodes[1], "b")
	node := r.Nodes[0]
	assertLeads(t, node, gone, true)
	tr := startTraffic(t, a, b.Namespace)

	agent, err := os.FindProcess(node.AgentPID())
	if err != nil {
		t.Fatal(err)
	}
	signal(t, agent, syscall.SIGSTOP)
	if _, err := r.client.Delete(within(t, answerLimit), subnetKey(gone)); err != nil {
		t.Fatal(err)
	}
	r.putLease(t, came, "172.18.0.201")
	if err := r.etcd.Kill(); err != nil { // what it has sent already is lost with the connection
		t.Fatal(err)
	}
	if err := r.etcd.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.putLease(t, netip.MustParsePrefix("10.5.202.0/24"), "172.18.0.202")
	if err := r.etcd.Compact(within(t, answerLimit)); err != nil {
		t.Fatal(err)
	}
	signal(t, agent, syscall.SIGCONT)
	assertLeads(t, node, came, true)
	assertLeads(t, node, gone, false)
	tr.end(t)
}

func signal(t *testing.T, process *os.Process, s os.Signal) {
	t.Helper()
	if err := process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// Nodes that start at once lease different subnets, and reach each other. One whose agent was killed with a lease just made has that.
func TestAllNodesLeaseAtOnce(t *testing.T) {
	t.Parallel()
	r := startRegistered(t, lab.Options{Nodes: 6}, backends["host-gw"])
	leased := r.killAtLease(t, r.Nodes[0])
	r.startOurs(t, r.Nodes...)
	if has := subnetKey(r.Nodes[0].PodCIDR()); has != leased {
		t.Errorf("%s had leased %s, and has %s", r.Nodes[0].Name, leased, has)
	}
	had := map[netip.Prefix]string{}
	var pods []*lab.Pod
	for _, node := range r.Nodes {
		if other, twice := had[node.PodCIDR()]; twice {
			t.Fatalf("%s and %s both have %s", node.Name, other, node.PodCIDR())
		}
		had[node.PodCIDR()] = node.Name
		pods = append(pods, addPod(t, node, "p"))
	}
	for i, pod := range pods {
		meet(t, pod.Namespace, pods[(i+1)%len(pods)].Namespace)
	}
}

// killAtLease starts a node's agent, and kills it as soon as it has a lease, of which it returns the key.
func (r *registered) killAtLease(t *testing.T, node *lab.Node) string {
	t.Helper()
	changes := r.client.Watch(within(t, readyLimit), registryPrefix+"subnets/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	<-changes // it has begun
	must(t, node.StartAgent())
	leased := <-changes
	must(t, node.KillAgent())
	if len(leased.Events) != 1 {
		t.Fatalf("the agent has made the leases %v, error %v", leased.Events, leased.Err())
	}
	if _, err := os.Stat(node.SubnetFile()); err == nil {
		t.Log("it was killed too late: the subnet file is there")
	}
	return string(leased.Events[0].Kv.Key)
}

// Leases that are revoked, deleted, or that a new and empty etcd does not have, are made anew for the same subnets, and no packet is
// lost meanwhile.
func TestLeasesAreLost(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"host-gw", "vxlan"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRegistered(t, lab.Options{Nodes: 2}, backends[name])
			r.startOurs(t, r.Nodes...)
			a, b := addPod(t, r.Nodes[0], "a"), addPod(t, r.Nodes[1], "b")
			tr := startTraffic(t, a, b.Namespace)
			for _, node := range r.Nodes {
				r.lose(t, func() error {
					_, id := r.leaseOf(t, node)
					_, err := r.client.Revoke(within(t, answerLimit), id)
					return err
				}, node)
			}
			r.lose(t, func() error {
				_, err := r.client.Delete(within(t, answerLimit), registryPrefix, clientv3.WithPrefix())
				return err
			}, r.Nodes...)
			r.lose(t, func() error { return r.etcd.Empty(within(t, readyLimit)) }, r.Nodes...)
			time.Sleep(etcdAway) // until whoever lists everything because of it has done so
			tr.end(t)
		})
	}
}

// lose has nodes lose their leases, and waits until they have leased their subnets again.
func (r *registered) lose(t *testing.T, how func() error, nodes ...*lab.Node) {
	t.Helper()
	had := map[*lab.Node]clientv3.LeaseID{}
	for _, node := range nodes {
		_, had[node] = r.leaseOf(t, node)
	}
	must(t, how())
	for _, node := range nodes {
		eventually(t, etcdLimit, node.Name+" leases its subnet again", func() bool {
			_, again := r.leaseOf(t, node)
			return again != clientv3.NoLease && again != had[node]
		})
	}
}

// Of two nodes of ours with one public address the second is refused, and told who has it.
func TestOnePublicAddressTwice(t *testing.T) {
	t.Parallel()
	r := startRegistered(t, lab.Options{Nodes: 2}, backends["host-gw"])
	first, second := r.Nodes[0], r.Nodes[1]
	r.startOurs(t, first)
	if err := second.StartAgent("--public-ip=" + first.Addr().String()); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyLimit, "the second agent names the first one's node", func() bool {
		said := second.LogTail(40)
		return strings.Contains(said, first.Name) && strings.Contains(said, first.Addr().String())
	})
	if _, err := os.Stat(second.SubnetFile()); err == nil {
		t.Errorf("the second node has a subnet: %v", subnetEnv(t, second))
	}
	_, id := r.leaseOf(t, first)
	if id == clientv3.NoLease {
		t.Error("the first node has lost its lease")
	}
}

// putLease writes another node's lease of a network without tunnels.
func (r *registered) putLease(t *testing.T, subnet netip.Prefix, public string) {
	t.Helper()
	if _, err := r.client.Put(within(t, answerLimit), subnetKey(subnet), hostGatewayLease(public)); err != nil {
		t.Fatal(err)
	}
}

func hostGatewayLease(public string) string {
	return fmt.Sprintf(`{"PublicIP": %q, "PublicIPv6": null, "BackendType": "host-gw"}`, public)
}

// assertLeads: within a moment a node sends packets for a subnet to another node, or to none.
func assertLeads(t *testing.T, node *lab.Node, subnet netip.Prefix, want bool) {
	t.Helper()
	eventually(t, etcdLimit, fmt.Sprintf("%s has a way to %s: %v", node.Name, subnet, want), func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), answerLimit)
		defer cancel()
		out, err := node.Ebpfctl(ctx, "dump", "destinations")
		return err == nil && strings.Contains(string(out), subnet.String()) == want
	})
}
