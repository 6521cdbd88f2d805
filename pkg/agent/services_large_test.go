package agent

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// TestManyServices is a cluster of ten thousand Services with a hundred thousand endpoints: how long the first lists take, a
// change of one endpoint, a restart, and a comparison of the maps. In the short form it is a tenth.
func TestManyServices(t *testing.T) {
	number, each := 1000, 10
	if priv.Long() {
		number = 10_000
	}
	l := testServices(t)
	endpoint := func(i, j int) string { return fmt.Sprintf("10.%d.%d.%d", 128+i>>8&63, i&255, j+1) }
	all := make([][]string, number)
	for i := range all {
		for j := range each {
			all[i] = append(all[i], endpoint(i, j))
		}
	}
	u := complete(all...)
	// By processor time: by the clock a busy machine is judged as well.
	within := func(what string, most time.Duration, do func()) {
		t.Helper()
		began, spent := time.Now(), processorTime()
		do()
		took := processorTime() - spent
		t.Logf("%s: %v, by the clock %v", what, took, time.Since(began))
		if took > priv.Patience(most) {
			t.Errorf("%s took %v, want at most %v", what, took, most)
		}
	}
	within("from nothing", 2*time.Second, func() {
		l.services.place(here())
		l.services.accept(u)
	})
	last := u.Services[number-1].ClusterIPs[0].String()
	if got := leadsTo(t, l, last, 80); len(got) != each || !slices.Contains(got, endpoint(number-1, 0)+":8080") {
		t.Errorf("the last Service leads to %v", got)
	}

	var took []time.Duration
	for range 1000 {
		i := rand.IntN(number) + 1
		began := time.Now()
		s, slice := webService(i, all[i-1][:1+rand.IntN(each)]...)
		l.services.accept(service.Update{Services: []service.Service{s}, Slices: []service.Slice{slice}})
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	t.Logf("a change: median %v, p99 %v", took[500], took[990])
	if p99 := took[990]; p99 > priv.Patience(50*time.Millisecond) {
		t.Errorf("one change in a hundred takes %v", p99)
	}
	within("comparison of the maps", time.Second, l.services.repair)
	within("restart", 2*time.Second, func() {
		restartServices(t, l)
		l.services.place(here())
		l.services.accept(u)
	})
}
