package main

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

func TestBacklogDrops(t *testing.T) {
	if n, err := backlogDrops("22bc0177 0000000a 00000005\n09d03c20 00000001 00000000\n"); n != 11 || err != nil {
		t.Errorf("%d, %v; want 11", n, err)
	}
	for _, table := range []string{"22bc0177\n", "22bc0177 x 0\n"} {
		if n, err := backlogDrops(table); err == nil {
			t.Errorf("%q was read as %d", table, n)
		}
	}
}

// stand builds networks for a test.
func stand(t *testing.T, p profile, names ...string) *machine {
	t.Helper()
	priv.Require(t)
	m, err := newMachine(t.Context(), plan{profile: p, modes: names}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// A table that has not as many flows as the sample says is no sample.
func TestLiveFlowsAreCounted(t *testing.T) {
	m := stand(t, profile{duration: 50 * time.Millisecond}, modes.EBPF)
	network := m.networks[modes.EBPF]
	if err := network.Forget(); err != nil {
		t.Fatal(err)
	}
	if err := holds(network, 100); err == nil || !strings.Contains(err.Error(), "has 0 flows, want 100 to 150") {
		t.Errorf("an empty table: %v", err)
	}
	target, err := m.target(network, result.Egress)
	if err != nil {
		t.Fatal(err)
	}
	held, err := load.HoldFlows(t.Context(), target, 200)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := holds(network, 200); err != nil {
		t.Error(err)
	}
	if err := holds(network, 100); err == nil || !strings.Contains(err.Error(), "want 100 to 150") {
		t.Errorf("too many flows: %v", err)
	}
}
