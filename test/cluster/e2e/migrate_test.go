package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// The steps of tools/deploy/migration.md: before all, for each node, and back.
const (
	serveByTurns   = "settings.services=auto,settings.api-server=https://ADDRESS:6443"
	labelNodes     = "kubectl label nodes --all kube-proxy=yes"
	goByLabel      = `kubectl -n kube-system patch daemonset kube-proxy -p '{"spec":{"template":{"spec":{"nodeSelector":{"kube-proxy":"yes"}}}}}'`
	endProxy       = "kubectl label node NODE kube-proxy-"
	waitForItsEnd  = "kubectl -n kube-system wait --for=delete pod -l k8s-app=kube-proxy --field-selector=spec.nodeName=NODE --timeout=60s"
	removeItsRules = "kubectl -n kube-system exec $(kubectl -n kube-system get pod -l app.kubernetes.io/name=ebpf-cni --field-selector=spec.nodeName=NODE -o name) -- ebpf-agent cleanup --kube-proxy"
	proxyAgain     = "kubectl label node NODE kube-proxy=yes"
	deleteProxy    = "kubectl -n kube-system delete daemonset kube-proxy"
	unlabelNodes   = "kubectl label nodes --all kube-proxy-"
)

// The nodes of a cluster are taken from kube-proxy and given back to it, one after the other, as the page says, and nobody loses a
// connection, a datagram or an attempt. With -load the programs serve for that long in between, and packets go between nodes by either way.
func TestMigration(t *testing.T) {
	s := running(t)
	isInPage(t, "migration.md", serveByTurns, labelNodes, goByLabel, endProxy, waitForItsEnd, removeItsRules, proxyAgain, deleteProxy, unlabelNodes)
	proxyByDaemonSet(t, s)
	t.Cleanup(func() {
		if err := s.Install(context.Background()); err != nil {
			t.Error(err)
		}
	})
	shell(t, s, labelNodes)
	shell(t, s, goByLabel)
	if err := s.RolledOut(t.Context(), "daemonset/kube-proxy"); err != nil {
		t.Fatal(err)
	}
	if *loadFor == 0 {
		byTurns(t, s, "auto", func(string) {})
		return
	}
	for _, mode := range []string{"direct", "vxlan"} {
		t.Run(mode, func(t *testing.T) {
			to := loaded(t, s)
			byTurns(t, s, mode, func(manifest string) { underLoad(t, s, manifest, to) })
		})
	}
}

// byTurns has the programs serve, does something that gets the agents' manifest, and has kube-proxy serve again.
func byTurns(t *testing.T, s *standing, mode string, meanwhile func(manifest string)) {
	t.Helper()
	auto := chart(t, s, "auto", strings.ReplaceAll(serveByTurns, "ADDRESS", s.Nodes[0].Addr.String()), "settings.routing-mode="+mode)
	installed(t, s, auto)
	if mode == "vxlan" {
		goBy(t, s, "tunnel")
	} else {
		goBy(t, s, "direct")
	}
	for _, node := range s.Nodes {
		servedBy(t, s, node, "left to kube-proxy's rules")
	}
	paths := slices.Concat(everywhere(s), overOthers(t, s), byEither(t, s))
	undisturbedAt(t, s, sparse, paths, func() {
		for _, node := range s.Nodes {
			for _, step := range []string{endProxy, waitForItsEnd, removeItsRules} {
				shell(t, s, strings.ReplaceAll(step, "NODE", node.Name))
			}
			servedBy(t, s, node, "served by the programs")
		}
		ours := connectionsOn(t, paths)
		meanwhile(auto)
		for _, node := range s.Nodes {
			shell(t, s, strings.ReplaceAll(proxyAgain, "NODE", node.Name))
			servedBy(t, s, node, "left to kube-proxy's rules")
		}
		translateBy(within(t, stepLimit), t, s, s.Options.KubeProxy)
		ours.end(t)
	})
}

// installed applies a manifest of the agents and waits until they have followed.
func installed(t *testing.T, s *standing, manifest string) {
	t.Helper()
	kubectl(t, s, "apply", "--server-side", "--force-conflicts", "-f", manifest)
	if err := s.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// byEither are paths by the Service that all tests have in common, as whoever serves it has them, beyond those that everywhere has.
func byEither(t *testing.T, s *standing) []path {
	t.Helper()
	other := seenIn(t, s, s.Options.Families[1])
	return []path{
		{"a Service from a node", s.Nodes[1], s.behind.byAddr}, {"a Service from its pod's node", s.Nodes[0], s.behind.byAddr},
		{"a Service over the other family", other.far, other.behind.byAddr}, {"a Service from the world over the other family", other.Fabric, other.behind.byPorts},
		{"another node's port", s.client, s.behind.byPorts},
	}
}

// connectionsOn keeps one more connection busy on each path.
func connectionsOn(t *testing.T, paths []path) *traffic {
	t.Helper()
	tr := newTraffic(t)
	for _, w := range paths {
		w.what += ", opened while the programs served"
		tr.connection(t, w)
	}
	return tr
}

// proxyByDaemonSet has pods take the place of the kube-proxies that are processes of the nodes, until the test ends.
func proxyByDaemonSet(t *testing.T, s *standing) {
	t.Helper()
	text, err := os.ReadFile("testdata/kube-proxy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	manifest := strings.NewReplacer("IMAGE", cluster.PauseImage, "PROGRAMS", filepath.Dir(s.Program("kube-proxy")), "CLUSTER", s.Dir).Replace(string(text))
	file := filepath.Join(s.Dir, "kube-proxy-daemonset.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	afterwards(t, s, func(ctx context.Context) error {
		_, err := s.Kubectl(ctx, "delete", "--ignore-not-found", "--cascade=foreground", "-f", file)
		_, err2 := s.Kubectl(ctx, "label", "nodes", "--all", "kube-proxy-")
		for _, node := range s.Nodes {
			err = errors.Join(err, s.StartKubeProxy(ctx, node))
		}
		return errors.Join(err, err2)
	})
	for _, node := range s.Nodes {
		if err := node.Stop(within(t, stepLimit), "kube-proxy", syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	kubectl(t, s, "apply", "-f", file)
	if err := s.RolledOut(t.Context(), "daemonset/kube-proxy"); err != nil {
		t.Fatal(err)
	}
}

// servedBy waits until a node's agent says who serves Services there.
func servedBy(t *testing.T, s *standing, node *cluster.Machine, who string) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("Services of %s are %s", node.Name, who), func(ctx context.Context) error {
		out, err := ebpfctl(ctx, s.Cluster, node, "status")
		if !strings.Contains(out, who) {
			err = errors.Join(err, errors.New(out))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
