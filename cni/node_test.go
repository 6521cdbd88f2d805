package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	mapconfig "github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

func TestMissingDataplane(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	r := w.add(p, nil)
	w.ok("STATUS", nil, nil)
	for name, path := range map[string]string{
		"config":     w.pins.Map(mapconfig.Name),
		"endpoints":  w.pins.Map(endpoints.Name),
		"devices":    w.pins.Map(devices.Name),
		"program":    w.pins.Program(attach.FromPod.Program()),
		"everything": string(w.pins),
	} {
		w.must(os.RemoveAll(path))
		before := w.everything()
		w.refused(11, "ADD", w.newPod(), nil, "agent", string(w.pins))
		w.refused(50, "STATUS", nil, nil, "agent", string(w.pins))
		w.refused(11, "CHECK", p, prevResult(t, r))
		w.unchanged(before)
		if t.Failed() {
			t.Fatalf("without %s", name)
		}
		if name != "everything" {
			w.must(os.RemoveAll(string(w.pins)))
			w.pinDataplane()
		}
	}
	w.ok("DEL", p, nil)
	if _, err := w.host.LinkByName(p.id.HostLinkName()); err == nil {
		t.Error("DEL without maps left the link")
	}
}

func TestAnotherLayoutIsNotTouched(t *testing.T) {
	w := newFixture(t)
	w.setConfig(mapconfig.Value{Layout: wire.LayoutVersion + 1})
	before := w.everything()
	w.refused(11, "ADD", w.newPod(), nil, "layout 4", "layout 3")
	w.refused(50, "STATUS", nil, nil, "layout 3")
	w.unchanged(before)
	w.setConfig(mapconfig.Value{}) // no agent has got so far
	w.refused(11, "ADD", w.newPod(), nil, "layout 0")
}

func TestStatusIsHonestAboutItsConfiguration(t *testing.T) {
	w := newFixture(t)
	w.ok("STATUS", nil, nil)
	w.refused(7, "STATUS", nil, map[string]any{"ipam": map[string]any{"type": "host-local"}}, "ipam.ranges")
	w.refused(7, "STATUS", nil, map[string]any{"ipam": map[string]any{"type": "nosuch"}}, "nosuch")
	w.refused(50, "STATUS", nil, map[string]any{"stateDir": "/nowhere/at/all"}, "/nowhere/at/all")
}

func TestWaitingForTheLockEndsInError11(t *testing.T) {
	w := newFixture(t)
	w.env = []string{waitTime + "=50ms"}
	p := w.newPod()
	w.add(p, nil)
	upgrade, err := bpffs.Exclusive(context.Background(), w.stateDir, "test")
	w.must(err)
	before := w.everything()
	for _, verb := range []string{"ADD", "DEL"} {
		w.refused(11, verb, p, nil, "lock")
	}
	w.refused(11, "GC", nil, gcList(), "lock")
	w.refused(50, "STATUS", nil, nil, "lock")
	w.unchanged(before)
	upgrade.Release()

	one, err := bpffs.Shared(context.Background(), w.stateDir, "test") // another pod's
	w.must(err)
	w.refused(11, "GC", nil, gcList(), "lock")
	w.ok("DEL", p, nil)
	one.Release()
	own, err := endpoint.Acquire(context.Background(), w.stateDir, p.id)
	w.must(err)
	defer own.Release()
	w.refused(11, "ADD", p, nil, "lock endpoint")
	w.add(w.newPod(), nil) // others need not wait
}

func TestGC(t *testing.T) {
	w := newDual(t)
	kept, gone, alien := w.newPod(), w.newPod(), w.newPod()
	w.add(kept, nil)
	aliens := []string{"10.9.0.200", "fd00:9::200"}
	w.add(alien, merged(runtimeConfig(map[string]any{"ips": aliens}), map[string]any{"name": "net2"}))
	before := w.everything()
	w.add(gone, nil)
	all := w.everything()
	for _, conf := range []map[string]any{
		nil,
		{gcKey: "x"},
		{gcKey: map[string]any{}},
		{gcKey: []any{map[string]any{"containerID": "../x", "ifname": "eth0"}}},
		{gcKey: []any{map[string]any{}}},
	} {
		w.refused(7, "GC", nil, conf, gcKey)
		w.unchanged(all)
	}
	w.ok("GC", nil, gcList(kept, alien))
	w.unchanged(before)
	w.ok("GC", nil, gcList(kept)) // net2's are not in the list, and not this network's business
	w.unchanged(before)
	w.ok("GC", nil, map[string]any{gcKey: json.RawMessage("null")}) // the empty list of a runtime in Go
	if !slices.Equal(w.used(), aliens) {
		t.Errorf("in use %v, want only net2's", w.used())
	}
	w.ok("DEL", alien, map[string]any{"name": "net2"})
	if left := w.everything(); len(left) != 1 { // lo
		t.Errorf("left: %v", left)
	}
}

