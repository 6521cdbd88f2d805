package service

import (
	"fmt"
	"net/netip"
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
