package agent

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// small is a map like another one, with room for few entries.
func small[K comparable, V any](t *testing.T, like *typed.Map[K, V], name string, entries uint32) *typed.Map[K, V] {
	t.Helper()
	info, err := like.Info()
	if err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: info.Type, KeySize: info.KeySize, ValueSize: info.ValueSize, MaxEntries: entries, Flags: info.Flags,
	})
	if err != nil {
		t.Fatal(err)
	}
	return typed.New[K, V](m, name) // which is closed with the others
}

// sideUplink is a second interface that leads out, to nobody whom pods need.
func sideUplink(t *testing.T) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "side"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "beyond"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"side", "beyond"} {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if name == "side" && err == nil {
			_, dst, _ := net.ParseCIDR("192.0.2.0/24")
			err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// settings is a /proc/sys with what it is given.
func settings(t *testing.T, values map[string]string) string {
	t.Helper()
	return someSysctls(t, values).dir
}

// unforward turns forwarding off, where it can't be turned on again.
func unforward(t *testing.T, l *loop) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(l.cfg.ProcSys, ipForward), []byte("0"), 0))
	l.sysctls.Dir = settings(t, map[string]string{forwardingOf("uplink"): "1", reservedPorts: ""})
}

// repairs is how many of a kind are counted.
func (l *loop) repairs(t *testing.T, what string) (n float64) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(l.status.repairs)
	families, err := reg.Gather()
	must(t, err)
	for _, series := range families[0].GetMetric() {
		if series.GetLabel()[0].GetValue() == what {
			n = series.GetCounter().GetValue()
		}
	}
	return n
}

// essentials counts what the map of destinations can't do without.
func (l *loop) essentials() (n int) {
	for k := range l.plan.Destinations {
		if plan.Essential(l.plan.Destinations, k) {
			n++
		}
	}
	return n
}

// fault is what goes wrong on a node that carries pods, and what becomes of the node.
type fault struct {
	happen func(t *testing.T, l *loop)
	// notReady is why no pod can be carried any more; empty: pods are carried, and controller is degraded by says.
	notReady         string
	controller, says string
}

func faults() map[string]fault {
	return map[string]fault{
		"no room for the addresses of other nodes": {func(t *testing.T, l *loop) {
			l.dp.Maps.Destinations = small(t, l.dp.Maps.Destinations, destinations.Name, uint32(l.essentials()+1))
		}, "", "cluster", "entries): without 0 podCIDRs and 1 addresses of other nodes, so those are treated as the world is"},
		"no room for this node's own addresses": {func(t *testing.T, l *loop) {
			l.dp.Maps.Destinations = small(t, l.dp.Maps.Destinations, destinations.Name, 2)
		}, "map destinations is full (2 entries), and 4 more", "", ""},
		"no room for an uplink that pods don't need": {func(t *testing.T, l *loop) {
			sideUplink(t)
			l.dp.Maps.Uplinks = small(t, l.dp.Maps.Uplinks, uplinks.Name, 1)
		}, "", "uplinks", "map uplinks is full (1 entries), and others are needed more: no programs on side;"},
		"the only room is held by an uplink that pods don't need": {func(t *testing.T, l *loop) {
			sideUplink(t)
			m := small(t, l.dp.Maps.Uplinks, uplinks.Name, 1)
			link, err := netlink.LinkByName("side")
			must(t, err)
			must(t, m.Put(uplinks.Key{Ifindex: uint32(link.Attrs().Index)}, uplinks.Value{}))
			l.dp.Maps.Uplinks = m
		}, "", "uplinks", "no programs on side;"},
		"no room for an uplink that pods need": {func(t *testing.T, l *loop) {
			sideUplink(t)
			link, err := netlink.LinkByName("side")
			must(t, err)
			_, world, _ := net.ParseCIDR("0.0.0.0/0")
			must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: world, Scope: netlink.SCOPE_LINK}))
			l.dp.Maps.Uplinks = small(t, l.dp.Maps.Uplinks, uplinks.Name, 1)
		}, "uplinks: map uplinks is full (1 entries), and others are needed more: no programs on side;", "", ""},
		"a state file is corrupt": {func(t *testing.T, l *loop) {
			must(t, os.MkdirAll(endpoint.Dir(l.cfg.State), 0o700))
			must(t, os.WriteFile(filepath.Join(endpoint.Dir(l.cfg.State), "c1:eth0.json"), []byte("{"), 0o600))
		}, "", "endpoints", "c1:eth0.json"},
		"the addresses can't be listed": {func(t *testing.T, l *loop) {
			must(t, os.WriteFile(filepath.Join(l.cfg.State, "ipam"), nil, 0o600))
		}, "", "endpoints", "not a directory"},
		"somebody else has a route": {func(t *testing.T, l *loop) {
			_, dst, _ := net.ParseCIDR("10.244.2.0/24")
			link, err := netlink.LinkByName("uplink")
			must(t, err)
			must(t, netlink.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Protocol: 4}))
		}, "", "cluster", "the route is somebody else's"},
		"the network can't be looked at": {func(t *testing.T, l *loop) {
			must(t, l.dp.Maps.Destinations.Close())
		}, "", "network", "read map destinations"},
		"the source of Nodes is lost": {func(_ *testing.T, l *loop) {
			l.accept(source.Update{Err: errors.New("connection refused"), Changed: time.Now()})
		}, "", "source", "connection refused"},
		"netfilter needs other programs": {func(t *testing.T, l *loop) {
			l.mode.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, errors.New("refused")}, time.Now())
		}, "", "mode", "could not be replaced"},
		"ports can't be reserved": {func(t *testing.T, l *loop) {
			l.sysctls.close()
			l.sysctls.ports, l.sysctls.Dir = nil, settings(t, map[string]string{ipForward: "1", forwardingOf("uplink"): "1"})
		}, "", "sysctls", "ip_local_reserved_ports"},

		"packets can't be forwarded": {unforward, "sysctls: read sysctl: open ", "", ""},
		"the tunnel's port is taken": {func(t *testing.T, l *loop) {
			l.cfg.RoutingMode = RouteAuto
			takeTunnelPort(t)
		}, "", "tunnel", "4789 is the device flannel.1's: free it, or set another --vxlan-port"},
		"the tunnel's port is taken, and a node needs it": {func(t *testing.T, l *loop) {
			l.cfg.RoutingMode = RouteVXLAN
			takeTunnelPort(t)
		}, "tunnel: tunnel device ec-vxlan: the UDP port is taken", "", ""},
		"config can't be written": {func(t *testing.T, l *loop) {
			must(t, l.dp.Maps.Config.Close())
		}, "cluster: look up ", "", ""},
		"the plugin can't be installed": {func(_ *testing.T, l *loop) { l.cfg.Plugin += ".gone"; l.files.cfg.Plugin += ".gone" },
			"files: install the plugin: ", "", ""},
		"the list can't be read": {func(t *testing.T, l *loop) {
			must(t, os.RemoveAll(l.cfg.Conf))
			must(t, os.WriteFile(l.cfg.Conf, nil, 0o600))
		}, "files: read network configuration list: ", "", ""},
		"the list can't be written": {func(t *testing.T, l *loop) {
			must(t, os.RemoveAll(l.cfg.Conf))
			must(t, os.Symlink("nowhere", l.cfg.Conf))
		}, "files: write network configuration list: ", "", ""},
		"this node has no podCIDR": {func(_ *testing.T, l *loop) {
			l.standing.Own = nil
			l.accept(list(n2()))
		}, "no Node n1 in the list", "", ""},
		"another network has left a link": {func(t *testing.T, l *loop) {
			l.standing.Own = nil
			must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}}))
			link, err := netlink.LinkByName("cni0")
			must(t, err)
			must(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 244, 1, 1), Mask: net.CIDRMask(24, 32)}}))
		}, "addresses of this node: cni0 has 10.244.1.1;", "", ""},
		"Nodes were never read": {func(_ *testing.T, l *loop) {
			l.known = false
			l.accept(source.Update{Err: errors.New("connection refused"), Changed: time.Now()})
		}, "no list of Nodes: connection refused", "", ""},
	}
}

