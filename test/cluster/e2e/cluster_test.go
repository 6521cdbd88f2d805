package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// shared is the cluster of all tests; nil where they can't run.
var shared *cluster.Cluster

func TestMain(m *testing.M) {
	cluster.Init()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Geteuid() != 0 {
		return m.Run()
	}
	ctx := context.Background()
	started := time.Now()
	c, err := cluster.New(ctx, cluster.Options{Families: dual})
	if err != nil {
		fmt.Fprintln(os.Stderr, "make the cluster:", err)
		return 1
	}
	fmt.Printf("control plane and kubelets are up after %.1f s\n", time.Since(started).Seconds())
	shared = c
	status := m.Run()
	if err := endShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	return status
}

func endShared() error {
	if err := shared.Close(context.Background()); err != nil {
		return fmt.Errorf("end the cluster: %w", err)
	}
	if left := shared.Remains(); len(left) > 0 {
		return fmt.Errorf("the cluster left behind: %q", left)
	}
	return nil
}

// bare is the cluster, with or without a network.
func bare(t *testing.T) *cluster.Cluster {
	t.Helper()
	if shared != nil {
		return shared
	}
	if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
		t.Fatal("needs root, and REQUIRE_PRIVILEGED=1 is set")
	}
	t.Skip("needs root")
	return nil
}

// standing are pods that live through all tests: two on the first node, one on the second.
type standing struct {
	*cluster.Cluster
	client, near, far *cluster.Pod
	// behind is a Service, by its own address and by the ports of the other node and of who asks itself, of a pod on the first node.
	behind struct{ byAddr, byPorts, onLoopback target }
	// tunnel has the addresses of the nodes' tunnel devices while packets between nodes go through them; nil: they go direct.
	tunnel map[*cluster.Machine]netip.Addr
	// alike has those addresses where they are the ones that are most like pods', and a node masquerades to its own pods as them: in IPv6.
	alike map[*cluster.Machine]netip.Addr
	// readiness is what was wrong with the nodes' readiness while the network was installed.
	readiness error
	// told is the failed test that has told how things stood.
	told string
}

var makeStanding = sync.OnceValues(func() (*standing, error) {
	ctx := context.Background()
	readiness, err := installWatched(ctx, shared)
	if err != nil {
		return nil, err
	}
	if err := shared.InstallDNS(ctx); err != nil {
		return nil, err
	}
	s := &standing{Cluster: shared, readiness: readiness}
	for _, pod := range []struct {
		name string
		node int
		at   **cluster.Pod
	}{{"client", 0, &s.client}, {"near", 0, &s.near}, {"far", 1, &s.far}} {
		added, err := shared.AddPod(ctx, pod.name, shared.Nodes[pod.node], labels(pod.name))
		if err != nil {
			return nil, err
		}
		*pod.at = added
	}
	return s, s.addBehind(ctx)
})

// addBehind makes the Service that all tests have in common, and its pod.
func (s *standing) addBehind(ctx context.Context) error {
	if _, err := s.AddPod(ctx, "behind", s.Nodes[0], map[string]string{"app": "behind"}); err != nil {
		return err
	}
	client, err := s.Client()
	if err != nil {
		return err
	}
	wanted := s.wantedService("behind")
	// Kubernetes takes a node's pods out of Services when it has not heard of the node for 40 s, as where the API server was away.
	// That would be lost traffic, and none of the network's doing.
	wanted.Spec.PublishNotReadyAddresses = true
	// At once in all families that there are.
	wanted.Spec.IPFamilies, wanted.Spec.IPFamilyPolicy = nil, new(core.IPFamilyPolicyPreferDualStack)
	if _, err := client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, wanted, metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := s.findBehind(ctx); err != nil {
		return err
	}
	// kube-proxy takes a moment.
	for _, w := range everywhere(s) {
		if err := cluster.Poll(ctx, "an answer of "+w.what, func(ctx context.Context) error {
			return errors.Join(connectAnew(ctx, fresh{w.from}, w.to.tcp, "early"), sendAnew(ctx, fresh{w.from}, w.to.udp, "early"))
		}); err != nil {
			return err
		}
	}
	return nil
}

