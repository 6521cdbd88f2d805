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
	for _, c := range []struct {
		at      whereabouts
		flag    string
		nowhere bool
	}{
		{whereabouts{}, "192.0.2.0/24", false}, {here("127.0.0.1", "198.51.100.1"), "192.0.2.0/24", true},
		{here("127.0.0.1", "192.0.2.1"), "192.0.2.0/24", false}, {here("127.0.0.1", "192.0.2.1"), "127.0.0.0/8", false},
	} {
		l.services.told, l.cfg.NodePortAddresses = c.at, []netip.Prefix{netip.MustParsePrefix(c.flag)}
		if said := l.whoServes(); strings.Contains(said, "NodePorts answer on no address") != c.nowhere {
			t.Errorf("with %v and %s ebpfctl is told %q", c.at.held, c.flag, said)
		}
	}
}
