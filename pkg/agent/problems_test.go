package agent

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
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

// Without an uplink there is a problem with every Node: the log has some of them, and once.
func TestProblemsAreLoggedOnce(t *testing.T) {
	log := &bytes.Buffer{}
	c := &clusterController{node: &node{log: slog.New(slog.NewTextHandler(log, nil))}, reported: map[string]bool{}}
	s := &state{plan: plan.Result{Notes: []string{"node n0 has no podCIDR yet"}}}
	expect := func(when string, lines map[string]int) {
		t.Helper()
		log.Reset()
		c.report(s)
		for text, want := range lines {
			if got := strings.Count(log.String(), text); got != want {
				t.Errorf("%s: %q is logged %d times, want %d", when, text, got, want)
			}
		}
	}
	for i := range mostLines + 5 {
		c.problems = append(c.problems, plan.Problem{Node: fmt.Sprintf("n%d", i), Reason: plan.OffLink, Text: "far away"})
	}
	expect("at first", map[string]int{`"problem with a Node"`: mostLines, "more=5": 1, "no podCIDR yet": 1, "no longer": 0})
	expect("again", map[string]int{"level": 0})
	c.problems, s.plan.Notes = c.problems[:1], nil
	expect("all but one are over", map[string]int{"no longer the case": mostLines, "problem with a Node": 0})
	if len(c.reported) != 1 {
		t.Errorf("remembered: %v", c.reported)
	}
}
