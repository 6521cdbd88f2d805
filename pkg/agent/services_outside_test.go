package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// outsideService is a Service with something of all that is asked from outside.
func outsideService() service.Update {
	u := complete([]string{"10.244.2.7"})
	s := &u.Services[0]
	s.Ports[0].NodePort, s.ExternalLocal = 30080, true
	s.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.9")}
	s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	return u
}

func TestServicesFromOutsideReachTheMaps(t *testing.T) {
	l := testServices(t)
	l.cfg.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}
	restartServices(t, l)
	l.services.place(here("127.0.0.1", "192.0.2.1", "198.51.100.1"))
	l.services.accept(outsideService())
	content := readServices(t, l)
	got := map[string]string{}
	for k, v := range content.Services {
		name := k.Address.String()
		if k.Port != (wire.Port{}) {
			name = k.Frontend() + " " + k.Proto.String()
		}
		got[name] = v.Flags.String()
	}
	if diff := cmp.Diff(map[string]string{
		"10.96.0.1": "cluster_ip|answers", "10.96.0.1:80 tcp": "-",
		"192.0.2.9": "answers", "192.0.2.9:80 tcp": "external_local|ranges",
		"*:30080 tcp": "external_local", "192.0.2.1": "node|own", "198.51.100.1": "own",
	}, got); diff != "" {
		t.Errorf("frontends (-want +got):\n%s", diff)
	}
	if _, there := content.Ranges[services.RangeKeyFrom(1, netip.MustParsePrefix("203.0.113.0/24"))]; !there || len(content.Ranges) != 1 {
		t.Errorf("ranges %v", content.Ranges)
	}

	restartServices(t, l) // which knows the NodePorts before any Service
	if p := l.services.read().nodePorts; !p.has(30080) {
		t.Errorf("NodePorts %v", p)
	}
	l.services.place(here("127.0.0.1", "192.0.2.1", "198.51.100.1"))
	l.services.accept(outsideService())
	if diff := cmp.Diff(content, readServices(t, l), cmp.AllowUnexported(services.Set{})); diff != "" {
		t.Errorf("after a restart (-before +after):\n%s", diff)
	}
	l.services.place(here("192.0.2.2"))
	if now := readServices(t, l).Services; len(now) != len(content.Services)-1 || now[services.Key{Address: wire.AddrFrom(netip.MustParseAddr("192.0.2.2"))}].Flags != services.Node|services.Own {
		t.Errorf("with another address of the node's: %v", now)
	}
	must(t, emptyServices(l.dp.Maps))
	if left := readServices(t, l); len(left.Services)+len(left.Ranges) > 0 {
		t.Errorf("left: %v, %v", left.Services, left.Ranges)
	}
}

// The kernel gives NodePorts to no socket that asks for any port: at once after a start, and as long as one is there.
func TestNodePortsAreReserved(t *testing.T) {
	l := testServices(t)
	l.services.place(here())
	l.services.accept(complete())
	ready(t, l)
	reserved := func(when, want string) {
		t.Helper()
		l.inspect(t.Context())
		have, err := device.Sysctl{Dir: l.cfg.ProcSys}.Get(reservedPorts)
		must(t, err)
		if want += "50000-60000"; have != want {
			t.Errorf("%s: %q is reserved, want %q", when, have, want)
		}
	}
	reserved("before", "")
	l.services.accept(outsideService())
	reserved("a NodePort", "30080,")
	restartServices(t, l)
	reserved("another agent", "30080,")
	l.services.place(here())
	l.services.accept(service.Update{Complete: true})
	reserved("the Service is gone", "")
	if n := l.repairs(t, repairedSysctl); n != 0 {
		t.Errorf("%v repairs are counted, and nobody has changed anything", n)
	}
}

// What the world and the node itself hold is counted in an entry that is no pod's, keeps its counters, and comes back.
func TestWorldHoldsFlows(t *testing.T) {
	l := testServices(t)
	key := devices.Key{Ifindex: devices.World}
	must(t, l.dp.Maps.Devices.Put(key, devices.Value{SnatFlows: 7}))
	restartServices(t, l)
	if v, err := l.dp.Maps.Devices.Get(key); err != nil || v.SnatFlows != 7 {
		t.Errorf("%+v, error %v", v, err)
	}
	l.services.place(here())
	l.services.accept(complete())
	ready(t, l)
	must(t, l.dp.Maps.Devices.Delete(key))
	registered(l)
	if found := l.complaints.degraded(); len(found) > 0 {
		t.Errorf("metrics are asked for before the entry is made: %v", found)
	}
	for range 2 {
		l.inspect(t.Context())
	}
	if _, err := l.dp.Maps.Devices.Get(key); err != nil {
		t.Error(err)
	}
	if n := l.repairs(t, repairedService); n != 1 {
		t.Errorf("%v repairs are counted", n)
	}
}
