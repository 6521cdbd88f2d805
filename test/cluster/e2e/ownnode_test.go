package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// A token of an agent, which whoever takes over its node has, is good for the status of that node's Node and for nothing else. One
// that names no node, as an older API server makes them, is not refused: the agents need it.
func TestAgentPatchesItsOwnNodeOnly(t *testing.T) {
	s := running(t)
	node, other := s.Nodes[0].Name, s.Nodes[1].Name
	pod := agentPod(t, s, s.Nodes[0])
	token, err := s.Nodes[0].Run(t.Context(), "sh", "-c",
		fmt.Sprintf("cat /var/lib/kubelet/pods/%s/volumes/kubernetes.io~projected/kube-api-access-*/token", pod.UID))
	if err != nil {
		t.Fatal(err)
	}
	if err := patchesStatus(t.Context(), s, token, node); err != nil {
		t.Errorf("the Node of the token's own node: %v", err)
	}
	err = cluster.Poll(within(t, stepLimit), "another Node is refused", func(ctx context.Context) error {
		if err := patchesStatus(ctx, s, token, other); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "its own Node only, which is "+node) {
			return fmt.Errorf("error %w", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	for _, metadata := range []string{`{"labels":{"node-restriction.kubernetes.io/stolen":"yes"}}`, `{"annotations":{"stolen":"yes"}}`} {
		if err := patches(t.Context(), s, token, node, `{"metadata":`+metadata+`}`); !apierrors.IsForbidden(err) {
			t.Errorf("%s with the status: error %v, want it forbidden", metadata, err)
		}
	}
	unbound := strings.TrimSpace(kubectl(t, s, "-n", cluster.Namespace, "create", "token", "ebpf-cni"))
	for _, name := range []string{node, other} {
		if err := patchesStatus(t.Context(), s, unbound, name); err != nil {
			t.Errorf("%s, with a token that names no node: %v", name, err)
		}
	}
}

// patchesStatus has the API server judge a patch of a Node's condition, and do nothing.
func patchesStatus(ctx context.Context, s *standing, token, name string) error {
	const patch = `{"status":{"conditions":[{"type":"NetworkUnavailable","status":"True","reason":"Stolen"}]}}`
	return patches(ctx, s, token, name, patch)
}

func patches(ctx context.Context, s *standing, token, name, patch string) error {
	config, err := s.Config()
	if err != nil {
		return err
	}
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Nodes().Patch(ctx, name, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, "status")
	return err
}
