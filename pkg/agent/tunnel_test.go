package agent

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// takeTunnelPort puts another network's device in the place of ours.
func takeTunnelPort(t *testing.T) {
	t.Helper()
	ours, err := netlink.LinkByName(tunnelName)
	must(t, err)
	must(t, netlink.LinkDel(ours))
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "flannel.1"
	other := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1, Port: 4789}
	must(t, netlink.LinkAdd(other))
	must(t, netlink.LinkSetUp(other))
}

// readyWith is ready in a routing mode.
func readyWith(t *testing.T, mode RoutingMode) *loop {
	t.Helper()
	l := testLoop(t)
	l.cfg.RoutingMode = mode
	ready(t, l)
	return l
}

// assertTunnel: device, address, programs and what the programs are told of it.
func assertTunnel(t *testing.T, l *loop) {
	t.Helper()
	link, err := l.host.LinkByName(tunnelName)
	must(t, err)
	if want := (device.VXLAN{Port: 4789, FlowBased: true}); link.VXLAN != want || !link.Up() || link.MTU != 1450 || !bytes.Equal(link.MAC, l.tunnel.mac) || !isLocalMAC(link.MAC) {
		t.Errorf("the device is %+v", link)
	}
	for _, hook := range attach.TunnelHooks() {
		if is, err := l.dp.Attached(link.Index, hook); !is || err != nil {
			t.Errorf("%s attached: %v, %v", hook, is, err)
		}
	}
	addresses, err := l.host.Addresses()
	must(t, err)
	var own []netip.Prefix
	for _, a := range addresses {
		if a.Index == link.Index {
			own = append(own, a.Prefix)
		}
	}
	if !slices.Equal(own, []netip.Prefix{netip.MustParsePrefix("10.244.1.0/32")}) {
		t.Errorf("the device's addresses are %v", own)
	}
	c, err := l.dp.Maps.Config.Get(config.Key{})
	must(t, err)
	if c.TunnelIfindex != uint32(link.Index) || c.Tunnel[wire.IPv4].Source.String() != "172.18.0.11" || c.Tunnel[wire.IPv4].Address.String() != "10.244.1.0" {
		t.Errorf("config is %+v", c)
	}
	if v, _ := l.destination(t, "10.244.1.0/32"); v.Kind != destinations.Host {
		t.Errorf("the device's address is %s", v.Kind)
	}
}

// A node in any mode understands those that send through the tunnel.
func TestTunnelInEveryMode(t *testing.T) {
	for mode, want := range map[RoutingMode]destinations.Way{RouteDirect: destinations.Direct, RouteAuto: destinations.Direct, RouteVXLAN: destinations.Tunnel} {
		t.Run(string(mode), func(t *testing.T) {
			l := readyWith(t, mode)
			assertTunnel(t, l)
			if v, _ := l.destination(t, "10.244.2.0/24"); v.Way() != want {
				t.Errorf("the other node's pods are reached %s, want %s", v.Way(), want)
			}
			if l.planned.facts.Tunnel == 0 || slices.Contains(l.planned.facts.Local, netip.MustParsePrefix("10.244.1.0/32")) || len(l.plan.Problems) != 0 {
				t.Errorf("planned for %+v, problems %v", l.planned.facts, l.plan.Problems)
			}
			l.pass(t.Context()) // which finds the device's address
			first := l.planned
			l.pass(t.Context())
			if assertTunnel(t, l); l.planned != first {
				t.Error("the device's own address is taken for a change")
			}
		})
	}
}

