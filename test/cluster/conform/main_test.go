package main

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	o, err := parse([]string{"-publish"})
	if want := []string{"ipv4", "dual"}; err != nil || !slices.Equal(o.families, want) {
		t.Errorf("without other arguments: %+v, %v; want a whole run", o, err)
	}
	for _, arg := range []string{"-families=dual", "-nodes=7", "-kept"} {
		if _, err := parse([]string{arg, "-publish"}); err != nil {
			t.Errorf("%s: a whole run is not published: %v", arg, err)
		}
	}
	for _, arg := range []string{"-focus=DNS", "-nodes=2"} {
		if _, err := parse([]string{arg}); err != nil {
			t.Errorf("%s: %v", arg, err)
		}
		if _, err := parse([]string{arg, "-publish"}); err == nil {
			t.Errorf("%s: a part of a run may be published", arg)
		}
	}
	for _, args := range [][]string{{"-families=ipv5"}, {"-families="}, {"-nodes=0"}, {"-procs=0"}, {"-focus=("}, {"more"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q: taken without an error", args)
		}
	}
}
