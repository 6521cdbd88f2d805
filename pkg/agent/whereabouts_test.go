package agent

import (
	"net/netip"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

func TestAPIServerAddress(t *testing.T) {
	for host, want := range map[string]string{
		"https://192.0.2.1:6443": "192.0.2.1:6443", "https://[2001:db8::1]:6443": "[2001:db8::1]:6443", "https://192.0.2.1": "192.0.2.1:443",
		"https://api.example:6443": "invalid AddrPort", ":": "invalid AddrPort",
	} {
		if got := (Config{API: &rest.Config{Host: host}}).apiServer().String(); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	if got := (Config{}).apiServer(); got.IsValid() {
		t.Errorf("without an API: %v", got)
	}
}

// A prefix that is not this node's leaves its NodePorts without an answer, which ebpfctl says.
func TestNodePortsThatAnswerNowhere(t *testing.T) {
	l := testServices(t)
	l.cfg.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("127.0.0.0/8")}
	for _, c := range []struct {
		at      whereabouts
		nowhere bool
	}{{whereabouts{}, false}, {here("127.0.0.1", "198.51.100.1"), true}, {here("198.51.100.1", "192.0.2.1"), false}} {
		l.services.told = c.at
		if said := l.whoServes(); strings.Contains(said, "NodePorts answer on no address") != c.nowhere {
			t.Errorf("with %v ebpfctl is told %q", c.at.held, said)
		}
	}
}
