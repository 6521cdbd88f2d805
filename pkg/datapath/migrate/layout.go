package migrate

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/raw"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// checkLayout refuses maps of a newer build, whose values this one does not know.
func checkLayout(dir bpffs.Dir) error {
	m, err := raw.Open(dir.Map(config.Name))
	if m == nil || err != nil {
		return err
	}
	defer m.Close()
	v, err := raw.Lookup(m, make([]byte, m.KeySize()))
	if err != nil || v == nil {
		return err
	}
	if layout := raw.Decode[config.Value](v[0]).Layout; layout > wire.LayoutVersion {
		return fmt.Errorf("pinned maps have layout %d, this build knows %d: %w; run a newer build, %s",
			layout, wire.LayoutVersion, ErrLayout, startOver)
	}
	return nil
}

// writeLayout writes this build's layout version to the map config.
func (all *Tables) writeLayout() error {
	m := all.Maps()[config.Name]
	if err := change(m, func(c *config.Value) { c.Layout = wire.LayoutVersion }); err != nil {
		return fmt.Errorf("write layout to map %s: %w", config.Name, err)
	}
	return nil
}

// setFlowsMove sets or clears config.FlowsMove for the old and the new programs. While it is set, a flow that is not in a
// program's own table may be in the other's.
func (all *Tables) setFlowsMove(on bool) error {
	if !all.FlowsMove() {
		return nil
	}
	return all.each(func(t *table) error {
		if t.Name != config.Name {
			return nil
		}
		copies := []*ebpf.Map{t.m}
		for _, s := range t.sources {
			copies = append(copies, s.m)
		}
		for _, m := range copies {
			err := change(m, func(c *config.Value) {
				c.Flags &^= config.FlowsMove
				if on {
					c.Flags |= config.FlowsMove
				}
			})
			if err != nil {
				return fmt.Errorf("write to map config that flow tables move: %w", err)
			}
		}
		return nil
	})
}

// change changes the only record of a map config of any build.
func change(m *ebpf.Map, how func(*config.Value)) error {
	key := make([]byte, m.KeySize())
	v, err := raw.Lookup(m, key)
	if err != nil {
		return err
	}
	have := raw.Decode[config.Value](v[0])
	want := have
	how(&want)
	if have == want {
		return nil
	}
	return raw.Update(m, key, raw.Value{raw.Encode(v[0], want)}, ebpf.UpdateAny)
}
