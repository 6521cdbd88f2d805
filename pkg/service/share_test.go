package service

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// One Service of very many endpoints and ports leaves others their room, whether it comes at once or grows.
func TestOneServiceLeavesRoomForOthers(t *testing.T) {
	r := quiet(t, whole)
	large, slice := web(t, "large", "10.96.0.1")
	large.Ports, slice.Ports = nil, nil
	for i := range 132 {
		p := Port{Name: fmt.Sprint("p", i), Protocol: wire.TCP, Port: uint16(1000 + i)}
		large.Ports = append(large.Ports, p)
		slice.Ports = append(slice.Ports, SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 8080})
	}
	for i := range 1000 {
		slice.Endpoints = append(slice.Endpoints, ep(t, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String()))
	}
	r.update(Update{Services: []Service{large}})
	r.update(Update{Slices: []Slice{slice}})
	r.wantProblem("large", Unsupported, "some endpoints of port 1032 and others", "32768")
	if used := r.state.Used().Backends; used > whole.Backends/4+1 {
		t.Errorf("one Service has %d backends", used)
	}
	r.put("small", "10.96.0.2", "10.0.0.1", "10.0.0.2")
	r.want("10.96.0.2", "10.0.0.1", "10.0.0.2")

	r.update(Update{GoneSlices: []Name{slice.Name}})
	for i := range 300 {
		large.ExternalIPs = append(large.ExternalIPs, netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}))
	}
	r.update(Update{Services: []Service{large}})
	r.wantProblem("large", Unsupported, "port 1108 and others are not served", "32768")
	if used := r.state.Used().Services; used > whole.Services/2 {
		t.Errorf("one Service has %d entries of frontends", used)
	}
	r.put("another", "10.96.0.3", "10.0.0.3")
	r.want("10.96.0.3", "10.0.0.3")
}

// One of very many ranges leaves others theirs, and of its own keeps the first.
func TestOneServiceLeavesRoomForRanges(t *testing.T) {
	r := quiet(t, Capacities{Services: 64, Ranges: 2 * shareFloor, Sets: 64, Backends: 64, Slots: 64})
	put := func(name, address string, ranges []netip.Prefix, ports ...uint16) {
		service, slice := web(t, name, map[string]string{"large": "10.96.0.1", "small": "10.96.0.2"}[name], "10.0.0.1")
		service.LoadBalancerIPs, service.SourceRanges = addrs(address), ranges
		service.Ports, slice.Ports = nil, nil
		for i, port := range ports {
			p := Port{Name: fmt.Sprint("p", i), Protocol: wire.TCP, Port: port}
			service.Ports, slice.Ports = append(service.Ports, p), append(slice.Ports, SlicePort{Name: p.Name, Protocol: p.Protocol, Port: 8080})
		}
		r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	}
	var many []netip.Prefix
	for i := range shareFloor {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32))
	}
	put("large", "192.0.2.1", many, 80)
	r.wantProblem("", "")
	put("large", "192.0.2.1", many, 80, 443)
	r.wantProblem("large", Unsupported, "loadBalancerSourceRanges can't use port 443 and others", "1024")
	if n := len(r.kernel.Ranges); n != shareFloor {
		t.Errorf("one Service has %d ranges", n)
	}
	put("small", "192.0.2.2", many[:shareFloor/2], 80)
	r.wantProblem("large", Unsupported)
	put("large", "192.0.2.1", nil, 80, 443)
	r.wantProblem("", "")
}

// One of very many ports leaves others theirs.
func TestOneServiceLeavesRoomForPorts(t *testing.T) {
	r := quiet(t, Capacities{Services: 8 * shareFloor, Sets: 2 * shareFloor, Backends: 64, Slots: 64})
	large, _ := web(t, "large", "10.96.0.1")
	large.Ports = nil
	for i := range shareFloor + 1 {
		large.Ports = append(large.Ports, Port{Name: fmt.Sprint("p", i), Protocol: wire.TCP, Port: uint16(1000 + i)})
	}
	r.update(Update{Services: []Service{large}})
	r.wantProblem("large", Unsupported, "port 2024 and others are not served", "1024 ports")
	r.put("small", "10.96.0.2", "10.0.0.1")
	r.want("10.96.0.2", "10.0.0.1")
}

// However many ports one has, and its slices, what is refused costs neither time nor memory; endpoints that are there many times, or
// of no family that it has, end with it.
func TestOneServiceCostsNoMoreThanItsShare(t *testing.T) {
	large, slice := web(t, "large", "10.96.0.1")
	large.Ports, slice.Ports = nil, nil
	for i := range uint16(4000) {
		p := Port{Name: fmt.Sprint("p", i), Protocol: wire.TCP, Port: 1000 + i}
		large.Ports, slice.Ports = append(large.Ports, p), append(slice.Ports, SlicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	for what, address := range map[string]func(i int) string{
		"different": func(i int) string { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String() },
		"the same":  func(int) string { return "10.1.0.1" },
		"of IPv6":   func(int) string { return "fd00::1" },
	} {
		slice.Endpoints = nil
		for i := range 1000 {
			slice.Endpoints = append(slice.Endpoints, ep(t, address(i)))
		}
		m := NewModel()
		m.Apply(Update{Complete: true, Services: []Service{large}, Slices: []Slice{slice}})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		sets, problems := wanted(m.Service(large.Name), m, Options{Capacities: whole})
		runtime.ReadMemStats(&after)
		if len(sets) != 4000 || len(problems) != 1 {
			t.Errorf("%s: %d sets, problems %v", what, len(sets), problems)
		}
		if grown := (after.TotalAlloc - before.TotalAlloc) >> 20; grown > 64 {
			t.Errorf("%s: %d MiB", what, grown)
		}
	}
}