func TestTunnelComesBack(t *testing.T) {
	l := readyWith(t, RouteVXLAN)
	index, log := l.tunnel.index, logged(l)
	for _, change := range []struct {
		do   func() error
		says string // in one line; nothing: in none
	}{
		{func() error { return l.host.DeleteLink(index) }, "tunnel device mended"},
		{func() error { return l.host.SetDown(index) }, "tunnel device mended"},
		{func() error { return l.host.SetMAC(index, randomMAC()) }, "tunnel device mended"},
		{func() error { return l.host.DeleteAddress(index, netip.MustParsePrefix("10.244.1.0/32")) }, "address of the tunnel device restored"},
		{func() error { return l.host.AddAddress(index, netip.MustParsePrefix("192.0.2.1/24")) }, ""},
		{func() error { return l.dp.DetachUplink(index) }, ""},
		{netfilter.RemoveTable, "does not track the tunnel's packets restored"},
	} {
		must(t, change.do())
		log.Reset()
		l.pass(t.Context())
		assertTunnel(t, l)
		if said := strings.Count(log.String(), "tunnel"); said != min(1, len(change.says)) || !strings.Contains(log.String(), change.says) {
			t.Errorf("not %q alone:\n%s", change.says, log)
		}
		if l.tunnel.index != index || !l.route(t, "10.244.2.0/24") {
			t.Errorf("the device has index %d, and had %d; the route is there: %v", l.tunnel.index, index, l.route(t, "10.244.2.0/24"))
		}
	}
}

// What carries packets is not taken away because of a sysctl.
func TestTunnelWithoutItsSysctls(t *testing.T) {
	l := readyWith(t, RouteVXLAN)
	l.tunnel.sysctl.Dir = t.TempDir()
	must(t, os.MkdirAll(filepath.Join(l.tunnel.sysctl.Dir, forwardingOf(tunnelName)), 0o700)) // which no value can be read from
	l.pass(t.Context())
	assertTunnel(t, l)
	if v, _ := l.destination(t, "10.244.2.0/24"); v.Way() != destinations.Tunnel {
		t.Errorf("the other node's pods are reached %s", v.Way())
	}
	if why, text := l.status.reason(), l.complaints.degraded()["tunnel/pass"]; why != "" || !strings.Contains(text, forwardingOf(tunnelName)) {
		t.Errorf("not ready %q, degraded %q", why, text)
	}
}

// In mode direct a taken port is no reason to call a node degraded.
func TestTakenPortInModeDirect(t *testing.T) {
	l := readyWith(t, RouteDirect)
	log := logged(l)
	takeTunnelPort(t)
	for range 3 {
		l.pass(t.Context())
		l.inspect(t.Context())
	}
	if why, degraded := l.status.reason(), l.complaints.degraded(); why != "" || len(degraded) != 0 {
		t.Errorf("not ready %q, degraded %v", why, degraded)
	}
	if strings.Count(log.String(), "flannel.1") != 1 {
		t.Errorf("not said once:\n%s", log)
	}
	if c, err := l.dp.Maps.Config.Get(config.Key{}); err != nil || c.TunnelIfindex != 0 {
		t.Errorf("the programs are told of device %d, error %v", c.TunnelIfindex, err)
	}
	other, err := netlink.LinkByName("flannel.1")
	must(t, err)
	must(t, netlink.LinkDel(other))
	l.pass(t.Context())
	assertTunnel(t, l)
}

// Nodes that change their way do so without another look at the network.
func TestWayOfANodeThatMoves(t *testing.T) {
	l := readyWith(t, RouteAuto)
	uplink, err := l.host.LinkByName("uplink")
	must(t, err)
	must(t, l.host.ReplaceRoute(device.Route{Dst: netip.MustParsePrefix("203.0.113.0/24"), Index: uplink.Index, Gateway: netip.MustParseAddr("172.18.0.1"), Foreign: true}))
	l.pass(t.Context())
	far := n2()
	far.InternalIPs = []string{"203.0.113.12"}
	for _, step := range []struct {
		node plan.Node
		want destinations.Way
	}{{far, destinations.Tunnel}, {n2(), destinations.Direct}, {far, destinations.Tunnel}} {
		l.accept(list(n1(), step.node))
		if !l.replan(t.Context()) {
			t.Errorf("degraded: %v", l.complaints.degraded())
		}
		if v, _ := l.destination(t, "10.244.2.0/24"); v.Way() != step.want {
			t.Errorf("pods of %s are reached %s, want %s", step.node.InternalIPs, v.Way(), step.want)
		}
		route, _, err := l.host.RouteTo(netip.MustParsePrefix("10.244.2.0/24"))
		must(t, err)
		if tunnelled := route.Index == l.tunnel.index && route.MTU == 1450 && !route.Gateway.IsValid(); tunnelled != (step.want == destinations.Tunnel) || route.Unreachable {
			t.Errorf("the route there is %+v, want %s", route, step.want)
		}
	}
}