// Only what keeps pods from being carried makes a node not ready. It would have all its pods taken away, and a fault that
// all nodes have would take the cluster.
func TestNotReadyOrDegraded(t *testing.T) {
	for name, f := range faults() {
		t.Run(name, func(t *testing.T) {
			l := testLoop(t)
			ready(t, l)
			if degraded := l.complaints.degraded(); len(degraded) > 0 {
				t.Fatalf("degraded before: %v", degraded)
			}
			f.happen(t, l)
			l.pass(t.Context())
			l.inspect(t.Context())
			l.judge()
			if why := l.status.reason(); (why == "") != (f.notReady == "") || !strings.Contains(why, f.notReady) {
				t.Errorf("not ready because of %q, want %q", why, f.notReady)
			}
			told := l.readTold(t)
			if told.NotReady != l.status.reason() {
				t.Errorf("ebpfctl is told %q", told.NotReady)
			}
			if f.controller == "" {
				return
			}
			found := false
			for _, d := range told.Degraded {
				found = found || strings.HasPrefix(d.About, f.controller+"/") && strings.Contains(d.Text, f.says)
			}
			if !found {
				t.Errorf("degraded: %v, want %s by %q", told.Degraded, f.controller, f.says)
			}
			reg := prometheus.NewPedanticRegistry()
			reg.MustRegister(metrics{l.node})
			families, err := reg.Gather()
			must(t, err)
			for _, family := range families {
				if family.GetName() != "ebpf_cni_degraded" {
					continue
				}
				for _, series := range family.GetMetric() {
					of := series.GetLabel()[0].GetValue()
					if is := series.GetGauge().GetValue() == 1; is != (of == f.controller) {
						t.Errorf("ebpf_cni_degraded of %s: %v", of, is)
					}
				}
			}
		})
	}
}

// The labels of the metric are the names that ARCHITECTURE.md explains.
func TestControllersAreExplained(t *testing.T) {
	content, err := os.ReadFile("../../ARCHITECTURE.md")
	must(t, err)
	_, table, _ := strings.Cut(string(content), "| controller | owns |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var explained []string
	for row := range strings.Lines(table) {
		names, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		for name := range strings.SplitSeq(names, ", ") {
			explained = append(explained, strings.Trim(name, "`"))
		}
	}
	if diff := cmp.Diff(controllers, explained); diff != "" {
		t.Errorf("-in the metric +in ARCHITECTURE.md:\n%s", diff)
	}
}

// A name that a step has and the metric lacks would be a series that comes only with the fault.
func TestEachControllerHasASeries(t *testing.T) {
	l := testLoop(t)
	for _, s := range l.steps {
		if _, known := controllersOf(nil)[s.controller]; !known {
			t.Errorf("%s has none", s.controller)
		}
	}
}
