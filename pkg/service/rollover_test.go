package service

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A large Service whose pods are replaced again and again, as by updates of its Deployment.
const (
	rolloverSlices, rolloverEach = 36, 100 // endpoints of each EndpointSlice, the most that the API's controller puts there
	rolloverAtOnce               = 6       // slices
	rolloverTimes                = 20
)

// rolloverSlice is one of those that a rollover makes. Pods have the addresses of those before the last ones again.
func rolloverSlice(of Service, roll, number int, serving bool) Slice {
	s := Slice{
		Name: Name{of.Namespace, fmt.Sprintf("%s-%d-%d", of.Name.Name, roll, number)}, Service: of.Name.Name,
		Ports: []SlicePort{{Protocol: wire.TCP, Port: 8080}},
	}
	for i := range rolloverEach {
		s.Endpoints = append(s.Endpoints, Endpoint{
			Address: netip.AddrFrom4([4]byte{10, byte(roll % 2), byte(number), byte(i)}), Ready: serving, Serving: true, Terminating: !serving,
		})
	}
	return s
}

// rollover replaces all endpoints: some new ones are ready, and as many of the old ones terminate; these go a second later.
func (r *trial) rollover(of Service, roll int) {
	r.Helper()
	for first := 0; first < rolloverSlices; first += rolloverAtOnce {
		var u, gone Update
		for i := first; i < first+rolloverAtOnce; i++ {
			old := rolloverSlice(of, roll-1, i, false)
			u.Slices = append(u.Slices, rolloverSlice(of, roll, i, true), old)
			gone.GoneSlices = append(gone.GoneSlices, old.Name)
		}
		for _, u := range []Update{u, gone} {
			w := r.state.Plan(r.model, r.model.Apply(u), r.now)
			r.kernel.checkReuse(r, w, r.now)
			r.kernel.apply(r, w, func(string) {}) // what is found between two lists is others' matter, and dear with so many
			r.state.Written(r.now)
			r.kernel.note(r.now)
			r.now = r.now.Add(time.Second)
		}
	}
}

// extent is up to where the maps' arrays have been written.
func (k *kernel) extent() (c Capacities) {
	for i, b := range k.Backends {
		if b != (backends.Value{}) {
			c.Backends = uint32(i)
		}
	}
	for i, s := range k.Slots {
		if s.Backend != 0 {
			c.Slots = uint32(i)
		}
	}
	return c
}

// What a rollover takes of the maps it gives back: the last one needs no more than the second.
func TestRolloversLeaveTheMapsAsTheyWere(t *testing.T) {
	r := quiet(t, Capacities{Services: 8, Sets: 8, Backends: 32768, Slots: 65536})
	r.roomy = true
	service, _ := web(t, "web", "10.96.0.1")
	u := Update{Services: []Service{service}}
	for i := range rolloverSlices {
		u.Slices = append(u.Slices, rolloverSlice(service, 0, i, true))
	}
	r.update(u)
	want := r.state.Used()
	if want.Backends != rolloverSlices*rolloverEach {
		t.Fatalf("in use: %+v", want)
	}
	var second Capacities
	for roll := 1; roll <= rolloverTimes; roll++ {
		r.rollover(service, roll)
		r.wantProblem("", "")
		r.wait(Grace)
		r.kernel.checkTidy(r)
		if found := r.find("10.96.0.1"); len(found) != rolloverSlices*rolloverEach || found[0] != fmt.Sprintf("10.%d.0.0", roll%2) {
			t.Fatalf("rollover %d: the Service leads to %d endpoints, the first of which is %s", roll, len(found), found[0])
		}
		if used := r.state.Used(); used != want {
			t.Fatalf("rollover %d: %+v is in use, and %+v was before", roll, used, want)
		}
		if n := len(r.model.slices) + len(r.model.of) + len(r.state.room.waiting) + len(r.state.placed); n != rolloverSlices+2 {
			t.Fatalf("rollover %d: the model has %d slices, and %d things wait for their grace", roll, len(r.model.slices), len(r.state.room.waiting))
		}
		switch extent := r.kernel.extent(); {
		case roll == 2:
			second = extent
		case roll > 2 && extent != second:
			t.Fatalf("rollover %d: the maps are written up to %+v, and were to %+v after the second", roll, extent, second)
		}
	}
}
