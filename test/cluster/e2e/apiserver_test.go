package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const staticPod = `apiVersion: v1
kind: Pod
metadata: {name: static, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - {name: netexec, image: "%s", imagePullPolicy: Never, args: [netexec, --http-port=%d, --udp-port=%d]}
`

// away is how long the API server is.
const away = time.Minute

// Without the API server kubelets still start and end static pods, and those need a network. An agent that starts in that
// time goes by what it finds.
func testAPIServerAway(t *testing.T) {
	s := running(t)
	agent := agentPod(t, s, s.Nodes[1]).Status.ContainerStatuses[0]
	afterFailure(t, s, s.RestartClients)
	undisturbed(t, s, func() {
		if err := s.Nodes[0].Stop(within(t, stepLimit), "kube-apiserver", syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		back := time.After(away)
		defer func() {
			<-back
			if err := s.StartAPIServer(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}()
		staticPodsPass(t, s)
		kill(t, s.Nodes[1], agent)
		for range 3 {
			staticPodsPass(t, s)
			time.Sleep(away / 5)
		}
	})
	if err := s.RestartClients(t.Context()); err != nil {
		t.Fatal(err)
	}
	restarted(t, s, s.Nodes[1], agent)
	if err := s.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
	for _, node := range s.Nodes {
		passes(t, s, node)
	}
}

// staticPodsPass has a static pod come to every node, talk to all others, and go.
func staticPodsPass(t *testing.T, s *standing) {
	t.Helper()
	before := map[*cluster.Machine][]netip.Addr{}
	text := fmt.Sprintf(staticPod, cluster.AgnhostImage, cluster.HTTPPort, cluster.UDPPort)
	for _, node := range s.Nodes {
		before[node] = endpoints(t, s, node)
		manifest := filepath.Join(node.Manifests(), "static.yaml")
		if err := os.WriteFile(manifest, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(manifest) })
	}
	for _, node := range s.Nodes {
		static := &cluster.Pod{Name: "static", Node: node, Addr: appears(t, s, node, before[node])}
		err := cluster.Poll(within(t, stepLimit), "the static pod answers", func(ctx context.Context) error {
			_, err := ask(ctx, s.client, at(static.Addr, cluster.HTTPPort), "/hostname")
			return err
		})
		if err != nil {
			t.Error(err)
			continue
		}
		for _, to := range []*cluster.Pod{s.near, s.far} {
			sees(t, static, at(to.Addr, cluster.HTTPPort), static.Addr)
			sees(t, to, at(static.Addr, cluster.HTTPPort), to.Addr)
		}
		sees(t, static, at(s.World(), cluster.HTTPPort), node.Addr)
	}
	for _, node := range s.Nodes {
		if err := os.Remove(filepath.Join(node.Manifests(), "static.yaml")); err != nil {
			t.Error(err)
		}
	}
	for _, node := range s.Nodes {
		err := cluster.Poll(within(t, stepLimit), "the static pod is gone", func(context.Context) error {
			if now := endpoints(t, s, node); !slices.Equal(now, before[node]) {
				return fmt.Errorf("endpoints %v, before %v", now, before[node])
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// appears waits for an endpoint of the first family that was not there before.
func appears(t *testing.T, s *standing, node *cluster.Machine, before []netip.Addr) (addr netip.Addr) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "another endpoint is on "+node.Name, func(context.Context) error {
		for _, addr = range endpoints(t, s, node) {
			if cluster.FamilyOf(addr) == s.Family() && !slices.Contains(before, addr) {
				return nil
			}
		}
		return errors.New("there is none")
	})
	if err != nil {
		t.Fatal(err)
	}
	return addr
}
