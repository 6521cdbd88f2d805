package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const (
	// lockLimit is how long work on all pods at once may wait for that on each.
	lockLimit = 2 * time.Second
	// churnLimit is far beyond what a restart, a change of mode or a GC takes on a busy machine.
	churnLimit = time.Minute
)

// churners is how many pods come and go side by side. A few leave no moment in which none is under way.
func churners() int {
	if priv.Long() {
		return 16
	}
	return 6
}

// churn has pods come and go side by side, without a pause, until it is ended.
type churn struct {
	end     func()
	rounds  atomic.Int64
	longest atomic.Int64 // ADD, in nanoseconds
}

func startChurn(t *testing.T, node *lab.Node) *churn {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c := &churn{}
	var loops sync.WaitGroup
	for i := range churners() {
		pod, err := node.NewPod(fmt.Sprintf("churn%d", i), lab.PodOptions{})
		if err != nil {
			t.Fatal(err)
		}
		loops.Go(func() {
			for ctx.Err() == nil {
				c.round(t, pod)
			}
		})
	}
	c.end = sync.OnceFunc(func() {
		cancel()
		loops.Wait()
	})
	t.Cleanup(c.end)
	return c
}

// round is one pod that comes and goes, which must not fail whatever else goes on.
func (c *churn) round(t *testing.T, pod *lab.Pod) {
	started := time.Now()
	if err := pod.Add(context.Background()); err != nil {
		t.Error(err)
	}
	if took := int64(time.Since(started)); took > c.longest.Load() {
		c.longest.Store(took)
	}
	if err := pod.Del(context.Background()); err != nil {
		t.Error(err)
	}
	c.rounds.Add(1)
}

var waited = regexp.MustCompile(`msg="no work on a pod is under way".* waited=(\S+)`)

// waits are how long agent and GC have waited for pods, as they say.
func waits(t *testing.T, node *lab.Node) (all []time.Duration) {
	t.Helper()
	for _, path := range []string{node.AgentLog(), node.PluginLog()} {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, found := range waited.FindAllSubmatch(text, -1) {
			d, err := time.ParseDuration(string(found[1]))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, d)
		}
	}
	return all
}

// Pods that come and go without end keep nobody waiting who works on all pods at once: an agent that starts, a change of
// the mode, a GC.
func TestLifeChurn(t *testing.T) {
	t.Parallel()
	rounds := 1
	if priv.Long() {
		rounds = 10
	}
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	before := len(waits(t, node))
	c := startChurn(t, node)
	steps := map[string]func(){
		"1 restart": func() { startAfterKill(t, node) },
		"2 change of mode": func() {
			applyRules(t, node, masqueradeRule(firstFamily(l)), "nft", "-f")
			eventually(t, churnLimit, "the agent works beside netfilter", func() bool { return isBesideMasquerading(t, node) })
		},
		"3 GC": func() {
			if err := node.GC(t.Context(), node.Pods()...); err != nil {
				t.Error(err)
			}
		},
	}
	for range rounds {
		for _, name := range slices.Sorted(maps.Keys(steps)) {
			started := time.Now()
			steps[name]()
			t.Logf("%s: %v in all", name, time.Since(started).Round(time.Millisecond))
		}
		if _, err := node.Exec(t.Context(), "nft", "flush", "ruleset"); err != nil {
			t.Fatal(err)
		}
	}
	c.end()
	all := waits(t, node)
	if want := before + rounds*len(steps); len(all) < want {
		t.Errorf("the logs tell of %d waits, want %d or more", len(all), want)
	}
	t.Logf("waits: %v; %d pods came and went meanwhile, the slowest ADD took %v", all, c.rounds.Load(), time.Duration(c.longest.Load()))
	if longest := slices.Max(all); longest > priv.Patience(lockLimit) {
		t.Errorf("somebody has waited for %v", longest)
	}
}

// A plugin that hangs keeps the programs from being replaced, and nothing else: routes to new Nodes are not late.
func TestLifeHungPlugin(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2})
	node, specs := l.Nodes[0], l.NodeSpecs()
	far := specs[1].PodCIDRs[0].String()
	family := [wire.Families]string{wire.IPv4: "inet", wire.IPv6: "inet6"}[wire.FamilyOf(specs[1].PodCIDRs[0].Addr())]
	hasRoute := func() bool {
		out, err := node.Exec(t.Context(), "ip", "-family", family, "route", "show", far)
		return err == nil && strings.Contains(string(out), far)
	}
	hung, err := bpffs.Shared(t.Context(), node.StateDir(), "test")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Release()
	applyRules(t, node, masqueradeRule(firstFamily(l)), "nft", "-f")
	eventually(t, switchLimit, "the change of mode waits", func() bool {
		wanted, err := bpffs.Held(node.StateDir() + "/gate")
		return err == nil && wanted
	})
	for _, list := range [][]lab.NodeSpec{specs[:1], specs} {
		if err := l.WriteNodes(list...); err != nil {
			t.Fatal(err)
		}
		want := len(list) == len(specs)
		eventually(t, lockLimit, fmt.Sprintf("the route to the other node is there: %v", want), func() bool { return hasRoute() == want })
	}
	if isBesideMasquerading(t, node) {
		t.Error("the programs were replaced while a plugin was at work")
	}
	hung.Release()
	eventually(t, switchLimit, "the agent works beside netfilter", func() bool { return isBesideMasquerading(t, node) })
}
