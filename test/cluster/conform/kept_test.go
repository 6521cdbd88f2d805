package main

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func TestKeptRunIsReadAsItWas(t *testing.T) {
	dir := t.TempDir()
	for _, one := range someRuns {
		if err := os.Mkdir(filepath.Join(dir, one.Family), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := one.keep(dir); err != nil {
			t.Fatal(err)
		}
	}
	got, err := keptRuns(t.Context(), options{families: []string{"ipv4", "dual"}, out: dir})
	if err != nil || !reflect.DeepEqual(got, someRuns) {
		t.Errorf("got\n%+v, %v\nwant\n%+v", got, err, someRuns)
	}
	if _, err := keptRuns(t.Context(), options{families: []string{"ipv6"}, out: dir}); err == nil {
		t.Error("a run that was never made is read")
	}
}

func TestOnlyWholeRunsArePublished(t *testing.T) {
	t.Chdir(t.TempDir()) // where a page would be written
	if err := someRuns[0].whole(); err != nil {
		t.Errorf("a run with a failure is whole, and yet: %v", err)
	}
	for name, spoil := range map[string]func(*runOf){
		"a test that did not run": func(r *runOf) { r.Results = append(r.Results[:1:1], result{"late", notRun, "the run ended before"}) },
		"another Kubernetes":      func(r *runOf) { r.Kubernetes = "v1.0.0" },
		"a selection":             func(r *runOf) { r.Focus = "DNS" },
		"few nodes":               func(r *runOf) { r.Nodes = 2 },
	} {
		one := someRuns[0]
		spoil(&one)
		if err := publish([]runOf{someRuns[1], one}); err == nil {
			t.Errorf("%s: published", name)
		}
	}
}
