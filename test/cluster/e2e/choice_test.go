package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// enough is how many connections miss none of three pods that are chosen at random, but once in millions.
const enough = 40

// answering counts which pods answer a client who asks a Service again and again.
func answering(t *testing.T, from client, to target) (found map[string]int) {
	t.Helper()
	if err := answers(t, from.name, from, to); err != nil {
		t.Error(err)
		return nil
	}
	found = map[string]int{}
	for range enough {
		name, err := ask(t.Context(), from, to.tcp, "/hostname")
		if err != nil {
			t.Errorf("%s to %s: %v", from.name, to.tcp, err)
			continue
		}
		found[name]++
	}
	return found
}

// ofAll has a Service choose among all standing pods.
func ofAll(spec *core.ServiceSpec) { spec.Selector = map[string]string{"standing": "yes"} }

// settled waits until a Service has all the pods.
func settled(t *testing.T, from client, to target, want []string) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), fmt.Sprintf("%s meets %v", from.name, want), func(context.Context) error {
		if got := slices.Sorted(maps.Keys(answering(t, from, to))); !slices.Equal(got, want) {
			return fmt.Errorf("it meets %v", got)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func testChoiceOfPods(t *testing.T, s *stage) {
	to := addService(t, s.standing, "chosen", ofAll).byAddr(t)
	concurrently(clients(s.standing), func(from client) {
		settled(t, from, to, []string{"client", "far", "near"})
	})
}

func testSessionAffinity(t *testing.T, s *stage) {
	to := addService(t, s.standing, "faithful", func(spec *core.ServiceSpec) {
		ofAll(spec)
		spec.SessionAffinity = core.ServiceAffinityClientIP
	}).byAddr(t)
	concurrently(clients(s.standing), func(from client) {
		if got := answering(t, from, to); len(got) != 1 {
			t.Errorf("%s meets %v, want one pod", from.name, got)
		}
	})
}

func testInternalTrafficStaysOnItsNode(t *testing.T, s *stage) {
	local := core.ServiceInternalTrafficPolicyLocal
	to := addService(t, s.standing, "internal", func(spec *core.ServiceSpec) {
		ofAll(spec)
		spec.InternalTrafficPolicy = &local
	}).byAddr(t)
	concurrently(clients(s.standing), func(from client) {
		want := []string{"client", "near"}
		if from.node == s.far.Node {
			want = []string{"far"}
		}
		settled(t, from, to, want)
	})
}
