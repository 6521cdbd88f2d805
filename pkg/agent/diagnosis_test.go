package agent

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// healthy is a node of both families without network problems: eth0 (2) leads to the world, tun0 (4) and docker0 (8) are no uplinks.
func healthy() *circumstances {
	v := testView()
	v.used = plan.FamilySet{true, true}
	v.links[8] = device.Link{Index: 8, Name: "docker0", Kind: device.KindBridge, MAC: v.links[2].MAC, Flags: net.FlagUp}
	v.links[9] = device.Link{Index: 9, Name: "veth7", Kind: "veth", MAC: v.links[2].MAC, Master: 8}
	v.links[10] = device.Link{Index: 10, Name: "wwan0", Kind: device.KindHardware}
	v.uplinks = []plan.Link{{Index: 2, Name: "eth0"}}
	v.routes = nil
	c := &circumstances{state: &state{view: v, known: true, nodes: []plan.Node{n1()}}, cfg: Config{Node: "n1", Masquerade: [wire.Families]bool{true, true}}}
	c.route("0.0.0.0/0", 2)
	c.route("::/0", 2)
	c.route("172.17.0.0/16", 8)
	c.plan.Standing.Own = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:1::/64")}
	c.plan.Uplinks = map[uplinks.Key]uplinks.Value{
		{Ifindex: 2}: {Addresses: wire.AddressesFrom(netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("2001:db8::11"))},
	}
	return c
}

func (c *circumstances) route(dst string, link int, change ...func(*device.Route)) {
	r := device.Route{Dst: netip.MustParsePrefix(dst), Index: link, Protocol: 3}
	for _, f := range change {
		f(&r)
	}
	c.view.routes = append(c.view.routes, r)
}

func (c *circumstances) withoutAddressOf(f wire.Family) {
	v := c.plan.Uplinks[uplinks.Key{Ifindex: 2}]
	v.Addresses[f] = wire.Addr{}
	c.plan.Uplinks[uplinks.Key{Ifindex: 2}] = v
}

func pod(ipam, address string) endpoint.Endpoint {
	return endpoint.Endpoint{Pod: "shop/web", IPAM: ipam, Addresses: []netip.Addr{netip.MustParseAddr(address)}}
}

