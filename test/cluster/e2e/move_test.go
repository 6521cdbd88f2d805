package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// The steps of tools/deploy/flannel.md: before all, for each node, on each node, and after all.
const (
	chooseNodes   = "kubectl label nodes --all pod-network=flannel"
	keepFlannel   = `kubectl -n kube-flannel patch daemonset kube-flannel-ds -p '{"spec":{"template":{"spec":{"nodeSelector":{"pod-network":"flannel"}}}}}'`
	chosen        = "nodeSelector.pod-network=ebpf-cni"
	drain         = "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data"
	hand          = "kubectl label node NODE pod-network=ebpf-cni --overwrite"
	forgetFlannel = "rm /etc/cni/net.d/10-flannel.conflist"
	uncordon      = "kubectl uncordon NODE"
	startAgain    = "kubectl -n kube-flannel rollout restart daemonset kube-flannel-ds"
	unchoose      = "kubectl label nodes --all pod-network-"
)

// onSpot are the commands that do on a node what a reboot does.
var onSpot = []string{
	"ip link delete cni0",
	"ip route flush root 10.244.0.0/16 proto boot",
	"iptables -t nat -D POSTROUTING -m comment --comment 'flanneld masq' -j FLANNEL-POSTRTG",
	"iptables -t nat -F FLANNEL-POSTRTG && iptables -t nat -X FLANNEL-POSTRTG",
	"iptables -D FORWARD -m comment --comment 'flanneld forward' -j FLANNEL-FWD",
	"iptables -F FLANNEL-FWD && iptables -X FLANNEL-FWD",
}

// A node of a cluster with flannel's backend host-gw is moved as the page says. Its pods and those of the other node talk, both
// networks at work.
func testMoveFromFlannelHostGW(t *testing.T) {
	s := site(t, cluster.Options{Nodes: 2})
	first, second := s.Nodes[0], s.Nodes[1]
	runFlannel(t, s, "host-gw")
	a, b := addPod(t, s, "a", first), addPod(t, s, "b", second)
	meet(t, s, a, b)
	divide(t, s)

	tr := startTraffic(t, pathTo("the world", a, s.World()))
	move(t, s, second, reboot)
	tr.end(t)
	b = addPod(t, s, "b2", second)
	meet(t, s, a, b)
	tr = startTraffic(t, pathTo(b.Name, a, b.Addr), pathTo(a.Name, b, a.Addr))
	restartFlannel(t, s, startAgain, first)
	tr.end(t)
}

// divide gives each of the two networks its nodes; all are flannel's at first.
func divide(t *testing.T, s *standing) {
	t.Helper()
	shell(t, s, chooseNodes)
	restartFlannel(t, s, keepFlannel, s.Nodes...)
	kubectl(t, s, "apply", "-f", chart(t, s, "chosen", append(valuesFor(t, "kubeadm"), chosen)...))
}

// endDivision deletes flannel, and installs ours on all nodes: over the chart, and once more over itself.
func endDivision(t *testing.T, s *standing) {
	t.Helper()
	kubectl(t, s, "delete", "namespace", "kube-flannel")
	shell(t, s, unchoose)
	for range 2 {
		kubectl(t, s, "apply", "-f", manifest(t, s))
		if err := s.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// manifest is a copy of the project's that the nodes see.
func manifest(t *testing.T, s *standing) (file string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "tools/deploy/ebpf-cni.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(s.Dir, "manifest.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// isInPage checks that a page of tools/deploy says what is done here.
func isInPage(t *testing.T, page string, steps ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "tools/deploy", page))
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		if !strings.Contains(string(text), step) {
			t.Errorf("%s does not say %s", page, step)
		}
	}
}

