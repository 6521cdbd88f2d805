package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/tools/bench/load"
)

// What the network did wrong is final, whatever else went wrong; what else went wrong may be tried again.
func TestProven(t *testing.T) {
	lost := fmt.Errorf("%w: a tenth was lost", load.ErrNotMeasured)
	late := fmt.Errorf("%w: it waited", load.ErrStarved)
	for _, c := range []struct {
		name            string
		disturbed       error
		backlog         uint64
		astray, dropped bool
		want            string // part of the error; "" for none
		again, kept     bool
	}{
		{name: "all went well", kept: true},
		{name: "another way", astray: true, want: "went astray"},
		{name: "late", disturbed: late, want: "it waited", again: true, kept: true},
		{name: "late, and another way", disturbed: late, astray: true, want: "went astray"},
		{name: "lost", disturbed: lost, astray: true, want: "a tenth was lost", again: true},
		{name: "lost, and dropped by the network", disturbed: lost, astray: true, dropped: true, want: "were dropped"},
		{name: "a full queue of its own", backlog: 3, astray: true, want: "went astray; 3 packets of this machine"},
		{name: "a full queue of another's", backlog: 3, want: "3 packets of this machine", again: true},
		{name: "lost, and a full queue", disturbed: lost, backlog: 3, want: "3 packets of this machine", again: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			fails := func(fail bool, text string) func() error {
				return func() error {
					if fail {
						return errors.New(text)
					}
					return nil
				}
			}
			err := proven(c.disturbed, c.backlog, fails(c.astray, "went astray"), fails(c.dropped, "were dropped"))
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if errors.Is(err, load.ErrNotMeasured) != c.again || (err == nil || errors.Is(err, load.ErrStarved)) != c.kept {
				t.Errorf("error %v: taken again: %v, kept: %v", err, c.again, c.kept)
			}
		})
	}
}
