package main

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// said is what test/cluster/measure prints.
const said = `{"versions":{"kubernetes":"v1.36.3","runc":"1.1"}}
{"workload":"first-packet","mode":"iptables","round":2,"started":"2026-11-21T11:07:10Z","durations":{"delay":[0.5,0.25,0.75]}}
{"workload":"rollout","path":"egress","mode":"ebpf+kube-proxy","round":1,"started":"2026-11-21T11:08:57Z","values":{"lost":0,"sent":11566}}
{"workload":"agent-cluster","mode":"ebpf+kube-proxy","point":5000,"round":3,"started":"2026-11-21T11:09:12Z","values":{"memory":59252736}}
`

func TestLines(t *testing.T) {
	at := func(clock string) time.Time {
		moment, err := time.Parse(time.DateTime, "2026-11-21 "+clock)
		if err != nil {
			t.Fatal(err)
		}
		return moment
	}
	run, saved := &result.Run{Environment: result.Environment{Versions: map[string]string{"go": "1"}}}, 0
	if err := readSamples(strings.NewReader(said), run, func() error { saved++; return nil }); err != nil {
		t.Fatal(err)
	}
	want := []result.Sample{
		{Workload: result.FirstPacket, Mode: "iptables", Round: 2, Started: at("11:07:10"), Values: map[string]float64{result.P50: 0.5},
			Durations: map[string][]float64{"delay": {0.5, 0.25, 0.75}}},
		{Workload: result.Rollout, Path: result.Egress, Mode: "ebpf+kube-proxy", Round: 1, Started: at("11:08:57"), Values: map[string]float64{"lost": 0, "sent": 11566}},
		{Workload: result.AgentCluster, Mode: "ebpf+kube-proxy", Point: 5000, Round: 3, Started: at("11:09:12"), Values: map[string]float64{"memory": 59252736}},
	}
	if diff := cmp.Diff(want, run.Samples); diff != "" {
		t.Error(diff)
	}
	if saved != len(want) || run.Rounds != 3 {
		t.Errorf("saved %d times, %d rounds", saved, run.Rounds)
	}
	if diff := cmp.Diff(map[string]string{"go": "1", "kubernetes": "v1.36.3", "runc": "1.1"}, run.Environment.Versions); diff != "" {
		t.Error(diff)
	}
}

// What the two modules do not agree on is an error, and no figure of something else.
func TestLinesThatMeanNothing(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no JSON":          {"building kubelet\n", "invalid character"},
		"another workload": {`{"workload":"x","mode":"m","round":1,"values":{"lost":0}}`, `no workload "x"`},
		"another value":    {`{"workload":"rollout","mode":"m","round":1,"values":{"found":1}}`, `a sample of rollout has "found" at 1`},
		"a negative value": {`{"workload":"rollout","mode":"m","round":1,"values":{"lost":-1}}`, `a sample of rollout has "lost" at -1`},
		"no mode":          {`{"workload":"rollout","round":1,"values":{"lost":1}}`, "without mode"},
		"no round":         {`{"workload":"rollout","mode":"m","values":{"lost":1}}`, "without mode, round"},
		"no values":        {`{"workload":"rollout","mode":"m","round":1}`, "without mode, round or values"},
		"other durations":  {`{"workload":"first-packet","mode":"m","round":1,"durations":{"x":[1]}}`, `1 durations "x"`},
		"no durations":     {`{"workload":"first-packet","mode":"m","round":1,"durations":{"delay":[]}}`, `0 durations "delay"`},
	} {
		t.Run(name, func(t *testing.T) {
			run := &result.Run{}
			err := readSamples(strings.NewReader(c.text), run, func() error { return nil })
			if err == nil || !strings.Contains(err.Error(), c.want) || len(run.Samples) > 0 {
				t.Errorf("%v, want %q; %d samples", err, c.want, len(run.Samples))
			}
		})
	}
}

func TestLinesThatCannotBeSaved(t *testing.T) {
	full := errors.New("no space left")
	run := &result.Run{Environment: result.Environment{Versions: map[string]string{}}}
	if err := readSamples(strings.NewReader(said), run, func() error { return full }); !errors.Is(err, full) {
		t.Error(err)
	}
}

// The two modules name the same things: what the other one measures, this one knows.
func TestClusterWorkloads(t *testing.T) {
	source, err := os.ReadFile("../../test/cluster/measure/measure.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range result.Names(true) {
		if !strings.Contains(string(source), `"`+name+`"`) {
			t.Errorf("test/cluster/measure knows no workload %q", name)
		}
	}
}
