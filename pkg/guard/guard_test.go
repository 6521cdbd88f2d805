package guard

import (
	"net/netip"
	"testing"
)

func TestFind(t *testing.T) {
	t.Parallel()
	all := append(Fixed(),
		Port{netip.MustParseAddr("192.0.2.1"), 6443, "four"}, Port{netip.MustParseAddr("2001:db8::1"), 6444, "six"})
	for _, tt := range []struct {
		address string
		port    uint16
		owner   string
	}{
		{"0.0.0.0", 6443, "four"}, {"192.0.2.1", 6443, "four"}, {"192.0.2.2", 6443, ""}, {"::", 6443, ""},
		{"::", 6444, "six"}, {"2001:db8::1", 6444, "six"}, {"2001:db8::2", 6444, ""}, {"0.0.0.0", 6444, ""},
		{"0.0.0.0", 10250, "the kubelet"}, {"::", 10250, "the kubelet"}, {"192.0.2.7", 10250, "the kubelet"}, {"0.0.0.0", 10251, ""},
	} {
		p, found := all.Find(netip.MustParseAddr(tt.address), tt.port)
		if p.Owner != tt.owner || found != (tt.owner != "") {
			t.Errorf("port %d of %s is %q's, %t; want %q", tt.port, tt.address, p.Owner, found, tt.owner)
		}
	}
	for _, port := range []uint16{10250, 10256, 10249, 9965} {
		if _, found := Fixed().Find(netip.IPv4Unspecified(), port); !found {
			t.Errorf("port %d is not guarded", port)
		}
	}
}
