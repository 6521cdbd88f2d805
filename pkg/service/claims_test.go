package service

import (
	"net/netip"
	"strconv"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
)

// Where the API server answers no Service does, whichever of them comes first, and whatever else it has there.
func TestAPIServerIsNoServices(t *testing.T) {
	for name, claim := range map[string]func(*Service, netip.Addr){
		"externalIP":    func(s *Service, a netip.Addr) { s.ExternalIPs = []netip.Addr{a} },
		"load balancer": func(s *Service, a netip.Addr) { s.LoadBalancerIPs = []netip.Addr{a} },
	} {
		t.Run(name, func(t *testing.T) {
			r := quiet(t, roomy)
			r.options.APIServers = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.8:80"), netip.MustParseAddrPort("192.0.2.9:80")}
			r.plan(r.state.Configure(r.options, r.model))
			thief, thiefs := web(t, "a", "10.96.0.1", "10.0.0.1")
			claim(&thief, netip.MustParseAddr("192.0.2.1"))
			r.update(Update{Services: []Service{thief}, Slices: []Slice{thiefs}})
			r.want("192.0.2.1", "10.0.0.1")

			service, slice := web(t, "kubernetes", "10.96.0.2", "192.0.2.2", "192.0.2.1")
			service.Name, slice.Name = apiServer, apiServer
			slice.Ports = append(slice.Ports, SlicePort{Protocol: wire.TCP, Port: 80})
			r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
			r.want("192.0.2.1")
			r.want("10.96.0.1", "10.0.0.1")
			r.wantProblem("a", Taken, "192.0.2.1:80 tcp", "API server")
			slice.Ports = slice.Ports[:1]
			r.update(Update{Slices: []Slice{slice}})
			r.want("192.0.2.1", "10.0.0.1")

			claim(&thief, netip.MustParseAddr("192.0.2.9"))
			r.update(Update{Services: []Service{thief}})
			r.want("192.0.2.9")
			r.wantProblem("a", Taken, "192.0.2.9:80 tcp", "API server")
		})
	}
}

// What goes to an address stays there as soon as the node has that, where its own socket is the endpoint, and as long as it has it.
func TestAddressThatBecomesTheNodes(t *testing.T) {
	r := quiet(t, roomy)
	service, slice := web(t, "a", "10.96.0.1", "192.0.2.1")
	service.ExternalIPs, service.Ports[0].Port = addrs("192.0.2.1"), 8080
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	frontend := services.Key{Address: wire.AddrFrom(service.ExternalIPs[0]), Port: wire.PortFrom(8080), Proto: wire.TCP}
	for _, held := range []bool{false, true, false} {
		r.options.HeldAddresses = map[netip.Addr]bool{service.ExternalIPs[0]: held}
		r.plan(r.state.Configure(r.options, r.model))
		if _, there := r.kernel.Services[frontend]; there == held {
			t.Errorf("the node has the address: %v, its frontend is there: %v", held, there)
		}
	}
}

// What stands for no single host is no Service's: with the address of everybody on a link it would catch the node's DHCP.
func TestAddressesOfNobody(t *testing.T) {
	for _, list := range []func(*Service) *[]netip.Addr{
		func(s *Service) *[]netip.Addr { return &s.ExternalIPs }, func(s *Service) *[]netip.Addr { return &s.LoadBalancerIPs },
	} {
		for _, a := range addrs(
			"255.255.255.255", "239.1.2.3", "224.0.0.251", "127.0.0.1", "127.8.8.8", "169.254.169.254", "0.1.2.3", "ff02::1", "ff0e::1", "::1", "fe80::1", "::ffff:127.0.0.1",
		) {
			r := quiet(t, roomy)
			service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
			service.ClusterIPs = append(service.ClusterIPs, netip.MustParseAddr("fd00:96::1"))
			*list(&service) = append(addrs("192.0.2.1"), a)
			r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
			r.wantProblem("a", Unsupported, a.Unmap().String(), "no Service may have")
			r.want("192.0.2.1", "10.0.0.1")
			if _, there := r.kernel.Services[services.Key{Address: wire.AddrFrom(a.Unmap())}]; there {
				t.Errorf("%s is served", a)
			}
		}
	}
}

// What goes to the node's own address on a port of its own processes stays there.
func TestGuardedPortIsNoServices(t *testing.T) {
	own, elsewhere := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for _, list := range []func(*Service) *[]netip.Addr{
		func(s *Service) *[]netip.Addr { return &s.ExternalIPs }, func(s *Service) *[]netip.Addr { return &s.LoadBalancerIPs },
	} {
		r := quiet(t, roomy)
		r.options.HeldAddresses = map[netip.Addr]bool{own: true}
		r.options.Guarded = append(guard.Fixed(), guard.Port{Number: 9999, Owner: "the agent"})
		r.plan(r.state.Configure(r.options, r.model))
		service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
		*list(&service) = []netip.Addr{own, elsewhere}
		service.Ports, slice.Ports = nil, nil
		for _, port := range []uint16{10250, 9999, 8443} {
			for _, protocol := range []wire.Protocol{wire.TCP, wire.UDP} {
				name := protocol.String() + strconv.Itoa(int(port))
				service.Ports = append(service.Ports, Port{Name: name, Port: port, Protocol: protocol})
				slice.Ports = append(slice.Ports, SlicePort{Name: name, Port: 8080, Protocol: protocol})
			}
		}
		served := func(a netip.Addr, port uint16, protocol wire.Protocol) bool {
			_, there := r.kernel.Services[services.Key{Address: wire.AddrFrom(a), Port: wire.PortFrom(port), Proto: protocol}]
			return there
		}
		r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
		for _, p := range service.Ports {
			want := p.Port == 8443 || p.Protocol == wire.UDP
			if served(own, p.Port, p.Protocol) != want || !served(elsewhere, p.Port, p.Protocol) {
				t.Errorf("%d %v is served: %t; elsewhere: %t", p.Port, p.Protocol, !want, served(elsewhere, p.Port, p.Protocol))
			}
		}
		problems := r.state.Problems()
		for i, want := range []string{"192.0.2.1:10250 tcp is the port of the kubelet", "192.0.2.1:9999 tcp is the port of the agent"} {
			if len(problems) != 2 || problems[i].Reason != Taken || problems[i].Text != want {
				t.Errorf("problems %v; want %s", problems, want)
			}
		}
	}
}

// The broadcast address of a link of the node is nobody's.
func TestBroadcastAddress(t *testing.T) {
	r := quiet(t, roomy)
	service, slice := web(t, "a", "10.96.0.1", "10.0.0.1")
	service.ExternalIPs = addrs("192.0.2.255", "192.0.2.1")
	r.update(Update{Services: []Service{service}, Slices: []Slice{slice}})
	r.want("192.0.2.255", "10.0.0.1")
	r.options.Broadcast = map[netip.Addr]bool{service.ExternalIPs[0]: true}
	r.plan(r.state.Configure(r.options, r.model))
	r.want("192.0.2.255")
	r.want("192.0.2.1", "10.0.0.1")
	r.wantProblem("a", Unsupported, "192.0.2.255", "everybody on a link")
}
