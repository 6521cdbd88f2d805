package agent

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

const podRoute = "10.244.1.9/32"

// addPod makes an endpoint as the plugin would, but for what a pass adds.
func addPod(t *testing.T, l *loop) endpoint.Endpoint {
	t.Helper()
	return addPodOf(t, l, "repaired", netip.MustParsePrefix(podRoute).Addr().String())
}

func addPodOf(t *testing.T, l *loop, container, address string) endpoint.Endpoint {
	t.Helper()
	id := endpoint.ID{ContainerID: container, IfName: "eth0"}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = id.HostLinkName()
	inside := "in-" + container
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: inside}); err != nil {
		t.Fatal(err)
	}
	var ends [2]device.Link
	for i, name := range []string{attrs.Name, inside} {
		link, err := l.host.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.host.SetUp(link.Index); err != nil {
			t.Fatal(err)
		}
		ends[i] = link
	}
	ns := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(ns, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e := endpoint.Endpoint{
		ID: id, Network: install.Network, NetNS: ns, NetNSInode: 7, HostName: attrs.Name, HostIndex: ends[0].Index,
		HostMAC: wire.MAC(ends[0].MAC), PodMAC: wire.MAC(ends[1].MAC),
		Addresses: []netip.Addr{netip.MustParseAddr(address)}, IPAM: endpoint.HostLocal,
	}
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	return e
}

// withPod is a node that carries one pod, all of which is there.
func withPod(t *testing.T) (*loop, endpoint.Endpoint) {
	t.Helper()
	l := testLoop(t)
	ready(t, l)
	e := addPod(t, l)
	l.pass(t.Context())
	l.assertReady(t)
	l.assertWhole(t, e)
	return l, e
}

func (l *loop) assertReady(t *testing.T) {
	t.Helper()
	if why := l.status.reason(); why != "" {
		t.Errorf("not ready: %s", why)
	}
}

// assertWhole looks anew whether anything is missing of an endpoint.
func (l *loop) assertWhole(t *testing.T, e endpoint.Endpoint) {
	t.Helper()
	v, err := look(l.host, l.cfg, plan.FamilySet{wire.IPv4: true}, earlier{asked: l.asked})
	if err != nil {
		t.Fatal(err)
	}
	l.view = v
	for _, what := range l.endpoints.work(&l.state, e).Damage() {
		t.Errorf("the %s is not repaired", what)
	}
}

// source is that of a route of ours; without the route the test ends.
func (l *loop) source(t *testing.T, prefix string) netip.Addr {
	t.Helper()
	routes, err := l.host.OwnRoutes()
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range routes {
		if route.Dst.String() == prefix {
			return route.Source
		}
	}
	t.Fatalf("there is no route to %s", prefix)
	return netip.Addr{}
}

// What the host needs to reach a pod, and what the programs know of it.
func TestEndpointIsRepaired(t *testing.T) {
	l, e := withPod(t)
	entry := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}
	dev := devices.Key{Ifindex: uint32(e.HostIndex)}
	wrong := e.Entry()
	wrong.PodMAC = wire.MAC{1, 2, 3}
	for what, do := range map[string]func() error{
		"neighbour":         func() error { return l.host.DeleteNeighbour(e.HostIndex, e.Addresses[0]) },
		"another neighbour": func() error { return l.host.ReplaceNeighbour(e.HostIndex, e.Addresses[0], e.HostMAC[:]) },
		"Ethernet address":  func() error { return l.host.SetMAC(e.HostIndex, net.HardwareAddr{2, 1, 2, 3, 4, 5}) },
		"link state":        func() error { return l.host.SetDown(e.HostIndex) },
		"route": func() error {
			return l.host.DeleteRoute(l.endpoints.work(&l.state, e).Route(e.Addresses[0]))
		},
		"route's source": func() error {
			way := l.endpoints.work(&l.state, e).Route(e.Addresses[0])
			way.Source = netip.Addr{}
			return l.host.ReplaceRoute(way)
		},
		"program": func() error { return attach.Attacher{Dir: l.cfg.BPFFS}.Detach(e.HostIndex, attach.FromPod) },
		"sysctl": func() error {
			_, err := l.sysctls.Set(forwardingOf(e.HostName), "0")
			return err
		},
		"no endpoint entry":    func() error { return l.dp.Maps.Endpoints.Delete(entry) },
		"wrong endpoint entry": func() error { return l.dp.Maps.Endpoints.Put(entry, wrong) },
		"no device entry":      func() error { return l.dp.Maps.Devices.Delete(dev) },
		"empty device entry":   func() error { return l.dp.Maps.Devices.Put(dev, devices.Value{}) },
	} {
		if err := do(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		l.pass(t.Context())
		l.assertReady(t)
		l.assertWhole(t, e)
		if mac := l.view.links[e.HostIndex].MAC; !bytes.Equal(mac, e.HostMAC[:]) {
			t.Errorf("%s: the link's address is %s, want %s", what, mac, e.HostMAC)
		}
		if have := l.view.neighbours[e.HostIndex]; !slices.ContainsFunc(have, func(n device.Neighbour) bool { return n.Is(e.Addresses[0], e.PodMAC[:]) }) {
			t.Errorf("%s: the pod's neighbours are %v, want %s", what, have, e.PodMAC)
		}
		if have, err := l.dp.Maps.Endpoints.Get(entry); have != e.Entry() {
			t.Errorf("%s: the endpoints entry is %+v, error %v", what, have, err)
		}
		if have, err := l.dp.Maps.Devices.Get(dev); have.Addresses[wire.IPv4] != entry.Address || have.PodMAC != e.PodMAC {
			t.Errorf("%s: the devices entry is %+v, error %v", what, have, err)
		}
	}
}

