package main

import (
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster/measure"
)

func TestMeasureOptions(t *testing.T) {
	o, err := measureOptions([]string{"-only", "image,rollout", "-nodes", "2,7", "-rounds=4", "-pods=3", "-burst=2", "-rollouts=5", "-starts=6", "-rest=9s"})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Join(o.Only, " ") != "image rollout" || len(o.Nodes) != 2 || o.Nodes[1] != 7 || o.Rounds != 4 || o.Pods != 3 || o.Burst != 2 ||
		o.Rollouts != 5 || o.Starts != 6 || o.Rest != 9*time.Second {
		t.Errorf("%+v", o)
	}
	if o, err = measureOptions(nil); err != nil || len(o.Only) != len(measure.Workloads()) {
		t.Errorf("by default %+v, %v", o, err)
	}
	for args, want := range map[string]string{
		"-only x": `-only "x": there are first-packet`, "-nodes 500,2": "in ascending order", "-nodes 5001": "from 2 to 5000", "-nodes 1": "from 2 to 5000",
		"-rounds 3": "an even number", "-pods 0": "no less than one", "-rest 0s": "no less than one", "more": `unexpected argument "more"`,
	} {
		if _, err := measureOptions(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
