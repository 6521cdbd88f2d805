package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestPartsOfAnError(t *testing.T) {
	bad, full := errors.New("bad"), errors.New("full")
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	for _, tt := range []struct {
		err                   error
		obstacles, tolerables string
	}{
		{nil, "", ""},
		{full, "", "full"},
		{hinder(bad), "bad", ""},
		{hinder(nil), "", ""},
		{fmt.Errorf("step: %w", hinder(bad)), "step: bad", ""},
		{errors.Join(full, hinder(bad)), "bad", "full"},
		{errors.Join(full, errors.Join(hinder(bad), full)), "bad", "full\nfull"},
		{errors.Join(full, full), "", "full\nfull"},
		{hinder(errors.Join(bad, full)), "bad\nfull", ""},
	} {
		if o, f := text(obstacles(tt.err)), text(tolerable(tt.err)); o != tt.obstacles || f != tt.tolerables {
			t.Errorf("%v: obstacles %q, tolerable %q; want %q, %q", tt.err, o, f, tt.obstacles, tt.tolerables)
		}
		if tt.err != nil && !errors.Is(tt.err, bad) && !errors.Is(tt.err, full) {
			t.Errorf("%v hides what it wraps", tt.err)
		}
	}
}

// Reasons go into an object of the API, and onto screens: however many causes there are, and however long they are.
func TestReasonsAreBounded(t *testing.T) {
	if got := enumerate([]string{"one", "two\nlines"}); got != "one; two; lines" {
		t.Errorf("short ones are %q", got)
	}
	for _, n := range []int{1, 2, 3, 40, 5000} {
		for _, cause := range []string{"uplink e0: map uplinks is full (256 entries)", strings.Repeat("ö", 5000), "a"} {
			causes := make([]string, n)
			for i := range causes {
				causes[i] = cause
			}
			got := enumerate(causes)
			listed := strings.Count(got, cause[:1])
			if len(got) > maxReason || !utf8.ValidString(got) || listed == 0 {
				t.Errorf("%d of %q are %d bytes: %q", n, cause[:1], len(got), got)
			}
			var more int
			if _, after, cut := strings.Cut(got, "and "); cut {
				if _, err := fmt.Sscanf(after, "%d more", &more); err != nil {
					t.Errorf("%q: %v", got, err)
				}
			}
			if parts := strings.Count(got, "; ") + 1; more == 0 && parts != n || more != 0 && parts-1+more != n {
				t.Errorf("%d of %q: %d parts and %d more", n, cause[:1], parts, more)
			}
		}
	}
}
