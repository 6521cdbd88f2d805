package agent

import (
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

func testView() *view {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	pod := endpoint.ID{ContainerID: "c", IfName: "eth0"}.HostLinkName()
	v := &view{used: plan.FamilySet{wire.IPv4: true}, links: map[int]device.Link{}}
	for _, l := range []device.Link{
		{Index: 1, Name: "lo", MTU: 65536, MAC: make(net.HardwareAddr, 6), Flags: net.FlagLoopback | net.FlagUp},
		{Index: 2, Name: "eth0", MTU: 1500, MAC: mac},
		{Index: 3, Name: "eth1", MTU: 9000, MAC: mac},
		{Index: 4, Name: "tun0", MTU: 1400, Bare: true},
		{Index: 5, Name: pod, MTU: 1500, MAC: mac},
		{Index: 6, Name: "idle", MTU: 1280, MAC: mac},
		{Index: 7, Name: "bond0", MTU: 1450, MAC: mac},
		{Index: 8, Name: "ib0", MTU: 2044, MAC: make(net.HardwareAddr, 20)},
	} {
		v.links[l.Index] = l
	}
	route := func(dst string, index int, gateway string, protocol int) device.Route {
		r := device.Route{Dst: netip.MustParsePrefix(dst), Index: index, Protocol: protocol}
		r.Gateway, _ = netip.ParseAddr(gateway)
		return r
	}
	v.routes = []device.Route{
		route("0.0.0.0/0", 2, "172.18.0.1", 3),
		route("172.18.0.0/24", 2, "", 2),
		route("192.168.0.0/24", 3, "", 2),
		route("10.8.0.0/24", 4, "", 2),
		route("10.244.1.5/32", 5, "", device.Protocol),
		route("10.12.0.0/24", 8, "", 2),
		route("10.99.0.0/24", 5, "", 3), // somebody routes something to a pod
		route("10.244.2.0/24", 6, "172.18.0.9", device.Protocol),
		route("fe80::/64", 6, "", 2),
		route("10.6.0.0/24", 2, "fe80::1", 3),
		{Dst: netip.MustParsePrefix("10.5.0.0/24"), Index: 2, Protocol: 3, Encap: 5},
		{Dst: netip.MustParsePrefix("10.7.0.0/16"), Hops: []int{3, 7}, Protocol: 3},
	}
	v.addresses = []device.Address{
		{Index: 2, Prefix: netip.MustParsePrefix("172.18.0.77/24"), Secondary: true},
		{Index: 2, Prefix: netip.MustParsePrefix("169.254.7.7/16"), Link: true},
		{Index: 2, Prefix: netip.MustParsePrefix("172.18.0.11/24")},
		{Index: 3, Prefix: netip.MustParsePrefix("192.168.0.11/24")},
	}
	return v
}

func names(links []plan.Link) (out []string) {
	for _, l := range links {
		out = append(out, l.Name)
	}
	return out
}

func TestFindUplinks(t *testing.T) {
	v := testView()
	for _, tt := range []struct {
		named []string
		want  []string
	}{
		{nil, []string{"eth0", "eth1", "tun0", "bond0"}},
		{[]string{"tun0", "ib0", "lo"}, []string{"tun0"}},
		{[]string{"eth1"}, []string{"eth1"}},
		{[]string{"idle", "absent"}, []string{"idle"}},
	} {
		if diff := cmp.Diff(tt.want, names(v.findUplinks(tt.named, nil))); diff != "" {
			t.Errorf("named %v: -want +got:\n%s", tt.named, diff)
		}
	}
}

func TestFacts(t *testing.T) {
	v := testView()
	v.endpoints = []endpoint.Endpoint{
		{Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.1")}},
		{Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.2")}, Releasing: true},
	}
	f := v.facts()
	if len(f.Endpoints) != 1 || f.Endpoints[0].String() != "10.9.0.1" {
		t.Errorf("endpoints %v: one that is being released counts no more", f.Endpoints)
	}
	if diff := cmp.Diff(map[uint32]plan.Link{4: {Index: 4, Name: "tun0", MTU: 1400, Bare: true}, 8: {Index: 8, Name: "ib0", MTU: 2044, Bare: true}}, f.NotEthernet); diff != "" {
		t.Errorf("interfaces without Ethernet: -want +got:\n%s", diff)
	}
	onLink := map[string]bool{}
	for _, r := range f.Routes {
		onLink[r.Dst.String()] = r.OnLink
	}
	want := map[string]bool{
		"0.0.0.0/0": false, "172.18.0.0/24": true, "192.168.0.0/24": true, "10.8.0.0/24": true, "10.12.0.0/24": true, "10.99.0.0/24": true, "10.6.0.0/24": false, "10.5.0.0/24": false, "10.7.0.0/16": false,
	}
	if diff := cmp.Diff(want, onLink); diff != "" {
		t.Errorf("routes -want +got:\n%s", diff)
	}
}