// Where Services are served, a program sees what is sent to the pod. A filter that somebody removes is told of by the kernel.
func TestProgramToThePodIsRepaired(t *testing.T) {
	l, e := withPod(t)
	attached := func() bool {
		ok, err := l.dp.Attached(e.HostIndex, attach.ToPod)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if attached() {
		t.Error("it is there without Services")
	}
	l.hostPortsAsked = true
	restartServices(t, l)
	l.pass(t.Context())
	l.services.place(told(t, l))
	for range 2 {
		l.pass(t.Context())
		l.assertReady(t)
		l.assertWhole(t, e)
		if v, err := l.dp.Maps.Config.Get(config.Key{}); v.Flags&config.Services == 0 || !attached() {
			t.Errorf("config %+v, %v; attached: %v", v, err, attached())
		}
		if l.alarm.outline.Load().weigh(device.Event{Kind: device.FilterEvent, Index: e.HostIndex, Gone: true})&urgent == 0 {
			t.Error("a filter that goes calls for no pass")
		}
		if err := (attach.Attacher{Dir: l.cfg.BPFFS}).Detach(e.HostIndex, attach.ToPod); err != nil {
			t.Fatal(err)
		}
	}
}

// What ADD makes of a pod of both families, a repair makes of it: addresses outside the podCIDR too.
func TestEndpointOfBothFamiliesIsRepaired(t *testing.T) {
	l, e := withPod(t)
	e.Addresses = append(e.Addresses, netip.MustParseAddr("fd00:9::9"))
	if err := endpoint.Write(l.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	forwarding := "net/ipv6/conf/" + e.HostName + "/forwarding"
	if _, err := l.sysctls.Set(forwarding, "0"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		l.pass(t.Context())
		l.assertReady(t)
		l.assertWhole(t, e)
		if have, err := l.sysctls.Get(forwarding); have != "1" {
			t.Errorf("%s is %q, error %v", forwarding, have, err)
		}
		if v, ok := l.destination(t, "fd00:9::9/128"); !ok || v.Kind != destinations.Local {
			t.Errorf("the destinations entry is %+v, %v", v, ok)
		}
	}
}

func TestRepairedDeviceKeepsItsCounters(t *testing.T) {
	l, e := withPod(t)
	key := devices.Key{Ifindex: uint32(e.HostIndex)}
	counted := devices.Value{SnatFlows: 3, ConntrackFlows: 4, Packets: 5, Bytes: 600}
	if err := l.dp.Maps.Devices.Put(key, counted); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	have, err := l.dp.Maps.Devices.Get(key)
	if have.Packets < counted.Packets || have.Bytes < counted.Bytes {
		t.Errorf("%d packets, %d bytes, error %v; want what was counted before or more", have.Packets, have.Bytes, err)
	}
	counted.Packets, counted.Bytes = have.Packets, have.Bytes // the pod's kernel goes on asking for routers
	counted.PodMAC, counted.HostMAC = e.PodMAC, e.HostMAC
	counted.Addresses = wire.AddressesFrom(e.Addresses...)
	if have != counted {
		t.Errorf("the entry is %+v, error %v", have, err)
	}
}

// An address may have been given on to a pod whose own entry is right.
func TestEntryOfAnotherPodIsNotTaken(t *testing.T) {
	l, e := withPod(t)
	up := l.view.uplinks[0].Index // any link that is there
	key, its := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}, endpoints.Value{Ifindex: up}
	if err := l.dp.Maps.Endpoints.Put(key, its); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if have, err := l.dp.Maps.Endpoints.Get(key); have != its {
		t.Errorf("the entry is %+v, error %v", have, err)
	}
}

// A new version may want another setting of every pod's link: that is one thing to tell.
func TestRepairsOfManyAreToldInOneLine(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	log := logged(l)
	var last endpoint.Endpoint
	for i := range mostLines + 1 {
		last = addPodOf(t, l, fmt.Sprintf("pod%d", i), fmt.Sprintf("10.244.1.%d", 10+i))
	}
	l.pass(t.Context())
	l.assertWhole(t, last)
	if told := log.String(); strings.Contains(told, "endpoint repaired") || strings.Count(told, "count=6 missing=route") != 1 {
		t.Errorf("many were repaired:\n%s", told)
	}
	log.Reset()
	last.Pod = "shop/web"
	if err := endpoint.Write(l.cfg.State, last); err != nil {
		t.Fatal(err)
	}
	if err := l.host.DeleteRoute(l.endpoints.work(&l.state, last).Route(last.Addresses[0])); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if told := log.String(); strings.Count(told, "repaired") != 1 || !strings.Contains(told, "endpoint="+last.ID.String()+" pod=shop/web ") {
		t.Errorf("one was repaired:\n%s", told)
	}
}
