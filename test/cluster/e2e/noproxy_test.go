package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// A cluster that has never had a kube-proxy: the agents come up by the API server's own address, Services serve everybody, and netfilter
// has nothing to translate.
func testServicesWithoutKubeProxy(t *testing.T) {
	isInPage(t, "install.md", "--set settings.api-server=https://ADDRESS:6443")
	s := site(t, cluster.Options{Families: dual, KubeProxy: cluster.NoProxy})
	if err := s.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.InstallDNS(t.Context()); err != nil {
		t.Fatal(err)
	}
	inhabit(t, s)
	if err := s.addBehind(t.Context()); err != nil {
		t.Fatal(err)
	}
	serveAlone(t, s)
	ownProcessesOnly(t, s)
	st := newStage(t, s)
	runServiceTests(t, st, true)
	rolledUnderLoad(t, s)
	serveAlone(t, s)
	if isLong() {
		t.Run("Tunnel", func(t *testing.T) { servesThroughTheTunnel(t, st) })
	}
}

// servesThroughTheTunnel has the nodes go over to the tunnel while everybody asks, and everything asked once more.
func servesThroughTheTunnel(t *testing.T, s *stage) {
	t.Helper()
	undisturbedOn(t, s.standing, slices.Concat(everywhere(s.standing), overOthers(t, s.standing), byThePrograms(t, s.standing)), func() {
		if err := s.SetRoutingMode(t.Context(), "vxlan"); err != nil {
			t.Fatal(err)
		}
	})
	goBy(t, s.standing, "tunnel")
	runServiceTests(t, s, false)
}

// serveAlone waits until the programs serve pods, netfilter translates for nobody, and no node has a problem, also after agents were killed.
func serveAlone(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		err := cluster.Poll(within(t, stepLimit), "the status of "+node.Name+" says that the programs serve alone", func(ctx context.Context) error {
			out, err := ebpfctl(ctx, s.Cluster, node, "status")
			for _, line := range []string{"served by the programs\n", "netfilter  does not translate", "No problems."} {
				if err != nil || !strings.Contains(out, line) {
					return fmt.Errorf("no %q, error %w:\n%s", line, err, out)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// rolled are pods that say when they are about to end, and answer for as long as anybody may still send to them.
const rolled = `apiVersion: apps/v1
kind: Deployment
metadata: {name: rolled}
spec:
  replicas: 4
  selector: {matchLabels: {app: rolled}}
  strategy: {rollingUpdate: {maxSurge: 100%%, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: rolled}}
    spec:
      nodeSelector: %s
      terminationGracePeriodSeconds: 12
      containers:
        - name: netexec
          image: "%s"
          imagePullPolicy: Never
          args: [netexec, --http-port=%d, --udp-port=%d, --delay-shutdown=10]
          readinessProbe: {httpGet: {path: /readyz, port: %[3]d}, periodSeconds: 1, failureThreshold: 1}
`

// rolledOn are those pods, on nodes of some labels.
func rolledOn(labels string) string {
	return fmt.Sprintf(rolled, labels, cluster.AgnhostImage, cluster.HTTPPort, cluster.UDPPort)
}

// All backends of a Service are exchanged while pods and processes of both nodes and the world ask it, and both agents are killed meanwhile.
// Nobody loses anything.
func rolledUnderLoad(t *testing.T, s *standing) {
	t.Helper()
	applied(t, s, rolledOn("{}"))
	made := addService(t, s, "rolled", nil)
	to := made.byAddr(t)
	lodged(t, s, "app=rolled", nil, 4)
	before := podNames(t, s, "app=rolled")
	concurrently(clients(s), func(from client) { settled(t, from, to, before) })
	undisturbedOn(t, s, slices.Concat(everywhere(s), overOthers(t, s), byThePrograms(t, s)), func() {
		tr := newTraffic(t)
		for _, from := range clients(s) {
			w := path{"the pods that are exchanged, from " + from.name, from, to}
			if from.dialer == dialer(from.node) {
				tr.anew(t, w) // the datagrams of a node's socket end with the endpoint
			} else {
				tr.moving(t, dense, w)
			}
		}
		for _, node := range s.Nodes {
			tr.moving(t, dense, path{"the pods that are exchanged, from the world by " + node.Name, s.Fabric, made.byPorts(node)})
		}
		kubectl(t, s, "rollout", "restart", "deployment/rolled")
		killed := map[*cluster.Machine]core.ContainerStatus{}
		for _, node := range s.Nodes {
			killed[node] = agentPod(t, s, node).Status.ContainerStatuses[0]
			kill(t, node, killed[node])
		}
		kubectl(t, s, "rollout", "status", "deployment/rolled", "--timeout="+stepLimit.String())
		lodged(t, s, "app=rolled", nil, 4)
		for node, agent := range killed {
			restarted(t, s, node, agent)
		}
		tr.end(t)
	})
	after := podNames(t, s, "app=rolled")
	if slices.ContainsFunc(before, func(name string) bool { return slices.Contains(after, name) }) {
		t.Errorf("there were %v, and are %v: they have not been exchanged", before, after)
	}
	concurrently(clients(s), func(from client) { settled(t, from, to, after) })
}

// byThePrograms are paths by the Service that all tests have in common: what everywhere does not have, and what is the programs' alone.
func byThePrograms(t *testing.T, s *standing) []path {
	t.Helper()
	other := seenIn(t, s, core.IPv6Protocol)
	return []path{
		{"a Service from a node", s.Nodes[1], s.behind.byAddr}, {"a Service from a node by its loopback address", s.Nodes[1], s.behind.onLoopback},
		{"a Service from a node over IPv6", s.Nodes[1], other.behind.byAddr}, {"a Service from the world over IPv6", other.Fabric, other.behind.byPorts},
	}
}

// podNames are those of the pods of a kind, in order.
func podNames(t *testing.T, s *standing, selector string) (names []string) {
	t.Helper()
	names = strings.Fields(kubectl(t, s, "get", "pods", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}"))
	slices.Sort(names)
	return names
}
