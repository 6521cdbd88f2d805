package datapath

import (
	"context"
	"errors"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath/migrate"
)

// While flow tables move, programs of both kinds know it, whether the config itself moves or not; nobody does afterwards,
// however it ends.
func TestProgramsKnowThatFlowsMove(t *testing.T) {
	larger := func(t testing.TB) *ebpf.CollectionSpec {
		spec := stubs(t)
		grow(spec, snat.Name, 16)
		return spec
	}
	broken := errors.New("broken")
	for _, c := range []struct {
		name string
		spec func(testing.TB) *ebpf.CollectionSpec
		says config.Flags
		fail error
	}{
		{"everything moves", grown, config.FlowsMove, nil},
		{"a flow table moves", larger, config.FlowsMove, nil},
		{"nothing moves", stubs, 0, nil},
		{"everything moves, and fails", grown, config.FlowsMove, broken},
		{"a flow table moves, and fails", larger, config.FlowsMove, broken},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, isolated(t, attach.Auto))
			old, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(config.Name), nil)
			check(t, err)
			defer old.Close()
			before := flagsIn(t, old)
			n.opts.Spec = c.spec(t)
			dp, err := load(context.Background(), n.opts, func(s step) error {
				if s != stepAttached {
					return nil
				}
				if got := flagsIn(t, old) ^ before; got != c.says {
					t.Errorf("the old programs are told %v, want %v", got, c.says)
				}
				if m, err := ebpf.LoadPinnedMap(migrate.Path(n.opts.Dir, config.Name), nil); err == nil {
					defer m.Close()
					if got := flagsIn(t, m) ^ before; got != c.says {
						t.Errorf("the new programs are told %v, want %v", got, c.says)
					}
				}
				return c.fail
			})
			if !errors.Is(err, c.fail) {
				t.Fatal(err)
			}
			if dp != nil {
				defer dp.Close()
			}
			now, err := ebpf.LoadPinnedMap(n.opts.Dir.Map(config.Name), nil)
			check(t, err)
			defer now.Close()
			for _, m := range []*ebpf.Map{old, now} {
				if got := flagsIn(t, m); got != before {
					t.Errorf("afterwards the flags are %v, were %v", got, before)
				}
			}
		})
	}
}

// flagsIn reads a copy of the config, whatever its layout.
func flagsIn(t *testing.T, m *ebpf.Map) config.Flags {
	t.Helper()
	v, err := raw.Lookup(m, make([]byte, m.KeySize()))
	check(t, err)
	return raw.Decode[config.Value](v[0]).Flags
}
