package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
)

// ofServices are the ranges that are destinations of their own.
func ofServices(r Result) string {
	var all []string
	for k, v := range r.Destinations {
		if v.Kind == destinations.Service {
			all = append(all, k.String())
		}
	}
	return strings.Join(all, " ")
}

func TestRangesOfServicesAreDestinations(t *testing.T) {
	in := input(node(1), node(2))
	in.Service = prefixes("10.96.0.0/12")
	if got := ofServices(Make(in)); got != "" {
		t.Errorf("%s although others serve Services", got)
	}
	in.Served = true
	r := Make(in)
	if got := ofServices(r); got != "10.96.0.0/12" {
		t.Errorf("the ranges are %q", got)
	}
	if !Essential(r.Destinations, destinations.KeyFrom(in.Service[0])) {
		t.Error("without its entry packets go to the world")
	}
	in.Native = prefixes("10.96.0.0/12") // says the same of nobody
	if got := ofServices(Make(in)); got != "10.96.0.0/12" {
		t.Errorf("beside what is never masqueraded the ranges are %q", got)
	}
	in.Native, in.Service = nil, prefixes("0.0.0.0/0")
	if got := ofServices(Make(in)); got != "" {
		t.Errorf("%s would take the world away", got)
	}
}

// A range within podCIDRs that are in force is a mistake that must not cost their pods anything; a wider one takes nothing from them.
func TestRangesOfServicesAndPods(t *testing.T) {
	in := input(node(1), node(2))
	in.Before, in.Served = Make(in).Standing, true
	for ranges, want := range map[string]string{
		"10.244.2.0/24": "", "10.244.2.128/25": "", "10.244.1.64/26": "", "10.244.0.0/16": "10.244.0.0/16", "10.96.0.0/16": "10.96.0.0/16",
	} {
		in.Service = []netip.Prefix{netip.MustParsePrefix(ranges)}
		r := Make(in)
		if got := ofServices(r); got != want {
			t.Errorf("%s: %q, want %q", ranges, got, want)
		}
		if v := r.Destinations[destinations.KeyFrom(netip.MustParsePrefix("10.244.2.0/24"))]; v.Kind != destinations.PodCIDR {
			t.Errorf("%s takes a podCIDR", ranges)
		}
	}
}
