package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// Where k3s has its containerd look.
const (
	k3sConf = "/var/lib/rancher/k3s/agent/etc/cni/net.d"
	k3sBin  = "/var/lib/rancher/k3s/data/cni"
)

// takeConditionOff is the last step of updates.md of removing the network.
const takeConditionOff = `kubectl patch node NODE --subresource=status -p '{"status":{"conditions":[{"type":"NetworkUnavailable","$patch":"delete"}]}}'`

// A cluster with k3s's directories, kube-proxy in nftables mode and VXLAN between all nodes, on nodes without a BPF file system that their cloud says
// have no network: the chart is installed with the values of install.md, cannot work, and works when what it asks for is done. It is
// given settings that make no sense, and better ones. Then all is removed as Helm does it, installed again, and removed by hand.
func testInstallAsOnK3s(t *testing.T) {
	s := site(t, cluster.Options{KubeProxy: cluster.NFTables, CNIConf: k3sConf, CNIBin: k3sBin, NoBPFFS: true})
	values := append(valuesFor(t, "k3s"), "settings.routing-mode=vxlan")
	before := footprint(t, s)
	cloudy(t, s)
	kubectl(t, s, "apply", "-f", chart(t, s, "agents", values...))
	refusesWithoutBPFFS(t, s)
	onNodes(t, s, "mount", "-t", "bpf", "bpf", "/sys/fs/bpf")
	comesUp(t, s)
	inhabit(t, s)
	goesBy(t, s, "tunnel")
	if err := s.addBehind(t.Context()); err != nil {
		t.Fatal(err)
	}
	besideNftables(t, s)
	undisturbed(t, s, func() { meetsNonsense(t, s, values) })
	leavesTraces(t, s, before)
	cleanup := chart(t, s, "cleanup", append(values, "cleanup=true")...)
	waitsForAgents(t, s, cleanup)
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	kubectl(t, s, "delete", "-f", s.Dir+"/agents.yaml")
	cleansUp(t, s, before)
	kubectl(t, s, "delete", "--cascade=foreground", "-f", cleanup)
	untouched(t, s, before)

	kubectl(t, s, "apply", "-f", s.Dir+"/agents.yaml")
	if err := s.RolledOut(t.Context(), "daemonset/"+cluster.DaemonSet); err != nil {
		t.Fatal(err)
	}
	if err := s.DeletePods(t.Context(), s.client, s.near, s.far); err != nil {
		t.Fatal(err)
	}
	inhabit(t, s)
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	sees(t, s.client, at(s.World(), cluster.HTTPPort), s.client.Node.Addr)
	reaches(t, "a Service", s.client, addService(t, s, "again", behind(s.far.Name)).byAddr(t), s.client.Addr)

	kubectl(t, s, "delete", "--cascade=foreground", "-f", s.Dir+"/agents.yaml")
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	kubectl(t, s, "apply", "-f", cleanup)
	cleansUp(t, s, before)
	isInPage(t, "updates.md", takeConditionOff)
	for _, node := range s.Nodes {
		shell(t, s, strings.ReplaceAll(takeConditionOff, "NODE", node.Name))
	}
	waitNetwork(t, s, "says nothing of a network", func(c core.NodeCondition, tainted bool) bool { return c.Type == "" && !tainted })
}

// refusesWithoutBPFFS checks what everybody is told while the agents can't work, and that nobody is told otherwise.
func refusesWithoutBPFFS(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		givesUp(t, s, "is not on a BPF file system", node)
		givesUp(t, s, "mount -t bpf", node)
		if err := s.NodeReady(t.Context(), node.Name); err == nil {
			t.Errorf("%s is ready, its agent is not", node.Name)
		}
		if out, err := node.Run(t.Context(), "find", s.Options.CNIConf, "/etc/cni", "-name", "*.conf*"); err != nil || out != "" {
			t.Errorf("%s has a list, but no agent that can work: %q, error %v", node.Name, out, err)
		}
	}
	waitNetwork(t, s, "says why it has no network", func(c core.NodeCondition, tainted bool) bool {
		return tainted && c.Status == core.ConditionTrue && c.Reason == "PodNetworkNotReady" && strings.Contains(c.Message, "is not on a BPF file system")
	})
}