// Somebody else's device of that name keeps its addresses, and this node them as its own.
func TestForeignDeviceInTheTunnelsPlace(t *testing.T) {
	l := testLoop(t)
	l.cfg.RoutingMode = RouteAuto
	attrs := netlink.NewLinkAttrs()
	attrs.Name = tunnelName
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}))
	foreign, err := l.host.LinkByName(tunnelName)
	must(t, err)
	must(t, l.host.AddAddress(foreign.Index, netip.MustParsePrefix("192.0.2.9/32")))
	ready(t, l)
	if v, _ := l.destination(t, "192.0.2.9/32"); v.Kind != destinations.Host {
		t.Errorf("its address is %s", v.Kind)
	}
	if text := l.complaints.degraded()["tunnel/pass"]; !strings.Contains(text, "none of ours") {
		t.Errorf("degraded: %q", text)
	}
	if is, err := l.host.LinkByName(tunnelName); err != nil || is.Index != foreign.Index {
		t.Errorf("the device was %+v and is %+v, %v", foreign, is, err)
	}
}

// An agent that starts takes the device as an agent before has left it, or somebody else: with its MAC address, and under another
// name with its number. No two devices have one address.
func TestTunnelOfAnAgentBefore(t *testing.T) {
	l := readyWith(t, RouteVXLAN)
	index, mac := l.tunnel.index, l.tunnel.mac
	restart := func() {
		t.Helper()
		l.tunnel = &tunnelController{node: l.node, sysctl: l.tunnel.sysctl, mode: l.mode}
		l.tunnel.complete(l.view)
		must(t, l.tunnel.failed)
		if l.tunnel.index != index {
			t.Errorf("the device has index %d, and had %d", l.tunnel.index, index)
		}
		assertTunnel(t, l)
	}
	restart()
	if !bytes.Equal(l.tunnel.mac, mac) {
		t.Errorf("its address was %s, and is %s", mac, l.tunnel.mac)
	}
	link, err := netlink.LinkByIndex(index)
	must(t, err)
	must(t, netlink.LinkSetName(link, "other0"))
	restart()
	must(t, l.host.SetMAC(index, net.HardwareAddr{0x00, 0x50, 0x56, 1, 2, 3})) // assigned to somebody
	restart()
	must(t, l.host.DeleteLink(index))
	l.tunnel.mac, l.tunnel.former = nil, 0
	l.tunnel.complete(l.view)
	if must(t, l.tunnel.failed); bytes.Equal(l.tunnel.mac, mac) {
		t.Errorf("made anew it has the address that another one had: %s", mac)
	}
}

// While the device is there its programs are: they are what knows who may send through it.
func TestCleanupRemovesTheTunnelBeforeItsPrograms(t *testing.T) {
	l := readyWith(t, RouteVXLAN)
	busy, err := os.OpenFile(filepath.Join(l.cfg.State, datapath.LoadLock), os.O_CREATE|os.O_RDWR, 0o600)
	must(t, err)
	defer busy.Close()
	must(t, unix.Flock(int(busy.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := Cleanup(ctx, l.cfg.Directories, l.log); err == nil || !strings.Contains(err.Error(), "dataplane") {
		t.Fatalf("cleanup is not stopped at the programs: %v", err)
	}
	if left, err := l.host.LinkByName(tunnelName); !errors.Is(err, device.ErrNotFound) {
		t.Errorf("the device is left: %+v, %v", left, err)
	}
}