// findBehind looks where the cluster's first family has that Service.
func (s *standing) findBehind(ctx context.Context) error {
	client, err := s.Client()
	if err != nil {
		return err
	}
	made, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "behind", metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, text := range made.Spec.ClusterIPs {
		if addr, err := netip.ParseAddr(text); err == nil && cluster.FamilyOf(addr) == s.Family() {
			s.behind.byAddr, s.behind.byPorts, s.behind.onLoopback = servicePorts(addr), service{made}.byPorts(s.Nodes[1]), service{made}.onLoopback(s.Family())
			return nil
		}
	}
	return fmt.Errorf("the Service behind has %v, none of %s", made.Spec.ClusterIPs, s.Family())
}

// labels are those of a standing pod: all of them share one.
func labels(name string) map[string]string {
	return map[string]string{"app": name, "standing": "yes"}
}

// running is the cluster with the network installed and the standing pods. A test that fails tells how things stand.
func running(t *testing.T) *standing {
	t.Helper()
	bare(t)
	s, err := makeStanding()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.tell(t) })
	// What an earlier test has broken is not to be waited for in each one after it.
	if err := s.WaitReady(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	return s
}

// tell logs how things stand when a test has failed, once, before anything is undone.
func (s *standing) tell(t *testing.T) {
	t.Helper()
	if t.Failed() && s.told != t.Name() {
		s.told = t.Name()
		t.Log(diagnosis(s.Cluster))
	}
}

// diagnosis is what Kubernetes and the nodes say.
func diagnosis(c *cluster.Cluster) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var story string
	for _, question := range [][]string{
		{"get", "nodes,pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"},
		{"-n", cluster.Namespace, "logs", "-l", cluster.AgentLabel, "--prefix", "--tail=15"},
	} {
		answer, err := c.Kubectl(ctx, question...)
		story += fmt.Sprintf("%v: %v\n%s\n", question, err, answer)
	}
	for _, node := range c.Nodes {
		for _, question := range [][]string{{"status"}, {"dump", "endpoints", "drops"}} {
			answer, err := ebpfctl(ctx, c, node, question...)
			story += fmt.Sprintf("%s: ebpfctl %v: %v\n%s\n", node.Name, question, err, answer)
		}
	}
	return story
}

// ebpfctl runs this project's ebpfctl on a node.
func ebpfctl(ctx context.Context, c *cluster.Cluster, node *cluster.Machine, args ...string) (string, error) {
	return node.Run(ctx, append([]string{c.Binary("ebpfctl")}, args...)...)
}

// visitor is a pod that is gone when the test ends, wherever it stops.
func visitor(t *testing.T, s *standing, name string, node *cluster.Machine) *cluster.Pod {
	t.Helper()
	departs(t, s, name)
	pod, err := s.AddPod(t.Context(), name, node, nil)
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// departs sees to it that pods are gone when the test ends, those too that never got ready.
func departs(t *testing.T, s *standing, names ...string) {
	t.Helper()
	var pods []*cluster.Pod
	for _, name := range names {
		pods = append(pods, &cluster.Pod{Name: name})
	}
	afterwards(t, s, func(ctx context.Context) error { return s.DeletePods(ctx, pods...) })
}

// afterFailure undoes something when the test has failed, wherever it stopped.
func afterFailure(t *testing.T, s *standing, undo func(context.Context) error) {
	t.Helper()
	afterwards(t, s, func(ctx context.Context) error {
		if !t.Failed() {
			return nil
		}
		return undo(ctx)
	})
}

// afterwards undoes something when the test ends, in a time of its own.
func afterwards(t *testing.T, s *standing, undo func(context.Context) error) {
	t.Helper()
	t.Cleanup(func() {
		s.tell(t)
		ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
		defer cancel()
		if err := undo(ctx); err != nil {
			t.Error(err)
		}
	})
}

// within bounds a step of a test.
func within(t *testing.T, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}
