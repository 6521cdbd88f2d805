package service

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

var whole = Capacities{Services: 131072, Ranges: 16384, Sets: 65536, Backends: 131072, Slots: 524288}

// big is 10 000 Services of 10 endpoints each.
func big() Update {
	u := Update{Complete: true}
	for i := range 10_000 {
		name := Name{"ns", fmt.Sprint("s", i)}
		u.Services = append(u.Services, Service{
			Name: name, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
			Ports: []Port{{Protocol: wire.TCP, Port: 80}},
		})
		s := Slice{Name: name, Service: name.Name, Ports: []SlicePort{{Protocol: wire.TCP, Port: 8080}}}
		for j := range 10 {
			s.Endpoints = append(s.Endpoints, Endpoint{
				Address: netip.AddrFrom4([4]byte{10, byte(128 + j), byte(i >> 8), byte(i)}), Ready: true, Serving: true, Node: "n1",
			})
		}
		u.Slices = append(u.Slices, s)
	}
	return u
}

func BenchmarkPlanFromNothing(b *testing.B) {
	u := big()
	for b.Loop() {
		m := NewModel()
		changed := m.Apply(u)
		Load(Options{Capacities: whole}, Content{}).Plan(m, changed, time.Unix(1, 0))
	}
}

func BenchmarkPlanAfterRestart(b *testing.B) {
	u, k, m := big(), newKernel(whole), NewModel()
	changed := m.Apply(u)
	k.apply(b, Load(Options{Capacities: whole}, k.Content).Plan(m, changed, time.Unix(1, 0)), func(string) {})
	for b.Loop() {
		if w := Load(Options{Capacities: whole}, k.Content).Plan(m, changed, time.Unix(1, 0)); !w.Empty() {
			b.Fatal("something is written")
		}
	}
}

// One endpoint comes or goes, in one Service after the other.
func BenchmarkOneEndpoint(b *testing.B) {
	u, m := big(), NewModel()
	s := Load(Options{Capacities: whole}, Content{})
	s.Plan(m, m.Apply(u), time.Unix(1, 0))
	now, i := time.Unix(10, 0), 0
	for b.Loop() {
		slice := u.Slices[i%len(u.Slices)]
		slice.Endpoints = slice.Endpoints[:9+i/len(u.Slices)%2]
		w := s.Plan(m, m.Apply(Update{Slices: []Slice{slice}}), now)
		s.Written(now)
		now, i = now.Add(50*time.Millisecond), i+1
		if i <= len(u.Slices) && w.Empty() {
			b.Fatal("nothing is written")
		}
	}
}

// What the model and the planner keep, beside the strings, which the objects have as well.
func BenchmarkMemory(b *testing.B) {
	u := big()
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		m := NewModel()
		s := Load(Options{Capacities: whole}, Content{})
		s.Plan(m, m.Apply(u), time.Unix(1, 0))
		b.ReportMetric(float64(heap()-before)/(1<<20), "MiB")
		runtime.KeepAlive(s)
		runtime.KeepAlive(m)
	}
}
