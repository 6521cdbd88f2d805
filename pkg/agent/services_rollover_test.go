package agent

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// A Service whose pods are replaced again and again, a sixth at a time.
const rolloverSlices, rolloverEach, rolloverAtOnce, rollovers = 36, 100, 6, 20

// rolloverSlice is one that a rollover makes. Pods have the addresses of those before the last ones again.
func rolloverSlice(roll, i int, ready bool) service.Slice {
	var endpoints []string
	for j := range rolloverEach {
		endpoints = append(endpoints, fmt.Sprintf("10.%d.%d.%d", 128+roll%2, i, j))
	}
	_, s := webService(1, endpoints...)
	s.Name.Name = fmt.Sprintf("web-1-%d-%d", roll, i)
	for j := range s.Endpoints {
		s.Endpoints[j].Ready, s.Endpoints[j].Terminating = ready, !ready
	}
	return s
}

// rollover has new pods ready for a second beside those that terminate, until all are replaced and the grace of the last is over.
func (c *serviceController) rollover(roll int) {
	for first := 0; first < rolloverSlices; first += rolloverAtOnce {
		u, gone := service.Update{Changes: []service.Change{{Noticed: time.Now()}}}, service.Update{}
		for i := first; i < first+rolloverAtOnce; i++ {
			old := rolloverSlice(roll-1, i, false)
			u.Slices, gone.GoneSlices = append(u.Slices, rolloverSlice(roll, i, true), old), append(gone.GoneSlices, old.Name)
		}
		c.accept(u)
		time.Sleep(time.Second)
		c.accept(gone)
		time.Sleep(time.Second)
	}
	time.Sleep(service.Grace)
	c.again()
}

// holding is what an agent and its maps have when nothing is under way.
type holding struct {
	used                  service.Capacities
	sets, backends, slots int // up to where the maps are read and compared
}

func (c *serviceController) holds() (h holding, memory uint64) {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return holding{c.read().used, c.maps.sets, c.maps.backends, c.maps.slots}, m.HeapAlloc
}

// What a Service with 3 600 endpoints takes while they are replaced, of memory and of maps, it gives back: after twenty times there
// is no more than after two.
func TestRolloversLeaveNothing(t *testing.T) {
	l := testServices(t)
	c := l.services
	s, _ := webService(1)
	all := service.Update{Complete: true, Services: []service.Service{s}}
	for i := range rolloverSlices {
		all.Slices = append(all.Slices, rolloverSlice(0, i, true))
	}
	synctest.Test(t, func(t *testing.T) { // a clock of its own, by which the grace passes at once
		c.place(here())
		c.accept(all)
		c.rollover(1)
		c.rollover(2)
		before, memory := c.holds()
		for roll := 3; roll <= rollovers; roll++ {
			c.rollover(roll)
		}
		after, grown := c.holds()
		grown -= memory // may be less than nothing
		t.Logf("%+v; memory grew by %d bytes", after, int64(grown))
		if most := int64(256 << 10); int64(grown) > most {
			t.Errorf("memory grew by %d bytes, want at most %d", int64(grown), most)
		}
		if after != before || after.used.Backends != rolloverSlices*rolloverEach {
			t.Errorf("after two rollovers there was %+v, and after %d there is %+v", before, rollovers, after)
		}
	})
	found := leadsTo(t, l, "10.96.0.1", 80)
	if len(found) != rolloverSlices*rolloverEach || found[0] != fmt.Sprintf("10.%d.0.0:8080", 128+rollovers%2) || c.failed || len(c.problems()) > 0 {
		t.Errorf("the Service leads to %d endpoints, problems %v", len(found), c.problems())
	}
	serving := slices.DeleteFunc(readServices(t, l).Backends, func(b backends.Value) bool { return b.Set == 0 })
	if len(serving) != rolloverSlices*rolloverEach {
		t.Errorf("the map has %d backends of the Service, want %d", len(serving), rolloverSlices*rolloverEach)
	}
}