func TestGCKeepsEndpointsWhoseStateWasLost(t *testing.T) {
	w := newFixture(t)
	valid, complete := w.newPod(), w.newPod()
	w.add(valid, nil)
	w.add(complete, nil)
	w.must(os.RemoveAll(filepath.Join(w.stateDir, "endpoints")))
	w.must(os.RemoveAll(filepath.Join(w.stateDir, "ipam")))
	w.ok("GC", nil, gcList(valid))
	for _, p := range []*pod{valid, complete} {
		if _, err := w.host.LinkByName(p.id.HostLinkName()); err != nil {
			t.Errorf("a running pod's link: %v", err)
		}
	}
	w.ok("DEL", valid, nil)
	if _, err := w.host.LinkByName(valid.id.HostLinkName()); err == nil {
		t.Error("DEL without state left the link")
	}
}

// The state directory is gone with the boot, or was on a disk and is not.
func TestReboot(t *testing.T) {
	t.Run("state directory gone", func(t *testing.T) {
		w := newFixture(t)
		w.must(os.RemoveAll(w.stateDir))
		p := w.newPod()
		w.refused(11, "ADD", p, nil, w.stateDir)
		w.ok("DEL", p, nil)
		w.ok("GC", nil, gcList())
		if _, err := os.Stat(w.stateDir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("made it anew: %v", err)
		}
	})
	t.Run("state directory outlives the boot", func(t *testing.T) {
		w := newDual(t)
		before := w.everything()
		old, now := w.newPod(), w.newPod()
		w.add(old, nil)
		state, err := endpoint.Read(w.stateDir, old.id)
		w.must(err)
		w.destroy(old)
		w.must(os.RemoveAll(string(w.pins)))
		w.pinDataplane()
		// Indexes start anew: a pod of this boot has the old one's.
		w.must(os.RemoveAll(filepath.Join(w.stateDir, "ipam")))
		w.add(now, nil, "CNI_ARGS=IP=10.9.0.9")
		fresh, err := endpoint.Read(w.stateDir, now.id)
		w.must(err)
		state.HostIndex = fresh.HostIndex
		w.must(endpoint.Write(w.stateDir, state))
		complete := w.everything()
		w.ok("GC", nil, gcList(now))
		if slices.Contains(w.everything(), "file endpoints/"+old.id.String()+".json") {
			t.Error("the state of the boot before is still there")
		}
		for _, line := range complete {
			if line != "file endpoints/"+old.id.String()+".json" && !slices.Contains(w.everything(), line) {
				t.Errorf("the living pod lost: %s", line)
			}
		}
		w.ok("DEL", now, nil)
		w.unchanged(before)
	})
}

func TestUnreadableStateFile(t *testing.T) {
	for _, content := range []string{"", "{", `{"container_id":"other","ifname":"eth0"}`, `{"host_ifindex":-1}`} {
		w := newDual(t)
		before := w.everything()
		p := w.newPod()
		w.add(p, nil)
		file := filepath.Join(w.stateDir, "endpoints", p.id.String()+".json")
		w.must(os.WriteFile(file, []byte(content), 0o600))
		w.ok("DEL", p, nil)
		w.unchanged(before)
	}
}

// A DEL that comes late must not touch the address's next owner.
func TestLateDelSparesTheNextOwner(t *testing.T) {
	w := newDual(t)
	before := w.everything()
	first, second := w.newPod(), w.newPod()
	same := runtimeConfig(map[string]any{"ips": []string{"10.9.0.9", "fd00:9::9"}})
	w.add(first, same)
	state, err := endpoint.Read(w.stateDir, first.id)
	w.must(err)
	w.ok("DEL", first, nil)
	r := w.add(second, same)
	w.must(endpoint.Write(w.stateDir, state)) // as if the DEL had been killed before its end
	w.ok("DEL", first, nil)
	w.ok("CHECK", second, prevResult(t, r))
	w.ok("DEL", second, nil)
	w.unchanged(before)
}

