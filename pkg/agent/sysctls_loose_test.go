package agent

import (
	"strconv"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// TestReversePathFilterOfUplinks: it is loosened only where it is strict, and put back when that is not needed any more.
func TestReversePathFilterOfUplinks(t *testing.T) {
	eth0, all := rpFilterOf("eth0"), rpFilterOf("all")
	for _, tt := range []struct{ name, all, own, loose string }{
		{"none", "0", "0", "0"},
		{"strict", "0", "1", "2"},
		{"strict for all", "1", "0", "2"},
		{"loose", "1", "2", "2"},
		{"loose for all", "2", "0", "0"},
	} {
		d := someSysctls(t, map[string]string{all: tt.all, eth0: tt.own})
		s := &state{view: &view{
			uplinks:  []plan.Link{{Index: 7, Name: "eth0"}, {Index: 8, Name: "gone0"}},
			settings: map[int]device.Settings{device.AllLinks: filter(t, tt.all), 7: filter(t, tt.own), 8: filter(t, tt.own)},
		}}
		for _, step := range []struct {
			crossed bool
			want    string
		}{{false, tt.own}, {true, tt.loose}, {true, tt.loose}, {false, tt.own}, {true, tt.loose}} {
			s.plan.Crossed = map[string]bool{"eth0": step.crossed, "gone0": step.crossed}
			d.must(d.loosen(s))
			d.expect(tt.name, map[string]string{eth0: step.want})
		}
		d.must(d.restore())
		d.expect(tt.name+", put back", map[string]string{eth0: tt.own})
	}
}

// filter is a setting of rp_filter.
func filter(t *testing.T, text string) device.Settings {
	value, err := strconv.Atoi(text)
	must(t, err)
	return device.Settings{RPFilter: value}
}
