package main

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	o, err := parse(nil)
	if err != nil || !o.whole() || !slices.Equal(o.families, wholeFamilies) {
		t.Errorf("without arguments: %+v, %v; want a whole run", o, err)
	}
	for name, args := range map[string][]string{
		"focus":    {"-focus=DNS"},
		"families": {"-families=dual"},
		"nodes":    {"-nodes=2"},
	} {
		if o, err := parse(args); err != nil || o.whole() {
			t.Errorf("%s: %v; whole: %v; want a part of a run", name, err, o.whole())
		}
		if _, err := parse(append(args, "-publish")); err == nil {
			t.Errorf("%s: a part of a run may be published", name)
		}
	}
	for _, args := range [][]string{{"-families=ipv5"}, {"-families="}, {"-nodes=0"}, {"-procs=0"}, {"-focus=("}, {"more"}} {
		if _, err := parse(args); err == nil {
			t.Errorf("%q: taken without an error", args)
		}
	}
}