// Each network problem is found, and nothing that is as it should be is taken for one.
func TestDiagnose(t *testing.T) {
	t.Parallel()
	hopped := func(r *device.Route) { r.Index, r.Hops = 0, []int{2, 10} }
	for name, tt := range map[string]struct {
		spoil func(c *circumstances)
		want  []string // reason and object of each
	}{
		"healthy":         {func(*circumstances) {}, nil},
		"no IPv6 address": {func(c *circumstances) { c.withoutAddressOf(wire.IPv6) }, []string{"no_uplink_address eth0 IPv6"}},
		"an address for no uplink": {func(c *circumstances) {
			c.cfg.SnatAddresses = []SnatAddress{{Uplink: "eth9", Addr: netip.MustParseAddr("192.0.2.9")}}
		}, []string{"no_uplink_address eth9 192.0.2.9"}},
		"no IPv4 address":                     {func(c *circumstances) { c.withoutAddressOf(wire.IPv4) }, []string{"no_uplink_address eth0 IPv4"}},
		"no address, not masqueraded":         {func(c *circumstances) { c.withoutAddressOf(wire.IPv6); c.cfg.Masquerade[wire.IPv6] = false }, nil},
		"no address of a family without pods": {func(c *circumstances) { c.withoutAddressOf(wire.IPv6); c.plan.Standing.Own = c.plan.Standing.Own[:1] }, nil},
		"no address, and no route": {func(c *circumstances) {
			c.withoutAddressOf(wire.IPv6)
			c.view.routes = c.view.routes[:1]
		}, nil},
		"the default route past uplinks": {func(c *circumstances) { c.view.routes[0].Index = 10 }, []string{"default_route wwan0 IPv4"}},
		"the same of IPv6":               {func(c *circumstances) { c.view.routes[1].Index = 10 }, []string{"default_route wwan0 IPv6"}},
		"one of its hops past uplinks":   {func(c *circumstances) { hopped(&c.view.routes[0]) }, []string{"default_route wwan0 IPv4"}},
		"a reserve past uplinks":         {func(c *circumstances) { c.route("0.0.0.0/0", 10, func(r *device.Route) { r.Priority = 700 }) }, nil},
		"another table's past uplinks": {func(c *circumstances) {
			c.view.others = []device.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Index: 10, Table: 77, Protocol: 3}}
		}, []string{"default_route wwan0 IPv4"}},
		"an unreachable default":    {func(c *circumstances) { c.route("::/0", 1, func(r *device.Route) { r.Unreachable = true }) }, nil},
		"a part past uplinks":       {func(c *circumstances) { c.route("192.0.2.0/24", 4); c.route("198.51.100.0/24", 4) }, []string{"unmasqueraded tun0 IPv4"}},
		"the same, not masqueraded": {func(c *circumstances) { c.route("192.0.2.0/24", 4); c.cfg.Masquerade[wire.IPv4] = false }, nil},
		"a native part": {func(c *circumstances) {
			c.route("192.0.2.0/24", 4)
			c.cfg.NonMasquerade = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/23")}
		}, nil},
		"single addresses": {func(c *circumstances) { c.route("192.0.2.9/32", 4); c.route("192.0.2.10/32", 4) }, []string{"unmasqueraded tun0 IPv4"}},
		"single addresses of another table": {func(c *circumstances) {
			c.view.others = []device.Route{{Dst: netip.MustParsePrefix("2001:db8::9/128"), Index: 4, Table: 52, Protocol: 3}}
		}, []string{"unmasqueraded tun0 IPv6"}},
		"single addresses of a table by the node's own source": {func(c *circumstances) {
			c.view.others = []device.Route{{Dst: netip.MustParsePrefix("192.0.2.9/32"), Index: 4, Table: 128, Protocol: 3}}
			c.view.rules = []device.Rule{{Priority: 100, From: netip.MustParsePrefix("10.8.0.6/32"), Table: 128}}
		}, nil},
		"a part that a segment of ours ends on": {func(c *circumstances) {
			c.route("2001:db8:7::/48", 2, func(r *device.Route) { r.Encap = 7 })
		}, nil},
		"single addresses beside a part":            {func(c *circumstances) { c.route("192.0.2.9/32", 4); c.route("192.0.2.0/24", 4) }, []string{"unmasqueraded tun0 IPv4"}},
		"single addresses beside the default route": {func(c *circumstances) { c.view.routes[0].Index = 4; c.route("192.0.2.9/32", 4) }, []string{"default_route tun0 IPv4"}},
		"single addresses by several hops":          {func(c *circumstances) { c.route("192.0.2.9/32", 2, hopped) }, []string{"unmasqueraded wwan0 IPv4"}},
		"a single address of a guest": {func(c *circumstances) {
			c.view.links[11] = device.Link{Index: 11, Name: "tap0", Kind: "tun", MAC: c.view.links[2].MAC}
			c.route("192.0.2.9/32", 11)
			c.route("192.0.2.10/32", 9)
		}, nil},
		"a single address of the cluster": {func(c *circumstances) {
			c.route("172.18.0.12/32", 4)
			c.plan.Destinations = map[destinations.Key]destinations.Value{destinations.KeyFrom(netip.MustParsePrefix("172.18.0.12/32")): {Kind: destinations.Node}}
		}, nil},
		"a single address of a native part": {func(c *circumstances) {
			c.route("192.0.2.9/32", 4)
			c.plan.Destinations = map[destinations.Key]destinations.Value{
				destinations.KeyFrom(netip.MustParsePrefix("0.0.0.0/0")): {Kind: destinations.World}, destinations.KeyFrom(netip.MustParsePrefix("192.0.2.0/24")): {Kind: destinations.Native},
			}
		}, nil},
		"a single address, not masqueraded": {func(c *circumstances) { c.route("192.0.2.9/32", 4); c.cfg.Masquerade[wire.IPv4] = false }, nil},
		"an unreachable address":            {func(c *circumstances) { c.route("192.0.2.9/32", 4, func(r *device.Route) { r.Unreachable = true }) }, nil},
		"an encapsulated default route":     {func(c *circumstances) { c.view.routes[0].Encap = 1 }, []string{"default_route encap mpls IPv4"}},
		"an encapsulated default route, not masqueraded": {func(c *circumstances) {
			c.view.routes[0].Encap, c.cfg.Masquerade[wire.IPv4] = 1, false
		}, []string{"default_route encap mpls IPv4"}},
		"an encapsulated reserve": {func(c *circumstances) {
			c.route("0.0.0.0/0", 2, func(r *device.Route) { r.Priority, r.Encap = 700, 1 })
		}, nil},
		"a default route that a program sees": {func(c *circumstances) { c.view.routes[0].Encap = 6 }, nil},
		"encapsulated parts": {func(c *circumstances) {
			c.route("192.0.2.0/24", 2, func(r *device.Route) { r.Encap = 5 })
			c.route("198.51.100.7/32", 2, func(r *device.Route) { r.Encap = 5 })
			c.route("2001:db8:7::/48", 2, func(r *device.Route) { r.Encap = 99 })
		}, []string{"unmasqueraded encap seg6 IPv4", "unmasqueraded encap 99 IPv6"}},
		"an encapsulated part of the cluster": {func(c *circumstances) {
			c.route("172.18.0.12/32", 2, func(r *device.Route) { r.Encap = 5 })
			c.plan.Destinations = map[destinations.Key]destinations.Value{destinations.KeyFrom(netip.MustParsePrefix("172.18.0.12/32")): {Kind: destinations.Node}}
		}, nil},
		"a bridge that leads out": {func(c *circumstances) {
			c.view.links[11] = device.Link{Index: 11, Name: "eth5", Kind: device.KindHardware, Master: 8}
		}, []string{"unmasqueraded docker0 IPv4"}},
		"a rule by TOS": {func(c *circumstances) {
			c.view.rules, c.plan.Config.Flags = []device.Rule{{Priority: 100, Unseen: "a TOS value"}}, config.RoutesToStack
		}, []string{"slow_path rule 100 asks for a TOS value"}},
		"a rule by a mark that netfilter sets": {func(c *circumstances) {
			c.view.rules, c.view.marked, c.plan.Config.Flags = []device.Rule{{Priority: 100, Marks: 1}}, "table t", config.RoutesToStack
		}, []string{"slow_path rule 100 asks for a packet mark, and netfilter may set it in pods' packets: table t"}},
		"a rule by a mark that no pod's packet has": {func(c *circumstances) { c.view.rules = []device.Rule{{Priority: 100, Marks: 1}} }, nil},
		"a pod outside the podCIDR":                 {func(c *circumstances) { c.view.endpoints = []endpoint.Endpoint{pod("host-local", "10.244.9.5")} }, []string{"pods_outside_podcidr "}},
		"an IPv6 pod outside the podCIDR":           {func(c *circumstances) { c.view.endpoints = []endpoint.Endpoint{pod("host-local", "fd00:9::5")} }, []string{"pods_outside_podcidr "}},
		"a pod of the podCIDR":                      {func(c *circumstances) { c.view.endpoints = []endpoint.Endpoint{pod("host-local", "10.244.1.5")} }, nil},
		"a pod of another ipam plugin":              {func(c *circumstances) { c.view.endpoints = []endpoint.Endpoint{pod("dhcp", "10.244.9.5")} }, nil},
		"a rule that drops": {func(c *circumstances) {
			c.forwardDrops = []netfilter.ForwardDrop{{Chain: "table t, chain c", Rule: "drop", Remedy: "nft"}}
		}, []string{"forward_drop table t, chain c: drop"}},
		"no Node":                         {func(c *circumstances) { c.nodes = nil }, []string{"node_missing n1"}},
		"no Node as far as one may know":  {func(c *circumstances) { c.nodes, c.known = nil, false }, nil},
		"no Node, nor has there been any": {func(c *circumstances) { c.nodes, c.plan.Standing.Own = nil, nil }, nil},
	} {
		c := healthy()
		tt.spoil(c)
		c.view.findExits(c.cfg)
		var got []string
		for _, p := range diagnose(*c) {
			got = append(got, p.Subject())
			if p.Text == "" || p.Remedy == "" || strings.Contains(p.Text+p.Remedy, "%!") {
				t.Errorf("%s: %+v", name, p)
			}
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

// Network problems of a real node come and go as it changes: in the file for ebpfctl, in the log and in the metric.
func TestNetworkProblemsAreTold(t *testing.T) {
	l := testLoop(t)
	log := logged(l)
	ready(t, l)
	run(t, "ip tuntap add dev tun9 mode tun")
	run(t, "ip link set dev tun9 up")
	l.cfg.Uplinks = []string{"uplink"}
	told := map[string]int{}
	for _, step := range []struct{ spoil, mend, reason string }{
		{"ip address del 172.18.0.11/24 dev uplink; ip route add 198.51.100.0/24 dev uplink", "ip address add 172.18.0.11/24 dev uplink", noUplinkAddress},
		{"ip route add default dev tun9", "ip route del default dev tun9", defaultRoute},
		{"ip route add 192.0.2.0/24 dev tun9", "ip route del 192.0.2.0/24 dev tun9", unmasqueraded},
		{"ip rule add priority 100 dsfield 0x10 lookup 77", "ip rule del priority 100", slowPath},
		{"ip route add 192.0.2.7 dev tun9; ip route add 192.0.2.8 dev tun9 table 52; ip rule add priority 5270 lookup 52", "ip rule del priority 5270; ip route del 192.0.2.7 dev tun9", unmasqueraded},
		{"ip route add 192.0.2.0/24 encap seg6 mode encap segs 2001:db8::7 dev uplink", "ip route del 192.0.2.0/24", unmasqueraded},
		{"iptables-nft -A FORWARD -j REJECT", "iptables-nft -D FORWARD -j REJECT", forwardDrop},
	} {
		for command := range strings.SplitSeq(step.spoil, "; ") {
			run(t, command)
		}
		l.uplinks.absences.grace = 0
		l.pass(t.Context())
		l.expectNetworkProblems(t, step.spoil, step.reason)
		for command := range strings.SplitSeq(step.mend, "; ") {
			run(t, command)
		}
		l.pass(t.Context())
		l.expectNetworkProblems(t, step.mend)
		if told[step.reason]++; strings.Count(log.String(), `"network problem" reason=`+step.reason) != told[step.reason] || strings.Count(log.String(), `"network problem is over" reason=`+step.reason) != told[step.reason] {
			t.Errorf("%s is not logged once:\n%s", step.reason, log)
		}
	}
	l.accept(list(n2()))
	l.replan(t.Context())
	l.expectNetworkProblems(t, "without its Node", nodeMissing)
	if why := l.status.reason(); why != "" {
		t.Errorf("not ready: %s", why)
	}
}

// expectNetworkProblems compares what is told with the reasons.
func (l *loop) expectNetworkProblems(t *testing.T, when string, reasons ...string) {
	t.Helper()
	told, err := os.ReadFile(filepath.Join(l.cfg.State, observe.ClusterFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, reason := range networkReasons() {
		want := 0
		for _, r := range reasons {
			if r == reason {
				want++
			}
		}
		if n := strings.Count(string(told), fmt.Sprintf(`{"reason":%q,"about"`, reason)); n != want {
			t.Errorf("after %s: ebpfctl is told %d times of %s, want %d", when, n, reason, want)
		}
		if n := sampleOf(t, l, "network_problems", reason); int(n) != want {
			t.Errorf("after %s: the metric counts %v of %s, want %d", when, n, reason, want)
		}
	}
}

// What makes an uplink of an interface is said with all that the node has, and only of an interface that can be one.
func TestRemedyOfAnInterfacePastUplinks(t *testing.T) {
	t.Parallel()
	c := healthy()
	ethernet, other := c.view.links[8], c.view.links[10]
	if remedy := c.asUplink(ethernet); !strings.HasSuffix(remedy, ": --uplink eth0,docker0") {
		t.Errorf("of an Ethernet interface: %q", remedy)
	}
	if remedy := c.asUplink(other); !strings.Contains(remedy, "wwan0 is of a kind that cannot be one") || strings.Contains(remedy, "--uplink") {
		t.Errorf("of another one: %q", remedy)
	}
}
