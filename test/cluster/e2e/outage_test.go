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

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func TestNodeRebooted(t *testing.T) {
	s := running(t)
	node := s.Nodes[1]
	tr := startTraffic(t, s.client, nearAndWorld(s))
	if err := s.Reboot(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	// Until the node's kubelet reports, the API tells of the pods as they were.
	err := cluster.Poll(within(t, stepLimit), "pod far is back", func(ctx context.Context) error {
		if _, err := node.Running(ctx, "kubelet"); err != nil {
			return err
		}
		far, err := s.ReadyPod(ctx, s.far.Name)
		if err != nil {
			return err
		}
		_, err = ask(ctx, s.client, at(far.Addr, cluster.HTTPPort), "/hostname")
		if err == nil {
			s.far = far
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
	tr.end(t)
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	sees(t, s.far, at(s.near.Addr, cluster.HTTPPort), s.far.Addr)
	err = cluster.Poll(within(t, stepLimit), "only living pods have addresses", func(ctx context.Context) error {
		want, err := s.podsOn(ctx, node)
		if got := endpoints(t, s, node); err != nil || !slices.Equal(got, want) {
			return fmt.Errorf("endpoints %v, pods have %v, error %w", got, want, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

const staticPod = `apiVersion: v1
kind: Pod
metadata: {name: static, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - {name: netexec, image: "%s", imagePullPolicy: Never, args: [netexec, --http-port=%d, --udp-port=%d]}
`

// Without the API server kubelets still start and end static pods, and those need a network.
func TestAPIServerAway(t *testing.T) {
	s := running(t)
	node := s.Nodes[1]
	before := endpoints(t, s, node)
	manifest := filepath.Join(node.Manifests(), "static.yaml")
	undisturbed(t, s, func() {
		if err := s.Nodes[0].Stop(within(t, stepLimit), "kube-apiserver", syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := s.StartAPIServer(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}()
		text := fmt.Sprintf(staticPod, cluster.AgnhostImage, cluster.HTTPPort, cluster.UDPPort)
		if err := os.WriteFile(manifest, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(manifest)
		static := &cluster.Pod{Name: "static", Node: node, Addr: appears(t, s, node, before)}
		err := cluster.Poll(within(t, stepLimit), "the static pod answers", func(ctx context.Context) error {
			_, err := ask(ctx, s.client, at(static.Addr, cluster.HTTPPort), "/hostname")
			return err
		})
		if err != nil {
			t.Error(err)
		} else {
			sees(t, static, at(s.near.Addr, cluster.HTTPPort), static.Addr)
		}
		if err := os.Remove(manifest); err != nil {
			t.Error(err)
		}
		err = cluster.Poll(within(t, stepLimit), "the static pod is gone", func(context.Context) error {
			if now := endpoints(t, s, node); !slices.Equal(now, before) {
				return fmt.Errorf("endpoints %v, before %v", now, before)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	if err := s.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}

// appears waits for an endpoint that was not there before.
func appears(t *testing.T, s *standing, node *cluster.Machine, before []netip.Addr) (addr netip.Addr) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "another endpoint is on "+node.Name, func(context.Context) error {
		for _, addr = range endpoints(t, s, node) {
			if !slices.Contains(before, addr) {
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
