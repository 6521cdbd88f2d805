package agent

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// A table counts as one for some sources alone only if each of its rules names one. A rule without a table never says so of the main table.
func TestTablesRuledBySource(t *testing.T) {
	from, other := netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("10.0.0.0/8")
	v := &view{rules: []device.Rule{
		{Table: 101, From: from}, {Table: 101, From: other}, {Table: 102, From: from}, {Table: 102},
		{Table: 0, From: from}, {Table: 254, From: from},
	}}
	want := map[int][]netip.Prefix{101: {from, other}}
	if diff := cmp.Diff(want, v.ruledBySource(), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Error(diff)
	}
}