// comesUp waits for the network, and that nothing keeps pods away.
func comesUp(t *testing.T, s *standing) {
	t.Helper()
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitNetwork(t, s, "says that it has a network", func(c core.NodeCondition, tainted bool) bool {
		return !tainted && c.Status == core.ConditionFalse && c.Reason == "PodNetworkReady"
	})
	for _, node := range s.Nodes {
		for _, file := range []string{s.Options.CNIConf + "/10-ebpf-cni.conflist", s.Options.CNIBin + "/ebpf-cni"} {
			if out, err := node.Run(t.Context(), "test", "-s", file); err != nil {
				t.Errorf("%s is ready without %s: %v %s", node.Name, file, err, out)
			}
		}
	}
}

// meetsNonsense gives the agents settings that can't be, and at last good ones.
func meetsNonsense(t *testing.T, s *standing, values []string) {
	t.Helper()
	const wrong = `--cluster-cidr "10.244.0.0/33"`
	kubectl(t, s, "apply", "-f", chart(t, s, "nonsense", append(values, "settings.cluster-cidr=10.244.0.0/33")...))
	node := givesUp(t, s, wrong, s.Nodes...)
	if story := kubectl(t, s, "-n", cluster.Namespace, "describe", "pod", "-l", cluster.AgentLabel); !strings.Contains(story, wrong) {
		t.Errorf("describe does not say %s of the agent of %s:\n%s", wrong, node.Name, story)
	}
	// This one runs, and can't carry pods: its podCIDR belongs to Services.
	kubectl(t, s, "apply", "-f", chart(t, s, "overlap", append(values, "settings.service-cidr=10.244.0.0/16")...))
	err := cluster.Poll(within(t, stepLimit), node.Name+" says why it has no network", func(ctx context.Context) error {
		c, tainted, err := network(ctx, s, node)
		if err == nil && (!tainted || c.Status != core.ConditionTrue || !strings.Contains(c.Message, "overlaps the service CIDR 10.244.0.0/16")) {
			err = fmt.Errorf("tainted %v, NetworkUnavailable is %s by %s: %s", tainted, c.Status, c.Reason, c.Message)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	kubectl(t, s, "apply", "-f", s.Dir+"/agents.yaml")
	comesUp(t, s)
}

// besideNftables checks that kube-proxy has no rules but those of nftables mode, and that the agents say so.
func besideNftables(t *testing.T, s *standing) {
	t.Helper()
	translateBy(within(t, stepLimit), t, s, cluster.NFTables)
	for _, node := range s.Nodes {
		out, err := ebpfctl(t.Context(), s.Cluster, node, "status")
		if err != nil || !strings.Contains(out, "translates: nftables table ip kube-proxy") {
			t.Errorf("%s does not say that it works beside kube-proxy: %v\n%s", node.Name, err, out)
		}
	}
}

// The DaemonSet of cleanup.
const cleanupSet = "ebpf-cni-cleanup"

// waitsForAgents begins the cleanup as Helm does, which makes what is new before it deletes what is not wanted any more:
// nothing is cleaned while agents run.
func waitsForAgents(t *testing.T, s *standing, manifest string) {
	t.Helper()
	kubectl(t, s, "apply", "-f", manifest)
	for _, node := range s.Nodes {
		endsSaying(t, s, "app.kubernetes.io/name="+cleanupSet, "an agent is running on --state-dir", node)
	}
}

// cleansUp waits for a cleanup, which each of the two containers runs, and checks that nothing is left.
func cleansUp(t *testing.T, s *standing, before []string) {
	t.Helper()
	if err := s.RolledOut(t.Context(), "daemonset/"+cleanupSet); err != nil {
		t.Fatal(err)
	}
	untouched(t, s, before)
}
