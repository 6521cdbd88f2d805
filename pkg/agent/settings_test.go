package agent

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

func TestClusterCIDRWithoutThePods(t *testing.T) {
	own := plan.Result{Standing: plan.Standing{Own: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}}}
	for _, tt := range []struct {
		cluster string
		result  plan.Result
		outside bool
	}{
		{"10.244.0.0/16", own, false},
		{"10.244.3.0/24", own, false},
		{"10.42.0.0/16,10.244.0.0/16", own, false},
		{"10.42.0.0/16", own, true},
		{"10.244.3.0/25", own, true},
		{"", own, false},
		{"10.42.0.0/16", plan.Result{}, false},
	} {
		r := reconciler{result: tt.result}
		for text := range strings.SplitSeq(tt.cluster, ",") {
			if text != "" {
				r.cfg.Cluster = append(r.cfg.Cluster, netip.MustParsePrefix(text))
			}
		}
		if text := r.outsideCluster(); (text != "") != tt.outside || tt.outside && !strings.Contains(text, tt.cluster) {
			t.Errorf("--cluster-cidr %q: %q", tt.cluster, text)
		}
	}
}
