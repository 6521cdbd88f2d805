package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What a network's registry has, and where.
const (
	registryPrefix = "/coreos.com/network/"
	leasedNetwork  = "10.5.0.0/16"
)

// backends are flannel's, as the registry names them.
var backends = map[string]string{
	"host-gw":       `{"Type": "host-gw"}`,
	"vxlan":         `{"Type": "vxlan"}`,
	"directrouting": `{"Type": "vxlan", "VNI": 7, "Port": 4790, "DirectRouting": true}`,
}

// registered is a cluster without Kubernetes: its nodes lease their subnets from an etcd.
type registered struct {
	*lab.Lab
	etcd   *etcd.Process
	client *clientv3.Client
}

// startRegistered builds a lab with an etcd that has a network's configuration. Nothing runs on its nodes yet.
func startRegistered(t *testing.T, opts lab.Options, backend string, expected ...drops.Reason) *registered {
	t.Helper()
	opts.Families = only4
	l := lab.ForTest(t, opts, expected...)
	server, err := l.StartEtcd(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	client, err := server.Client()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	for _, node := range l.Nodes {
		node.Etcd = server.URL()
	}
	r := &registered{Lab: l, etcd: server, client: client}
	r.configure(t, backend)
	return r
}

// configure writes the network's configuration.
func (r *registered) configure(t *testing.T, backend string) {
	t.Helper()
	config := fmt.Sprintf(`{"Network": %q, "Backend": %s}`, leasedNetwork, backend)
	if _, err := r.client.Put(within(t, readyLimit), registryPrefix+"config", config); err != nil {
		t.Fatal(err)
	}
}

// startOurs starts the agents of nodes at once, waits until they are ready, and has the lab know what they have leased.
func (r *registered) startOurs(t *testing.T, nodes ...*lab.Node) {
	t.Helper()
	for _, node := range nodes {
		if err := node.StartAgent(); err != nil {
			t.Fatal(err)
		}
	}
	ctx := within(t, readyLimit)
	for _, node := range nodes {
		if err := node.WaitReady(ctx); err != nil {
			t.Fatal(err)
		}
		takeSubnet(t, node)
	}
}

// takeSubnet has a node of the lab know the subnet that its file says it has leased.
func takeSubnet(t *testing.T, node *lab.Node) {
	t.Helper()
	gateway, err := netip.ParsePrefix(subnetEnv(t, node)["FLANNEL_SUBNET"])
	if err != nil {
		t.Fatalf("%s: %v", node.SubnetFile(), err)
	}
	node.PodCIDRs = []netip.Prefix{gateway.Masked()}
}

// subnetEnv is what the node's subnet file says.
func subnetEnv(t *testing.T, node *lab.Node) map[string]string {
	t.Helper()
	content, err := os.ReadFile(node.SubnetFile())
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for line := range strings.Lines(string(content)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		said[name] = value
	}
	return said
}

func subnetKey(subnet netip.Prefix) string {
	return registryPrefix + "subnets/" + strings.Replace(subnet.String(), "/", "-", 1)
}

// leaseOf is the key of a node's subnet in the registry, and the lease that it has in etcd.
func (r *registered) leaseOf(t *testing.T, node *lab.Node) (key string, id clientv3.LeaseID) {
	t.Helper()
	key = subnetKey(node.PodCIDR())
	got, err := r.client.Get(within(t, answerLimit), key)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Kvs) == 0 {
		return key, clientv3.NoLease
	}
	return key, clientv3.LeaseID(got.Kvs[0].Lease)
}

// flannelNode is a node on which flannel's own daemon runs, with a container as the plugin bridge would make it.
type flannelNode struct {
	*lab.Node
	daemon *lab.Program
	// pod is behind the node's bridge.
	pod *lab.Namespace
}

// startFlannel starts flannel's daemon on a node, and makes a container.
func (r *registered) startFlannel(t *testing.T, node *lab.Node) *flannelNode {
	t.Helper()
	f := &flannelNode{Node: node, daemon: r.startFlanneld(t, node)}
	f.addPod(t)
	return f
}

// startFlanneld starts flannel's daemon on a node, and has the lab know what it has leased.
func (r *registered) startFlanneld(t *testing.T, node *lab.Node) *lab.Program {
	t.Helper()
	daemon, err := node.StartProgram("flanneld", flannelProgram(t, "flanneld-etcd"),
		"-etcd-endpoints="+r.etcd.URL(), "-etcd-prefix="+strings.TrimSuffix(registryPrefix, "/"), "-subnet-file="+node.SubnetFile())
	must(t, err)
	eventually(t, readyLimit, "flanneld writes "+node.SubnetFile(), func() bool {
		_, err := os.Stat(node.SubnetFile())
		return err == nil
	})
	if t.Failed() {
		t.FailNow()
	}
	takeSubnet(t, node)
	return daemon
}

// addPod makes the bridge with the first address of the node's subnet, and a container with the next.
func (f *flannelNode) addPod(t *testing.T) {
	t.Helper()
	said := subnetEnv(t, f.Node)
	var mtu int
	if _, err := fmt.Sscan(said["FLANNEL_MTU"], &mtu); err != nil {
		t.Fatalf("%s: FLANNEL_MTU=%s", f.SubnetFile(), said["FLANNEL_MTU"])
	}
	must(t, f.AddBridge("cni0", mtu, netip.MustParsePrefix(said["FLANNEL_SUBNET"])))
	pod, err := f.AddContainer("cni0", "flannel", 2)
	must(t, err)
	f.pod = pod
}
