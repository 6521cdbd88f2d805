package report

import (
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// withServices adds what goes to a Service, and straight to its server, at a share of the speed.
func withServices(run *result.Run) *result.Run {
	for round := 1; round <= run.Rounds; round++ {
		for mode, speed := range map[string]float64{result.EBPF: 0.95, result.IPTables: 0.6} {
			for point, share := range map[int]float64{0: 1, 1: 0.9} {
				run.Samples = append(run.Samples, result.Sample{
					Workload: "service-udp64", Path: result.AcrossNodes, Mode: mode, Point: point, Round: round, Values: map[string]float64{result.Rate: 500_000 * speed * share},
				})
			}
		}
	}
	return run
}

// What goes to a Service stands beside the same server addressed straight, with the verdicts of the budgets; both pages tell how many Services there are.
func TestOrdinaryCluster(t *testing.T) {
	run := withServices(synthetic(5, 0, 1))
	if page, want := section(run, nil, ""), "| UDP, 64 bytes, through a ClusterIP, across nodes, 1 Service | 428 [428, 428] kpps | 270 kpps: 1.58 x [1.58, 1.58], ≥ 1.5 x **met** | "+
		" | 475 kpps: 0.90 x [0.90, 0.90], ≥ 0.95 x **missed** |"; !strings.Contains(page, want) || strings.Index(page, want) > strings.Index(page, "### Budgets") {
		t.Errorf("no %q before the budgets in\n%s", want, page)
	}
	for _, want := range []string{"| UDP, 64 bytes, through a ClusterIP, across nodes, 1 Service | 428 kpps | 1.58 x [1.58, 1.58] |", "each cluster has 100 Services"} {
		if got := headline(run); !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

// Every line is of a metric that the catalog has, and no two look alike.
func TestOrdinaryLinesFitTheCatalog(t *testing.T) {
	seen := map[string]bool{}
	for _, l := range ordinaryLines() {
		if l.Of().Name == "" || seen[l.title()] {
			t.Errorf("%+v has no metric, or is there twice", l)
		}
		seen[l.title()] = true
	}
}
