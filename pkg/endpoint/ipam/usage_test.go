package ipam

import (
	"errors"
	"math"
	"net/netip"
	"testing"
	"time"
)

// TestUsage: what is free can be allocated, and not one more.
func TestUsage(t *testing.T) {
	s, clock, _ := newStore(t, time.Minute)
	pool := netip.MustParsePrefix("10.9.0.0/29")
	expect := func(when string, want Usage) {
		t.Helper()
		if got, err := s.Usage(pool); got != want || err != nil {
			t.Errorf("%s: %+v, %v; want %+v", when, got, err, want)
		}
	}
	whole, err := s.Usage(pool)
	if err != nil || whole.Used+whole.Quarantined != 0 {
		t.Fatalf("without a store: %+v, %v", whole, err)
	}
	for i := range whole.Free {
		take(t, s, owner(i), "")
		expect("allocated", Usage{Used: i + 1, Free: whole.Free - i - 1})
	}
	if _, err := s.Allocate(t.Context(), owner(99), parse(t, small, "")); !errors.Is(err, ErrExhausted) {
		t.Errorf("nothing is free: %v", err)
	}
	release(t, s, owner(0))
	expect("freed", Usage{Used: whole.Free - 1, Quarantined: 1})
	clock.t = clock.t.Add(time.Minute)
	expect("its quarantine over", Usage{Used: whole.Free - 1, Free: 1})
	pool = netip.MustParsePrefix("10.9.8.0/24")
	expect("of another podCIDR", Usage{Free: 253})
	pool = netip.Prefix{}
	expect("of none", Usage{})
}

func TestUsable(t *testing.T) {
	for prefix, want := range map[string]int{
		"10.9.0.0/24": 253, "10.9.0.0/30": 1, "10.9.0.0/31": 0, "10.9.0.0/32": 0, "10.0.0.0/8": 1<<24 - 3,
		"fd00::/120": 254, "fd00::/64": math.MaxInt32, "fd00::/128": 0,
	} {
		if got := usable(netip.MustParsePrefix(prefix)); got != want {
			t.Errorf("%s: %d, want %d", prefix, got, want)
		}
	}
}
