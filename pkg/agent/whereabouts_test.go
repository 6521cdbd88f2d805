package agent

import (
	"net/netip"
	"strings"
	"testing"
)

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
