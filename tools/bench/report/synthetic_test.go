package report

import (
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// synthetic is a run in which every sample is a mode's base value, and noise of that share of it (one standard deviation).
func synthetic(rounds int, noise float64, seed uint64) *result.Run {
	random := rand.New(rand.NewPCG(seed, 7))
	started := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	run := &result.Run{
		Schema: result.Schema, Profile: "full", Command: "bench --profile full", Rounds: rounds, Duration: 1, Warmup: 0.2,
		Started: started, Finished: started.Add(20 * time.Minute),
		Workloads: []string{"udp64", "rr", "bpf", "cni", "nodes", "agent-api", "change"},
		Modes:     []string{"direct", "ebpf", "iptables"},
		Environment: result.Environment{
			Kernel: "6.18.0 x86_64", CPU: "Synthetic | 3000", Cores: 2, MemoryMB: 4096, Commit: "0123456789abcdef0123", Dirty: true,
			Versions: map[string]string{"go": "go1.26"}, Load: 0.1,
		},
	}
	for round := 1; round <= rounds; round++ {
		vary := func(v float64) float64 { return v * (1 + noise*random.NormFloat64()) }
		add := func(s result.Sample) {
			s.Round, s.Started = round, started
			for _, name := range slices.Sorted(maps.Keys(s.Values)) {
				s.Values[name] = vary(s.Values[name])
			}
			run.Samples = append(run.Samples, s)
		}
		for i, mode := range []string{"direct", "ebpf", "iptables"} {
			speed := []float64{1, 0.95, 0.6}[i]
			for _, path := range result.Paths() {
				add(result.Sample{Workload: "udp64", Path: path, Mode: mode, Values: map[string]float64{
					result.Rate: 500_000 * speed, result.CPUPer: 2e-6 / speed,
					"cpu-client": 1.9e-6 / speed, "cpu-server": 0.7e-6 / speed, "cpu-softirq": 1.1e-6 / speed}})
			}
			add(result.Sample{Workload: "rr", Path: result.AcrossNodes, Mode: mode,
				Values: map[string]float64{
					result.Rate: 20_000 * speed, result.CPUPer: 50e-6 / speed,
					result.P50: 40e-6 / speed, result.P99: 90e-6 / speed, result.P999: 200e-6 / speed}})
			if mode == "direct" {
				continue
			}
			add(result.Sample{Workload: "cni", Mode: mode,
				Values: map[string]float64{"pair-p50": 0.030 / speed, "add-p50": 0.020 / speed, "del-p50": 0.010 / speed},
				Durations: map[string][]float64{
					"add": append(slices.Repeat([]float64{0.020 / speed}, 19), 0.040/speed), "del": slices.Repeat([]float64{0.010 / speed}, 10)}})
			for _, point := range []int{2, 5000} {
				add(result.Sample{Workload: "nodes", Path: result.AcrossNodes, Mode: mode, Point: point,
					Values: map[string]float64{result.Cost: 2e-6 / speed * (1 + float64(point)/1e6), result.CPUPer: 2e-6}})
			}
		}
		add(result.Sample{Workload: "bpf", Path: result.AcrossNodes, Mode: "ebpf", Values: map[string]float64{
			result.BPFPer: 300e-9, "ec_from_pod": 200e-9, "ec_from_uplink": 100e-9}})
		add(result.Sample{Workload: "change", Mode: "ebpf", Values: map[string]float64{result.P50: 0.030},
			Durations: map[string][]float64{"delay": append(slices.Repeat([]float64{0.030}, 20), 0.045, 0.045)}})
		add(result.Sample{Workload: "agent-api", Mode: "ebpf", Values: map[string]float64{"memory": 100 << 20, "peak": 120 << 20, "complete": 1.5}})
	}
	return run
}

// withKubeProxy adds the mode beside kube-proxy: what ebpf has of packets and pods, at four fifths of the speed.
func withKubeProxy(run *result.Run) *result.Run {
	run.Modes = slices.Insert(run.Modes, 2, result.KubeProxy)
	for _, s := range run.Samples {
		if s.Mode == "ebpf" && (s.Workload == "udp64" || s.Workload == "cni") {
			s.Mode, s.Values = result.KubeProxy, maps.Clone(s.Values)
			run.Samples = append(run.Samples, s)
		}
	}
	for _, path := range result.Paths() {
		slower(run, result.Row{Workload: "udp64", Path: path, Metric: result.Rate}, result.KubeProxy, 0.8)
	}
	slower(run, result.Row{Workload: "cni", Metric: "pair-p50"}, result.KubeProxy, 1/0.8)
	return run
}

// slower multiplies all values of a row.
func slower(run *result.Run, row result.Row, mode string, factor float64) {
	for _, s := range run.Samples {
		if s.Workload == row.Workload && s.Path == row.Path && s.Mode == mode && s.Point == row.Point {
			s.Values[row.Metric] *= factor
		}
	}
}