// Pods that come at once share no address and leave nothing. That a hundred do so on a node with an agent is
// TestHundredPodsLeaveNothing in test/e2e.
func TestManyPodsAtOnce(t *testing.T) {
	w := newDual(t)
	before := w.everything()
	const pods = 30
	all := make([]*pod, pods)
	for i := range all {
		all[i] = w.newPod()
	}
	w.each("ADD", all)
	if used := w.used(); len(slices.Compact(used)) != len(w.families)*pods {
		t.Errorf("%d addresses for %d pods", len(used), pods)
	}
	w.each("DEL", all)
	w.unchanged(before)
}

// each calls the plugin for each of the pods, for some at once, and none may fail.
func (w *fixture) each(verb string, pods []*pod) {
	const width = 10
	conf, err := json.Marshal(w.conf)
	w.must(err)
	var wg sync.WaitGroup
	room := make(chan bool, width)
	for _, p := range pods {
		room <- true
		// The processes must start in the test's namespaces, which only its own goroutine is in.
		cmd := w.start(verb, p, conf)
		wg.Go(func() {
			if out, err := cmd(); err != nil {
				w.t.Errorf("%s: %v: %s", verb, err, out)
			}
			<-room
		})
	}
	wg.Wait()
}

// Beside one that works at the address store for as long as it likes, pods come and go at once and wait for nobody.
func TestPodsAtOnceWaitForNobody(t *testing.T) {
	w := newFixture(t)
	w.add(w.newPod(), nil) // which makes the store
	before := w.everything()
	slow, err := os.Open(filepath.Join(ipam.Dir(w.stateDir), "net1", "lock"))
	w.must(err)
	defer slow.Close()
	w.must(unix.Flock(int(slow.Fd()), unix.LOCK_SH|unix.LOCK_NB))
	w.env = []string{waitTime + "=1ns"}
	all := make([]*pod, 10)
	for i := range all {
		all[i] = w.newPod()
	}
	w.each("ADD", all)
	if used := w.used(); len(slices.Compact(used)) != 1+len(all) {
		t.Errorf("%d addresses for %d pods", len(used), 1+len(all))
	}
	w.each("DEL", all)
	w.unchanged(before)
}

func TestConcurrentAddsOfOneAttachment(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	conf, err := json.Marshal(w.conf)
	w.must(err)
	var wg sync.WaitGroup
	for range 8 {
		cmd := w.start("ADD", p, conf)
		wg.Go(func() {
			if out, err := cmd(); err != nil {
				t.Errorf("ADD: %v: %s", err, out)
			}
		})
	}
	wg.Wait()
	if used := w.used(); len(used) != 1 {
		t.Errorf("addresses in use: %v, want one", used)
	}
	w.ok("DEL", p, nil)
	if left := w.everything(); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

// BenchmarkAddDel measures the plugin's own work, without the start of a process.
func BenchmarkAddDel(b *testing.B) {
	for name, c := range map[string]struct {
		mode     string
		families []wire.Family
	}{"tcx": {"tcx", nil}, "clsact": {"clsact", nil}, "clsact, dual": {"clsact", []wire.Family{wire.IPv4, wire.IPv6}}} {
		b.Run(name, func(b *testing.B) {
			w := newFixture(b, c.families...)
			w.conf["attach"], w.conf["logLevel"] = c.mode, "error"
			conf, err := json.Marshal(w.conf)
			w.must(err)
			pl := &plugin{stdout: discard{}, stderr: discard{}, wait: lockWait}
			p := w.newPod()
			args := &skel.CmdArgs{ContainerID: "bench", Netns: p.path(), IfName: "eth0", StdinData: conf}
			var adding time.Duration
			for b.Loop() {
				start := time.Now()
				w.must(pl.funcs().Add(args))
				adding += time.Since(start)
				w.must(pl.funcs().Del(args))
			}
			b.ReportMetric(float64(adding.Microseconds())/float64(b.N), "µs/ADD")
		})
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// One that hangs in the address store keeps others out for a bounded time, and its name is in their error.
func TestWaitingForTheAddressStoreEndsInError11(t *testing.T) {
	w := newFixture(t)
	w.add(w.newPod(), nil) // which makes the store
	w.env = []string{waitTime + "=50ms"}
	before := w.everything()
	hung, err := bpffs.Shared(t.Context(), w.stateDir, "test")
	w.must(err)
	store, err := bpffs.File(t.Context(), filepath.Join(ipam.Dir(w.stateDir), "net1", "lock"))
	w.must(err)
	p := w.newPod()
	w.refused(11, "ADD", p, nil, "lock address store", fmt.Sprintf("test (pid %d) for ", os.Getpid()))
	store.Release()
	hung.Release()
	w.unchanged(before)
	w.add(p, nil)
}
