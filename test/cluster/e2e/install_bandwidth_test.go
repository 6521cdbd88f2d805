package e2e

import (
	"context"
	"errors"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// What a pod asks for and does not get is in the log of the runtime, which runs the plugin.
func TestBandwidthIsNotSilentlyIgnored(t *testing.T) {
	s := running(t)
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	const told, limit = "bandwidth limit ignored", "kubernetes.io/ingress-bandwidth"
	node := s.Nodes[1]
	if log := node.LogTail("containerd", 10000); strings.Contains(log, told) {
		t.Fatalf("it is told before anybody asks:\n%s", log)
	}
	grace := int64(0)
	pod := &core.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "slow", Annotations: map[string]string{limit: "1M"}},
		Spec: core.PodSpec{
			NodeName: node.Name, TerminationGracePeriodSeconds: &grace,
			Containers: []core.Container{{Name: "pause", Image: cluster.PauseImage, ImagePullPolicy: core.PullNever}},
		},
	}
	departs(t, s, pod.Name)
	if _, err := client.CoreV1().Pods(metav1.NamespaceDefault).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReadyPod(t.Context(), pod.Name); err != nil {
		t.Error(err)
	}
	err = cluster.Poll(within(t, stepLimit), "the log tells it", func(context.Context) error {
		if !strings.Contains(node.LogTail("containerd", 1000), told) {
			return errors.New("it does not")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