// shell runs a step as it stands in a page, on the node of the control plane.
func shell(t *testing.T, s *standing, step string) {
	t.Helper()
	script := strings.ReplaceAll(step, "kubectl ", "kubectl --kubeconfig="+s.Kubeconfig+" ")
	if out, err := s.Nodes[0].Run(within(t, stepLimit), "sh", "-ec", script); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// runFlannel installs flannel with a backend, and the plugins that a distribution has.
func runFlannel(t *testing.T, s *standing, backend string) {
	t.Helper()
	for _, plugin := range []string{"bridge", "host-local", "portmap"} {
		onNodes(t, s, "install", "-D", s.Program(plugin), "/opt/cni/bin/"+plugin)
	}
	text, err := os.ReadFile("testdata/kube-flannel.yaml")
	if err != nil {
		t.Fatal(err)
	}
	programs := filepath.Dir(s.Program("flanneld"))
	flannel := strings.NewReplacer("IMAGE", cluster.PauseImage, "PROGRAMS", programs, "BACKEND", backend).Replace(string(text))
	file := filepath.Join(s.Dir, "kube-flannel.yaml")
	if err := os.WriteFile(file, []byte(flannel), 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(t, s, "apply", "-f", file)
	flannelWorks(t, s, s.Nodes...)
	for _, node := range s.Nodes {
		waitReady(t, s, node)
	}
}

// subnetFile is what flannel's daemon tells its plugin, once a node is connected.
const subnetFile = "/run/flannel/subnet.env"

// restartFlannel takes a step that starts flannel's daemons again on the nodes that are still theirs.
func restartFlannel(t *testing.T, s *standing, step string, nodes ...*cluster.Machine) {
	t.Helper()
	for _, node := range nodes {
		if _, err := node.Run(t.Context(), "rm", subnetFile); err != nil {
			t.Fatal(err)
		}
	}
	shell(t, s, step)
	flannelWorks(t, s, nodes...)
}

// flannelWorks waits until flannel's daemons are at work, after a first start or another one: they begin with taking their
// rules away.
func flannelWorks(t *testing.T, s *standing, nodes ...*cluster.Machine) {
	t.Helper()
	kubectl(t, s, "-n", "kube-flannel", "rollout", "status", "daemonset/kube-flannel-ds", "--timeout=60s")
	for _, node := range nodes {
		err := cluster.Poll(within(t, stepLimit), "flannel works on "+node.Name, func(ctx context.Context) error {
			_, err := node.Run(ctx, "sh", "-ec", "test -s "+subnetFile+"; iptables -t nat -S FLANNEL-POSTRTG | grep MASQUERADE")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func waitReady(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), node.Name+" is ready", func(ctx context.Context) error { return s.NodeReady(ctx, node.Name) })
	if err != nil {
		t.Fatal(err)
	}
}

// move takes a node from one network to the other.
func move(t *testing.T, s *standing, node *cluster.Machine, tidy func(*testing.T, *standing, *cluster.Machine)) {
	t.Helper()
	step := func(what string) { shell(t, s, strings.ReplaceAll(what, "NODE", node.Name)) }
	step(drain + " --force") // the pods here belong to nobody
	step(hand)
	if out, err := node.Run(within(t, stepLimit), "sh", "-ec", forgetFlannel); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	tidy(t, s, node)
	err := cluster.Poll(within(t, stepLimit), "an agent is ready on "+node.Name, func(ctx context.Context) error { return agentReady(ctx, node) })
	if err != nil {
		t.Fatal(err)
	}
	waitReady(t, s, node)
	step(uncordon)
}

func reboot(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	if err := s.Reboot(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

func byHand(t *testing.T, _ *standing, node *cluster.Machine) {
	t.Helper()
	for _, command := range onSpot {
		if out, err := node.Run(within(t, stepLimit), "sh", "-ec", command); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
}

// meet has every pod ask every other, and the world, whom they see.
func meet(t *testing.T, s *standing, pods ...*cluster.Pod) {
	t.Helper()
	for _, from := range pods {
		for _, to := range pods {
			if from != to {
				sees(t, from, at(to.Addr, cluster.HTTPPort), from.Addr)
			}
		}
		sees(t, from, at(s.World(), cluster.HTTPPort), from.Node.Addr)
		// With flannel it is the bridge's address that the pod sees.
		if _, err := ask(t.Context(), from.Node, at(from.Addr, cluster.HTTPPort), "/clientip"); err != nil {
			t.Errorf("%s to its pod %s: %v", from.Node.Name, from.Name, err)
		}
	}
}

// undisturbedBetween runs traffic between two pods, both ways, and to the world, while f runs.
func undisturbedBetween(t *testing.T, s *standing, a, b *cluster.Pod, f func()) {
	t.Helper()
	tr := startTraffic(t, pathTo(b.Name, a, b.Addr), pathTo("the world", a, s.World()), pathTo(a.Name, b, a.Addr))
	f()
	tr.end(t)
}

// noFlannel checks that nothing of flannel is at work any more.
func noFlannel(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		for _, command := range []string{
			"ls /sys/class/net | grep -e cni0 -e flannel", "ip route show root 10.244.0.0/16 proto boot",
			"iptables-save | grep -i flannel", "ls /etc/cni/net.d | grep -i flannel",
		} {
			if out, _ := node.Run(t.Context(), "sh", "-c", command); out != "" {
				t.Errorf("%s: %s: %s", node.Name, command, out)
			}
		}
	}
}
