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
