package agent

import (
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// noGateway is an address on the uplink's link that the kernel accepts no route by.
const noGateway = "172.18.0.99"

// refuseGateway makes noGateway what it is: an odd broadcast address, of which only
// the kernel's local table tells.
func refuseGateway(t *testing.T) {
	t.Helper()
	link, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	err = netlink.RouteReplace(&netlink.Route{
		Dst: &net.IPNet{IP: net.ParseIP(noGateway).To4(), Mask: net.CIDRMask(32, 32)}, LinkIndex: link.Attrs().Index,
		Type: unix.RTN_BROADCAST, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_LINK,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func n3() plan.Node {
	return plan.Node{Name: "n3", PodCIDRs: []string{"10.244.3.0/24"}, InternalIPs: []string{"172.18.0.13"}}
}

// readTold is what ebpfctl finds.
func (l *loop) readTold(t *testing.T) (c observe.Cluster) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(l.cfg.State, observe.ClusterFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(content, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRefusedRouteHurtsNobodyElse(t *testing.T) {
	bad := n2()
	bad.InternalIPs = []string{noGateway}
	check := func(t *testing.T, l *loop) {
		t.Helper()
		if why := l.status.reason(); why != "" {
			t.Errorf("not ready: %s", why)
		}
		if _, err := os.Stat(l.files.listPath()); err != nil {
			t.Error(err)
		}
		if problems := l.status.read().problems; problems[problem{"n2", plan.Refused}] != 1 || len(problems) != 1 {
			t.Errorf("problems %v, want one with n2", problems)
		}
		c := l.readTold(t)
		if c.NotReady != "" || len(c.Problems) != 1 || c.Problems[0].Node != "n2" || !strings.Contains(c.Problems[0].Text, noGateway) {
			t.Errorf("ebpfctl is told %+v", c)
		}
	}
	t.Run("from the start", func(t *testing.T) {
		l := testLoop(t)
		refuseGateway(t)
		l.accept(list(n1(), bad, n3()))
		l.pass(t.Context())
		check(t, l)
		if !l.route(t, "10.244.3.0/24") || l.route(t, "10.244.2.0/24") {
			t.Error("not exactly the good node has its route")
		}
	})
	t.Run("by a change", func(t *testing.T) {
		l := testLoop(t)
		refuseGateway(t)
		l.accept(list(n1(), n2(), n3()))
		l.pass(t.Context())
		l.accept(list(n1(), bad))
		if !l.replan(t.Context()) {
			t.Errorf("the change of the Nodes failed: %s", l.status.reason())
		}
		check(t, l)
		if _, ok := l.destination(t, "10.244.3.0/24"); ok || l.route(t, "10.244.3.0/24") {
			t.Error("what is of a node that is gone is still there")
		}
		l.accept(list(n1(), n2()))
		l.pass(t.Context())
		if problems := l.status.read().problems; len(problems) != 0 || !l.route(t, "10.244.2.0/24") {
			t.Errorf("after the node was put right: problems %v", problems)
		}
	})
}

func TestToldIsForPeopleOnly(t *testing.T) {
	l := testLoop(t)
	inTheWay := filepath.Join(l.cfg.State, observe.ClusterFile+".next")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	ready(t, l)
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if c := l.readTold(t); len(c.Nodes) != 1 || c.Nodes[0].Name != "n2" {
		t.Errorf("told %+v once it could be", c)
	}
}

func TestToldWhyNotReady(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	told, err := publishStarting(l.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	if c := l.readTold(t); c.NotReady != starting || len(c.Nodes) != 1 {
		t.Errorf("at the start of the next agent: %+v", c)
	}
	l.published, l.known, l.nodes, l.view = told, false, nil, nil
	l.accept(source.Update{Err: os.ErrDeadlineExceeded})
	l.judge()
	if c := l.readTold(t); !strings.Contains(c.NotReady, os.ErrDeadlineExceeded.Error()) || len(c.Nodes) != 1 {
		t.Errorf("without a list of Nodes: %+v", c)
	}
	l.accept(list(n2()))
	l.standing = plan.Standing{}
	l.pass(t.Context())
	if c := l.readTold(t); c.NotReady != l.status.reason() || !strings.Contains(c.NotReady, "no Node n1") {
		t.Errorf("without a Node of its own: %+v", c)
	}
}

func TestToldIsMadeAnew(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, observe.ClusterFile)
	for _, content := range []string{"", "{", `{"nodes": 5}`, "[]"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := publishStarting(dir); err != nil || c.NotReady != starting || c.Nodes != nil {
			t.Errorf("over %q: %+v, %v", content, c, err)
		}
	}
}

func TestCountPods(t *testing.T) {
	l := testLoop(t)
	for address, ifindex := range map[string]uint32{"10.244.1.2": 7, "fd00::2": 7, "10.244.1.3": 9} {
		key := endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr(address))}
		if err := l.dp.Maps.Endpoints.Put(key, endpoints.Value{Ifindex: ifindex}); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := countPods(l.dp.Maps.Endpoints); n != 2 || err != nil {
		t.Errorf("%d pods, error %v; want 2: one has two addresses", n, err)
	}
}

// A fault that returns is said again.
func TestForeignRouteIsSaidEachTime(t *testing.T) {
	l := testLoop(t)
	said := logged(l)
	link, err := l.host.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	foreign := device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24"), Index: link.Index, Gateway: netip.MustParseAddr("172.18.0.99"), Foreign: true}
	l.accept(list(n1(), n2()))
	for times := 1; times <= 2; times++ {
		if err := l.host.DeleteRoute(device.Route{Dst: foreign.Dst}); err != nil {
			t.Fatal(err)
		}
		if err := l.host.ReplaceRoute(foreign); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
		l.pass(t.Context())
		if got := strings.Count(said.String(), "somebody else's"); got != times {
			t.Errorf("said %d times, want %d:\n%s", got, times, said.String())
		}
		route := netlink.Route{Dst: &net.IPNet{IP: foreign.Dst.Addr().AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if err := netlink.RouteDel(&route); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
		if !l.route(t, "10.244.2.0/24") {
			t.Error("our route does not take its place")
		}
	}
}
