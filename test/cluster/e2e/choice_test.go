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
	err := cluster.Poll(within(t, stepLimit), from.name+" gets answers of "+to.tcp, func(ctx context.Context) error {
		_, err := ask(ctx, from, to.tcp, "/hostname")
		return err
	})
	if err != nil {
		t.Fatal(err)
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

func TestChoiceOfPods(t *testing.T) {
	s := running(t)
	to := addService(t, s, "all", ofAll)
	for _, from := range clients(s) {
		settled(t, from, to.byAddr(t), []string{"client", "far", "near"})
	}
}

func TestSessionAffinity(t *testing.T) {
	s := running(t)
	to := addService(t, s, "all", func(spec *core.ServiceSpec) {
		ofAll(spec)
		spec.SessionAffinity = core.ServiceAffinityClientIP
	})
	for _, from := range clients(s) {
		if got := answering(t, from, to.byAddr(t)); len(got) != 1 {
			t.Errorf("%s meets %v, want one pod", from.name, got)
		}
	}
}

func TestInternalTrafficStaysOnItsNode(t *testing.T) {
	s := running(t)
	local := core.ServiceInternalTrafficPolicyLocal
	to := addService(t, s, "all", func(spec *core.ServiceSpec) {
		ofAll(spec)
		spec.InternalTrafficPolicy = &local
	})
	all := clients(s)
	for _, from := range []client{all[0], all[2]} {
		settled(t, from, to.byAddr(t), []string{"client", "near"})
	}
	for _, from := range []client{all[1], all[3]} {
		settled(t, from, to.byAddr(t), []string{"far"})
	}
}
