package agent

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// breakEntry takes an endpoint's entry away and returns whether it is there again.
func (l *loop) breakEntry(t *testing.T, e endpoint.Endpoint) (repaired func() bool) {
	t.Helper()
	key := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}
	if err := l.dp.Maps.Endpoints.Delete(key); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		have, err := l.dp.Maps.Endpoints.Get(key)
		return err == nil && have == e.Entry()
	}
}

// A pod that somebody is at work on is no fault of the node.
func TestBusyEndpointIsForTheNextPass(t *testing.T) {
	l, e := withPod(t)
	for what, acquire := range map[string]func() (release func(), err error){
		"endpoint": func() (func(), error) {
			lock, err := endpoint.Acquire(t.Context(), l.cfg.State, e.ID)
			return lock.Release, err
		},
		"node": func() (func(), error) {
			lock, err := bpffs.Exclusive(t.Context(), l.cfg.State, "test")
			return lock.Release, err
		},
	} {
		repaired := l.breakEntry(t, e)
		release, err := acquire()
		if err != nil {
			t.Fatal(err)
		}
		if again := l.pass(t.Context()); again > retry {
			t.Errorf("%s's lock held: the next pass is after %v", what, again)
		}
		l.assertReady(t)
		if repaired() {
			t.Errorf("%s's lock held: repaired nevertheless", what)
		}
		release()
		l.pass(t.Context())
		l.assertReady(t)
		if !repaired() {
			t.Errorf("%s's lock given back: not repaired", what)
		}
	}
}

// Neither a pass nor a change of the mode waits for a lock: a new Node's route would wait with them.
func TestLoopWaitsForNoLock(t *testing.T) {
	l, e := withPod(t)
	lost := orphan(t, l)
	l.pass(t.Context())
	l.endpoints.orphans.first[lost.ID] = time.Now().Add(-releaseDelay)
	l.breakEntry(t, e)
	hung, err := bpffs.Shared(t.Context(), l.cfg.State, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Release()
	upgrade := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := bpffs.Exclusive(ctx, l.cfg.State, "test")
		upgrade <- err
	}()
	for shut := false; !shut; {
		if shut, err = bpffs.Held(filepath.Join(l.cfg.State, "gate")); err != nil {
			t.Fatal(err)
		}
	}
	l.cfg.KubeProxy = KubeProxyOn
	third := n2()
	third.Name, third.PodCIDRs, third.InternalIPs = "n3", []string{"10.244.3.0/24"}, []string{"172.18.0.13"}
	took := time.Minute
	for tries := 0; tries < 3 && took > 100*time.Millisecond; tries++ { // a busy machine may take its time
		started := time.Now()
		l.mode.follow(time.Now())
		l.accept(list(n1(), n2(), third))
		if again := l.pass(t.Context()); again > retry {
			t.Errorf("what could not be done is tried again after %v", again)
		}
		took = time.Since(started)
	}
	if took > 100*time.Millisecond {
		t.Errorf("the pass took %v", took)
	}
	if !l.mode.changing || !l.route(t, "10.244.3.0/24") {
		t.Errorf("mode under way: %v; the new Node's route: %v", l.mode.changing, l.route(t, "10.244.3.0/24"))
	}
	l.assertReady(t)
	cancel()
	if err := <-upgrade; !errors.Is(err, bpffs.ErrLocked) {
		t.Errorf("the upgrade beside a share: %v", err)
	}
}

func TestPodThatIsNotRepairedIsNotTheNodesFault(t *testing.T) {
	l, e := withPod(t)
	e.PodMAC[0] |= 1 // which the kernel takes, and a link's own address it does not
	e.HostMAC = e.PodMAC
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	if again := l.pass(t.Context()); again > retry {
		t.Errorf("the next pass is after %v", again)
	}
	l.assertReady(t)
	if said := l.complaints.current; len(said) != 1 {
		t.Errorf("%d complaints, want one: %v", len(said), said)
	}
	now := time.Now()
	l.complaints.now = func() time.Time { return now }
	for _, failing := range []time.Duration{10 * time.Second, time.Hour} { // a failure for ever must not cost a pass each second
		now = time.Now().Add(failing)
		if again := l.pass(t.Context()); again < min(failing, resync) {
			t.Errorf("failing for %v: the next pass is after %v", failing, again)
		}
	}
	e.PodMAC[0] &^= 1
	e.HostMAC = e.PodMAC
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	if l.pass(t.Context()); len(l.complaints.current) != 0 {
		t.Errorf("it can be repaired: %v", l.complaints.current)
	}
}
