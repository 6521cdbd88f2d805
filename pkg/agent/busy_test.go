package agent

import (
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// breakEntry takes an endpoint's entry away and returns whether it is there again.
func (r *reconciler) breakEntry(t *testing.T, e endpoint.Endpoint) (repaired func() bool) {
	t.Helper()
	key := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}
	if err := r.dp.Maps.Endpoints.Delete(key); err != nil {
		t.Fatal(err)
	}
	return func() bool {
		have, err := r.dp.Maps.Endpoints.Get(key)
		return err == nil && have == endpointValue(e)
	}
}

// A pod that somebody is at work on is no fault of the node.
func TestBusyEndpointIsForTheNextPass(t *testing.T) {
	r, e := withPod(t)
	for what, acquire := range map[string]func() (release func(), err error){
		"endpoint": func() (func(), error) {
			l, err := endpoint.Acquire(t.Context(), r.cfg.State, e.ID)
			return l.Release, err
		},
		"node": func() (func(), error) {
			l, err := bpffs.Exclusive(t.Context(), r.cfg.State)
			return l.Release, err
		},
	} {
		repaired := r.breakEntry(t, e)
		release, err := acquire()
		if err != nil {
			t.Fatal(err)
		}
		if again := r.pass(t.Context()); again > retry {
			t.Errorf("%s's lock held: the next pass is after %v", what, again)
		}
		r.assertReady(t)
		if repaired() {
			t.Errorf("%s's lock held: repaired nevertheless", what)
		}
		release()
		r.pass(t.Context())
		r.assertReady(t)
		if !repaired() {
			t.Errorf("%s's lock given back: not repaired", what)
		}
	}
}

func TestLocksTakeOneWaitPerPass(t *testing.T) {
	r, e := withPod(t)
	lost := orphan(t, r)
	r.pass(t.Context())
	r.orphans.first[lost.ID] = time.Now().Add(-apart)
	r.orphans.swept = time.Time{}
	r.breakEntry(t, e)
	lock, err := bpffs.Exclusive(t.Context(), r.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	// A repair, a release and a search want it. On a busy machine a pass may take longer than it waits, but hardly three.
	took := 2 * lockPatience
	for tries := 0; tries < 3 && took >= 2*lockPatience; tries++ {
		started := time.Now()
		r.pass(t.Context())
		took = time.Since(started)
	}
	if took < lockPatience || took >= 2*lockPatience {
		t.Errorf("the pass took %v, want one wait of %v", took, lockPatience)
	}
	r.assertReady(t)
}

func TestPodThatIsNotRepairedIsNotTheNodesFault(t *testing.T) {
	r, e := withPod(t)
	e.PodMAC[0] |= 1 // which the kernel takes, and a link's own address it does not
	e.HostMAC = e.PodMAC
	if err := endpoint.Write(r.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	if again := r.pass(t.Context()); again > retry {
		t.Errorf("the next pass is after %v", again)
	}
	r.assertReady(t)
	said := 0
	for key := range r.reported {
		if isComplaint(key) {
			said++
		}
	}
	if said != 1 {
		t.Errorf("%d complaints, want one: %v", said, r.reported)
	}
}
