package agent

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
)

const podRoute = "10.244.1.9/32"

// addPod makes an endpoint as the plugin would, but for what a pass adds.
func addPod(t *testing.T, r *reconciler) endpoint.Endpoint {
	t.Helper()
	return addPodOf(t, r, "repaired", netip.MustParsePrefix(podRoute).Addr().String())
}

func addPodOf(t *testing.T, r *reconciler, container, address string) endpoint.Endpoint {
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
		l, err := r.host.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.host.SetUp(l.Index); err != nil {
			t.Fatal(err)
		}
		ends[i] = l
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
	if err := endpoint.Write(r.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	return e
}

// withPod is a node that carries one pod, all of which is there.
func withPod(t *testing.T) (*reconciler, endpoint.Endpoint) {
	t.Helper()
	r := newReconciler(t)
	ready(t, r)
	e := addPod(t, r)
	r.pass(t.Context())
	r.assertReady(t)
	r.assertWhole(t, e)
	return r, e
}

func (r *reconciler) assertReady(t *testing.T) {
	t.Helper()
	if why := r.status.reason(); why != "" {
		t.Errorf("not ready: %s", why)
	}
}

// assertWhole looks anew whether anything is missing of an endpoint.
func (r *reconciler) assertWhole(t *testing.T, e endpoint.Endpoint) {
	t.Helper()
	v, err := look(r.host, r.cfg.State, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.view = v
	for _, what := range r.work(e).Damage() {
		t.Errorf("the %s is not repaired", what)
	}
}

// source is that of a route of ours; without the route the test ends.
func (r *reconciler) source(t *testing.T, prefix string) netip.Addr {
	t.Helper()
	routes, err := r.host.OwnRoutes()
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

// The node's address may go before its Node says so, and come back.
func TestRoutesOutliveTheNodesAddress(t *testing.T) {
	r, _ := withPod(t)
	up, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	address := func(text string) *netlink.Addr {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	internal, other := address("172.18.0.11/24"), address("172.18.0.21/24")
	assert := func(want netip.Addr) {
		t.Helper()
		r.pass(t.Context())
		r.assertReady(t)
		for _, prefix := range []string{"10.244.2.0/24", podRoute} {
			if got := r.source(t, prefix); got != want {
				t.Errorf("the route to %s has source %v, want %v", prefix, got, want)
			}
		}
		_, problems := r.status.counts()
		for p := range problems {
			if p.node != "n1" {
				t.Errorf("node %s is blamed: %v", p.node, problems)
			}
		}
	}
	assert(netip.MustParseAddr("172.18.0.11"))
	if err := netlink.AddrDel(up, internal); err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(up, other); err != nil {
		t.Fatal(err)
	}
	assert(netip.Addr{})
	if err := netlink.AddrAdd(up, internal); err != nil {
		t.Fatal(err)
	}
	assert(netip.MustParseAddr("172.18.0.11"))
	moved := n1()
	moved.InternalIPs = []string{"172.18.0.21"}
	r.take(list(moved, n2()))
	assert(netip.MustParseAddr("172.18.0.21"))
}

// What the host needs to reach a pod, and what the programs know of it.
func TestEndpointIsRepaired(t *testing.T) {
	r, e := withPod(t)
	entry := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}
	dev := devices.Key{Ifindex: uint32(e.HostIndex)}
	wrong := e.Entry()
	wrong.PodMAC = wire.MAC{1, 2, 3}
	for what, do := range map[string]func() error{
		"neighbour":         func() error { return r.host.DeleteNeighbour(e.HostIndex, e.Addresses[0]) },
		"another neighbour": func() error { return r.host.ReplaceNeighbour(e.HostIndex, e.Addresses[0], e.HostMAC[:]) },
		"Ethernet address":  func() error { return r.host.SetMAC(e.HostIndex, net.HardwareAddr{2, 1, 2, 3, 4, 5}) },
		"link state":        func() error { return r.host.SetDown(e.HostIndex) },
		"route": func() error {
			return r.host.DeleteRoute(r.work(e).Route(e.Addresses[0]))
		},
		"route's source": func() error {
			way := r.work(e).Route(e.Addresses[0])
			way.Source = netip.Addr{}
			return r.host.ReplaceRoute(way)
		},
		"program": func() error { return r.dp.Detach(e.HostIndex, attach.FromPod) },
		"sysctl": func() error {
			_, err := r.sysctls.Set(forwardingOf(e.HostName), "0")
			return err
		},
		"no endpoint entry":    func() error { return r.dp.Maps.Endpoints.Delete(entry) },
		"wrong endpoint entry": func() error { return r.dp.Maps.Endpoints.Put(entry, wrong) },
		"no device entry":      func() error { return r.dp.Maps.Devices.Delete(dev) },
		"empty device entry":   func() error { return r.dp.Maps.Devices.Put(dev, devices.Value{}) },
	} {
		if err := do(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		r.pass(t.Context())
		r.assertReady(t)
		r.assertWhole(t, e)
		if mac := r.view.links[e.HostIndex].MAC; !bytes.Equal(mac, e.HostMAC[:]) {
			t.Errorf("%s: the link's address is %s, want %s", what, mac, e.HostMAC)
		}
		if have := r.view.neighbours[e.HostIndex]; !slices.ContainsFunc(have, func(n device.Neighbour) bool { return n.Is(e.Addresses[0], e.PodMAC[:]) }) {
			t.Errorf("%s: the pod's neighbours are %v, want %s", what, have, e.PodMAC)
		}
		if have, err := r.dp.Maps.Endpoints.Get(entry); have != e.Entry() {
			t.Errorf("%s: the endpoints entry is %+v, error %v", what, have, err)
		}
		if have, err := r.dp.Maps.Devices.Get(dev); have.IPv4 != entry.Address || have.PodMAC != e.PodMAC {
			t.Errorf("%s: the devices entry is %+v, error %v", what, have, err)
		}
	}
}

// What ADD makes of a pod of both families, a repair makes of it: addresses outside the podCIDR too.
func TestEndpointOfBothFamiliesIsRepaired(t *testing.T) {
	r, e := withPod(t)
	e.Addresses = append(e.Addresses, netip.MustParseAddr("fd00:9::9"))
	if err := endpoint.Write(r.cfg.State, e); err != nil {
		t.Fatal(err)
	}
	forwarding := "net/ipv6/conf/" + e.HostName + "/forwarding"
	if _, err := r.sysctls.Set(forwarding, "0"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.pass(t.Context())
		r.assertReady(t)
		r.assertWhole(t, e)
		if have, err := r.sysctls.Get(forwarding); have != "1" {
			t.Errorf("%s is %q, error %v", forwarding, have, err)
		}
		if v, ok := r.destination(t, "fd00:9::9/128"); !ok || v.Kind != destinations.Local {
			t.Errorf("the destinations entry is %+v, %v", v, ok)
		}
	}
}

func TestRepairedDeviceKeepsItsCounters(t *testing.T) {
	r, e := withPod(t)
	key := devices.Key{Ifindex: uint32(e.HostIndex)}
	counted := devices.Value{SnatFlows: 3, ConntrackFlows: 4, Packets: 5, Bytes: 600}
	if err := r.dp.Maps.Devices.Put(key, counted); err != nil {
		t.Fatal(err)
	}
	r.pass(t.Context())
	have, err := r.dp.Maps.Devices.Get(key)
	if have.Packets < counted.Packets || have.Bytes < counted.Bytes {
		t.Errorf("%d packets, %d bytes, error %v; want what was counted before or more", have.Packets, have.Bytes, err)
	}
	counted.Packets, counted.Bytes = have.Packets, have.Bytes // the pod's kernel goes on asking for routers
	counted.PodMAC, counted.HostMAC = e.PodMAC, e.HostMAC
	counted.SetAddresses(e.Addresses)
	if have != counted {
		t.Errorf("the entry is %+v, error %v", have, err)
	}
}

// An address may have been given on to a pod whose own entry is right.
func TestEntryOfAnotherPodIsNotTaken(t *testing.T) {
	r, e := withPod(t)
	up := r.view.uplinks[0].Index // any link that is there
	key, its := endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])}, endpoints.Value{Ifindex: up}
	if err := r.dp.Maps.Endpoints.Put(key, its); err != nil {
		t.Fatal(err)
	}
	r.pass(t.Context())
	if have, err := r.dp.Maps.Endpoints.Get(key); have != its {
		t.Errorf("the entry is %+v, error %v", have, err)
	}
}

// A new version may want another setting of every pod's link: that is one thing to tell.
func TestRepairsOfManyAreToldInOneLine(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	log := &bytes.Buffer{}
	r.log = slog.New(slog.NewTextHandler(log, nil))
	var last endpoint.Endpoint
	for i := range mostRepairs + 1 {
		last = addPodOf(t, r, fmt.Sprintf("pod%d", i), fmt.Sprintf("10.244.1.%d", 10+i))
	}
	r.pass(t.Context())
	r.assertWhole(t, last)
	if told := log.String(); strings.Contains(told, "endpoint repaired") || strings.Count(told, "count=6 missing=route") != 1 {
		t.Errorf("many were repaired:\n%s", told)
	}
	log.Reset()
	if err := r.host.DeleteRoute(r.work(last).Route(last.Addresses[0])); err != nil {
		t.Fatal(err)
	}
	r.pass(t.Context())
	if told := log.String(); strings.Count(told, "repaired") != 1 || !strings.Contains(told, "endpoint="+last.ID.String()) {
		t.Errorf("one was repaired:\n%s", told)
	}
}
