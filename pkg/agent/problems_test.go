package agent

import (
	"net/netip"
	"strings"
	"testing"
)

func TestClusterCIDRWithoutThePods(t *testing.T) {
	own := netip.MustParsePrefix("10.244.3.0/24")
	for _, tt := range []struct {
		cluster string
		own     netip.Prefix
		outside bool
	}{
		{"10.244.0.0/16", own, false},
		{"10.244.3.0/24", own, false},
		{"10.42.0.0/16,10.244.0.0/16", own, false},
		{"10.42.0.0/16", own, true},
		{"10.244.3.0/25", own, true},
		{"", own, false},
		{"10.42.0.0/16", netip.Prefix{}, false},
	} {
		var cluster []netip.Prefix
		for text := range strings.SplitSeq(tt.cluster, ",") {
			if text != "" {
				cluster = append(cluster, netip.MustParsePrefix(text))
			}
		}
		if text := outsideCluster(tt.own, cluster); (text != "") != tt.outside || tt.outside && !strings.Contains(text, tt.cluster) {
			t.Errorf("--cluster-cidr %q: %q", tt.cluster, text)
		}
	}
}
