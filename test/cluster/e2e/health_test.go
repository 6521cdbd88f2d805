package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// What is said by a node that has a Service's only pod, of that Service, and of itself, but for times and white space.
const (
	ofService = `{"service":{"namespace":"default","name":"healthy"},"localEndpoints":1,"serviceProxyHealthy":true}`
	stays     = `"nodeEligible":true,` // which /livez leaves out
	ofNode    = `{"lastUpdated":"","currentTime":"",` + stays + `"healthy":true,"status":{"IPv4":{"lastUpdated":"","healthy":true},"IPv6":{"lastUpdated":"","healthy":true}}}`
)

var timesAndSpace = regexp.MustCompile(`\s|\d{4}-[^"]+`)

// A load balancer is told by each node whether it serves, and whether it has a pod of a Service whose clients are to be seen as they are: by the agents as by
// kube-proxy, which alone answers where it serves.
func testHealthChecks(t *testing.T, s *stage) {
	made := addService(t, s.standing, "healthy", func(spec *core.ServiceSpec) {
		behind(s.near.Name)(spec)
		spec.Type, spec.ExternalTrafficPolicy = core.ServiceTypeLoadBalancer, core.ServiceExternalTrafficPolicyLocal
	})
	port := uint16(made.Spec.HealthCheckNodePort)
	isTold(t, s.Fabric, at(s.far.Node.Addr, port), "/", http.StatusServiceUnavailable)
	isTold(t, s.Fabric, at(s.far.Node.Addr, 10256), "/healthz", http.StatusOK)
	for _, c := range []struct {
		port       uint16
		path, want string
	}{{port, "/", ofService}, {10256, "/healthz", ofNode}, {10256, "/livez", strings.Replace(ofNode, stays, "", 1)}} {
		isToldThis(t, s.Fabric, at(s.near.Node.Addr, c.port), c.path, c.want)
	}
	if mode := isTold(t, s.Nodes[0], at(loopbacks[core.IPv4Protocol], 10249), "/proxyMode", http.StatusOK); (mode != "ebpf") != s.hasProxy() {
		t.Errorf("the mode of kube-proxy is %q", mode)
	}
}

// isTold waits for an answer with a status, and returns it.
func isTold(t *testing.T, from dialer, to, path string, want int) (body string) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("%s%s answers %d", to, path, want), func(ctx context.Context) (err error) {
		body, err = fetch(ctx, from, nil, "http://"+to+path, want)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return body
}

// isToldThis waits for an answer that is this, but for times and white space: kube-proxy may have rules left of a NodePort of another
// Service, which the port was a moment ago.
func isToldThis(t *testing.T, from dialer, to, path, want string) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("%s%s answers %s", to, path, want), func(ctx context.Context) error {
		said, err := fetch(ctx, from, nil, "http://"+to+path, http.StatusOK)
		if got := timesAndSpace.ReplaceAllString(said, ""); err == nil && got != want {
			err = fmt.Errorf("it answers %s", got)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// fetch asks by HTTP, and takes no other status than the one that it wants.
func fetch(ctx context.Context, from dialer, trusts *tls.Config, url string, want int) (body string, err error) {
	client := http.Client{Transport: &http.Transport{DialContext: from.Dial, DisableKeepAlives: true, TLSClientConfig: trusts}, Timeout: answerLimit}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != want {
		err = fmt.Errorf("%s: %s", response.Status, raw)
	}
	return string(raw), err
}
