package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// root is the checkout.
const root = "../../.."

// site makes a cluster of a test's own, without a network.
func site(t *testing.T, options cluster.Options) *standing {
	t.Helper()
	bare(t)
	c, err := cluster.New(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if left := c.Remains(); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(diagnosis(c))
		}
	})
	return &standing{Cluster: c}
}

// inhabit adds the pods that talk: two on the first node, one on the last.
func inhabit(t *testing.T, s *standing) {
	t.Helper()
	first, last := s.Nodes[0], s.Nodes[len(s.Nodes)-1]
	type inhabitant struct {
		name string
		node *cluster.Machine
		at   **cluster.Pod
	}
	concurrently([]inhabitant{{"client", first, &s.client}, {"near", first, &s.near}, {"far", last, &s.far}}, func(i inhabitant) {
		pod, err := s.AddPod(t.Context(), i.name, i.node, labels(i.name))
		if err != nil {
			t.Error(err)
		}
		*i.at = pod
	})
	if t.Failed() {
		t.FailNow()
	}
}

func addPod(t *testing.T, s *standing, name string, node *cluster.Machine) *cluster.Pod {
	t.Helper()
	pod, err := s.AddPod(t.Context(), name, node, labels(name))
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

// valuesFor are the values that the table of install.md has for a kind of cluster, as Helm takes them. The network's addresses are
// those of the test's clusters, whatever they are there.
func valuesFor(t *testing.T, kind string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "tools/deploy/install.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, row, found := strings.Cut(string(text), "\n| "+kind)
	row, _, _ = strings.Cut(row, "\n")
	cells := strings.Split(row, "|")
	if !found || len(cells) != 4 {
		t.Fatalf("install.md's table has no row with three columns for %s: %q", kind, row)
	}
	own := map[string]string{"cluster-cidr": "settings.cluster-cidr=10.244.0.0/16", "service-cidr": "settings.service-cidr=10.96.0.0/16"}
	var values []string
	for one := range strings.SplitSeq(cells[2], ";") {
		name, value, _ := strings.Cut(strings.ReplaceAll(one, "`", ""), ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if set, is := own[name]; is {
			values = append(values, set)
		} else if strings.HasPrefix(name, "host.") {
			values = append(values, name+"="+value)
		}
	}
	return values
}

// chart is a file of what the chart makes of values.
func chart(t *testing.T, s *standing, name string, values ...string) (file string) {
	t.Helper()
	file, err := s.Chart(t.Context(), name, values...)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func kubectl(t *testing.T, s *standing, args ...string) string {
	t.Helper()
	out, err := s.Kubectl(within(t, stepLimit), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// onNodes runs a command on every node.
func onNodes(t *testing.T, s *standing, argv ...string) {
	t.Helper()
	for _, node := range s.Nodes {
		if out, err := node.Run(within(t, stepLimit), argv...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
}

// network is the Node's condition NetworkUnavailable, and whether the taint for it is there.
func network(ctx context.Context, s *standing, node *cluster.Machine) (condition core.NodeCondition, tainted bool, err error) {
	client, err := s.Client()
	if err != nil {
		return condition, false, err
	}
	object, err := client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return condition, false, err
	}
	for _, c := range object.Status.Conditions {
		if c.Type == core.NodeNetworkUnavailable {
			condition = c
		}
	}
	for _, taint := range object.Spec.Taints {
		tainted = tainted || taint.Key == core.TaintNodeNetworkUnavailable
	}
	return condition, tainted, nil
}

// cloudy has the nodes begin as a cloud's do: without a network, by word of the cloud.
func cloudy(t *testing.T, s *standing) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	patch := `{"status":{"conditions":[{"type":"NetworkUnavailable","status":"True","reason":"NoRouteCreated","message":"a cloud says so"}]}}`
	for _, node := range s.Nodes {
		_, err := client.CoreV1().Nodes().Patch(t.Context(), node.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
		if err != nil {
			t.Fatal(err)
		}
	}
	waitNetwork(t, s, "is tainted", func(c core.NodeCondition, tainted bool) bool { return tainted })
}

// waitNetwork waits until the condition and the taint of every node are as they are to be.
func waitNetwork(t *testing.T, s *standing, what string, want func(c core.NodeCondition, tainted bool) bool) {
	t.Helper()
	for _, node := range s.Nodes {
		err := cluster.Poll(within(t, stepLimit), node.Name+" "+what, func(ctx context.Context) error {
			c, tainted, err := network(ctx, s, node)
			if err == nil && !want(c, tainted) {
				err = fmt.Errorf("tainted %v, NetworkUnavailable is %s by %s: %s", tainted, c.Status, c.Reason, c.Message)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// givesUp waits until an agent on one of the nodes has given up with a phrase among its last words, and returns where.
func givesUp(t *testing.T, s *standing, phrase string, nodes ...*cluster.Machine) *cluster.Machine {
	t.Helper()
	return endsSaying(t, s, cluster.AgentLabel, phrase, nodes...)
}

// endsSaying is givesUp for pods of any label.
func endsSaying(t *testing.T, s *standing, label, phrase string, nodes ...*cluster.Machine) (node *cluster.Machine) {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, stepLimit), "a pod of "+label+" gives up with "+phrase, func(ctx context.Context) error {
		pods, err := client.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: label})
		if err != nil {
			return err
		}
		var heard []string
		for i := range pods.Items {
			node = s.Node(pods.Items[i].Spec.NodeName)
			for _, message := range lastWords(&pods.Items[i]) {
				heard = append(heard, message)
				if slices.Contains(nodes, node) && strings.Contains(message, phrase) {
					return nil
				}
			}
		}
		return fmt.Errorf("they say %q", heard)
	})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// lastWords are what the ended containers of a pod have left to be told.
func lastWords(pod *core.Pod) (all []string) {
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		for _, state := range []*core.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
			if state != nil {
				all = append(all, state.Message)
			}
		}
	}
	return all
}
