package agent

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

func TestHostPortsAreRepaired(t *testing.T) {
	l, e := withPod(t)
	h := endpoint.HostPort{Address: netip.IPv4Unspecified(), Port: 8080, Protocol: "tcp", PodPort: 80}
	e.HostPorts = []endpoint.HostPort{h}
	must(t, endpoint.Write(l.cfg.State, e))
	want := e.HostPortEntry(h)
	for what, damage := range map[string]func() error{
		"missing":          func() error { return l.dp.Maps.HostPorts.Delete(h.Key()) },
		"of a dead link":   func() error { return l.dp.Maps.HostPorts.Put(h.Key(), hostports.Value{Ifindex: 4242}) },
		"another address":  func() error { return l.dp.Maps.HostPorts.Put(h.Key(), hostports.Value{Ifindex: want.Ifindex}) },
		"as it has to be ": func() error { return nil },
	} {
		must(t, damage())
		l.pass(t.Context())
		l.assertReady(t)
		l.assertWhole(t, e)
		if have, err := l.dp.Maps.HostPorts.Get(h.Key()); have != want {
			t.Errorf("%s: the entry is %+v, error %v; want %+v", what, have, err, want)
		}
	}
}
