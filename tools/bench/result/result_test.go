package result

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func sample(mode string, round int, rate float64) Sample {
	return Sample{Workload: "udp64", Path: SameNode, Mode: mode, Round: round, Values: map[string]float64{Rate: rate}}
}

var row = Row{Workload: "udp64", Path: SameNode, Metric: Rate}

// The machine becomes three times as fast between rounds: only the ratio of each pair says how the modes compare.
func TestRatioIsTakenRoundByRound(t *testing.T) {
	run := &Run{Samples: []Sample{
		sample("iptables", 1, 100), sample("ebpf", 1, 150), sample("iptables", 2, 200), sample("ebpf", 2, 300),
		sample("iptables", 3, 300), sample("ebpf", 3, 450), sample("ebpf", 4, 9999),
	}}
	got, ok := Summarise(Pairs(run.Values(row, "ebpf"), run.Values(row, "iptables")))
	if want := (Summary{3, 1.5, 1.5, 1.5}); !ok || got != want {
		t.Errorf("got %+v, want %+v: round 4 has no pair", got, want)
	}
}

func TestRefusedSamplesCountNowhere(t *testing.T) {
	refused := sample("ebpf", 2, 1)
	refused.Error = "nothing arrived"
	run := &Run{Samples: []Sample{sample("ebpf", 1, 5), refused}}
	if got := run.Values(row, "ebpf"); len(got) != 1 || got[1] != 5 {
		t.Errorf("got %v", got)
	}
	if n, why := run.Refused(row, "ebpf"); n != 1 || why != "nothing arrived" {
		t.Errorf("refused: %d, %q", n, why)
	}
}

func TestWriteAndRead(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "bench.json")
	run := &Run{Schema: Schema, Profile: "quick", Samples: []Sample{sample("ebpf", 1, 5)}}
	for range 2 { // the second time over the first
		if err := run.Write(file); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(run, got); diff != "" {
		t.Error(diff)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files are left: %v", left)
	}
}

func TestReadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ content, want string }{
		"no JSON":        {"hello", "is no run of the benchmark"},
		"cut off":        {`{"schema": 1, "sam`, "is no run of the benchmark"},
		"another schema": {`{"schema": 99}`, "schema version 99"},
		"no schema":      {`{}`, "schema version 0"},
		"wrong type":     {`{"schema": 2, "samples": 5}`, "read the run"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "bench.json")
			if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := Read(file); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v, want one with %q and the file", err, c.want)
			}
		})
	}
	if _, err := Read("/nowhere/bench.json"); err == nil || !strings.Contains(err.Error(), "make bench") {
		t.Errorf("a missing file: %v", err)
	}
}

// Five rounds of twenty durations make a hundredth one; the median of the rounds' slowest is less than that.
func TestTailIsOfAllRounds(t *testing.T) {
	run := &Run{}
	for round := 1; round <= 5; round++ {
		var seconds []float64
		for i := range 20 {
			seconds = append(seconds, float64(100*round+i))
		}
		run.Samples = append(run.Samples, Sample{Workload: "change", Mode: "ebpf", Round: round,
			Durations: map[string][]float64{"delay": seconds}})
	}
	tail := Row{Workload: "change", Metric: P99}
	if got, ok := run.Tail(tail, "ebpf"); !ok || got != (Tail{N: 100, Seconds: 518}) {
		t.Errorf("got %+v, want the 99th of 100", got)
	}
	run.Samples[0].Durations["delay"] = run.Samples[0].Durations["delay"][1:]
	if got, _ := run.Tail(tail, "ebpf"); got != (Tail{N: 99, Seconds: 519, Slowest: true}) {
		t.Errorf("got %+v, want the slowest of 99", got)
	}
	if _, ok := run.Tail(tail, "iptables"); ok {
		t.Error("nothing was measured there")
	}
	if _, ok := run.Tail(row, "ebpf"); ok {
		t.Error("a rate is no quantile")
	}
}
