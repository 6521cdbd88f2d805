package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// As by kube-proxy, a load balancer is told by each node whether it serves, and whether it has a pod of a Service whose clients are to be seen as they are.
func testHealthChecks(t *testing.T, s *stage) {
	made := addService(t, s.standing, "healthy", func(spec *core.ServiceSpec) {
		behind(s.near.Name)(spec)
		spec.Type, spec.ExternalTrafficPolicy = core.ServiceTypeLoadBalancer, core.ServiceExternalTrafficPolicyLocal
	})
	for _, node := range s.Nodes {
		want := http.StatusServiceUnavailable
		if node == s.near.Node {
			want = http.StatusOK
		}
		isTold(t, s.Fabric, at(node.Addr, uint16(made.Spec.HealthCheckNodePort)), "/", want)
		isTold(t, s.Fabric, at(node.Addr, 10256), "/healthz", http.StatusOK)
	}
	if got := isTold(t, s.Nodes[0], at(loopbacks[core.IPv4Protocol], 10249), "/proxyMode", http.StatusOK); got != "ebpf" {
		t.Errorf("the mode of kube-proxy is %q", got)
	}
}

// isTold waits for an answer with a status, and returns it.
func isTold(t *testing.T, from dialer, to, path string, want int) (body string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: from.Dial, DisableKeepAlives: true}}
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("%s%s answers %d", to, path, want), func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to+path, http.NoBody)
		if err != nil {
			return err
		}
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		if body = string(raw); err == nil && response.StatusCode != want {
			err = fmt.Errorf("%s: %s", response.Status, body)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return body
}
