package endpoint

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

func TestHostPortEntry(t *testing.T) {
	e := example()
	for i, want := range []struct {
		text  string
		key   hostports.Key
		value hostports.Value
	}{
		{
			"host port 8080/tcp of all IPv4 addresses", hostports.KeyFrom(netip.IPv4Unspecified(), 8080, wire.TCP),
			hostports.Value{PodAddress: wire.AddrFrom(e.Addresses[0]), PodPort: wire.PortFrom(80), Ifindex: 42},
		},
		{
			"host port 53/udp of 2001:db8::1", hostports.KeyFrom(netip.MustParseAddr("2001:db8::1"), 53, wire.UDP),
			hostports.Value{PodAddress: wire.AddrFrom(e.Addresses[1]), PodPort: wire.PortFrom(5353), Ifindex: 42},
		},
	} {
		h := e.HostPorts[i]
		if h.String() != want.text || h.Key() != want.key || e.HostPortEntry(h) != want.value {
			t.Errorf("%q has key %+v and value %+v, want %q, %+v and %+v", h, h.Key(), e.HostPortEntry(h), want.text, want.key, want.value)
		}
	}
}

// Two meet on one port, at an address that both have.
func TestHostPortsMeet(t *testing.T) {
	var all []HostPort
	for _, host := range []string{"0.0.0.0", "192.0.2.1", "192.0.2.2", "::", "2001:db8::1"} {
		for _, protocol := range []string{"tcp", "udp"} {
			for port := uint16(1); port <= 2; port++ {
				all = append(all, HostPort{Address: netip.MustParseAddr(host), Port: port, Protocol: protocol, PodPort: 80})
			}
		}
	}
	meet := func(a, b HostPort) bool {
		return a.Port == b.Port && a.Protocol == b.Protocol && a.Address.Is4() == b.Address.Is4() &&
			(a.Address == b.Address || a.Address.IsUnspecified() || b.Address.IsUnspecified())
	}
	none := NewHostPorts()
	for _, a := range all {
		for _, b := range all {
			if one := NewHostPorts(a); (len(one.Meeting(b.Key())) > 0) != meet(a, b) || one.Has(b) != (a == b) || len(none.Meeting(b.Key())) > 0 {
				t.Errorf("%v and %v: %v", a, b, one.Meeting(b.Key()))
			}
		}
	}
	// That of all addresses meets all, and hears of one that leads elsewhere.
	first, other := all[4], all[8]
	other.PodPort = 81
	for _, add := range [][]HostPort{{first, first, other}, {other, first, first}} {
		if met := NewHostPorts(add...).Meeting(all[0].Key()); len(met) != 2 || met[0].PodPort == met[1].PodPort {
			t.Errorf("met %v", met)
		}
	}
}

func TestMalformedHostPorts(t *testing.T) {
	dir := t.TempDir()
	e := example()
	must(t, Write(dir, e))
	good, err := os.ReadFile(path(dir, e.ID))
	must(t, err)
	for old, bad := range map[string]string{
		`"0.0.0.0"`: `""`, `"2001:db8::1"`: `"fe80::1%eth0"`, `"port": 8080`: `"port": 0`, `"pod_port": 80`: `"pod_port": 0`, `"tcp"`: `"icmp"`,
		`"port": 53`: `"port": 65536`,
	} {
		must(t, os.WriteFile(path(dir, e.ID), []byte(strings.Replace(string(good), old, bad, 1)), 0o600))
		if _, err := Read(dir, e.ID); !errors.Is(err, ErrUnreadable) {
			t.Errorf("%s instead of %s: %v", bad, old, err)
		}
	}
}

func TestHostPortsAreAskedFor(t *testing.T) {
	dir := t.TempDir()
	if HostPortsAsked(dir) {
		t.Error("asked for by nobody")
	}
	for range 2 {
		must(t, AskForHostPorts(dir))
		if !HostPortsAsked(dir) {
			t.Error("not asked for")
		}
	}
	if err := AskForHostPorts(filepath.Join(dir, "nothing")); !errors.Is(err, ErrNoDataplane) {
		t.Errorf("without a state directory: %v", err)
	}
}
