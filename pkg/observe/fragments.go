package observe

import (
	"cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/fragments"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// fragmentsView shows the datagrams that stand in the array, wherever they do.
type fragmentsView struct{}

func (fragmentsView) name() string { return fragments.Name }

func (w fragmentsView) read(dir bpffs.Dir, now uint64) (Table, error) {
	places, err := load[fragments.Key, fragments.Value](dir, w.name())
	if err != nil {
		return Table{}, err
	}
	var used []typed.Entry[fragments.Value, struct{}]
	for _, p := range places {
		if p.Value.LastSeen != 0 {
			used = append(used, typed.Entry[fragments.Value, struct{}]{Key: p.Value})
		}
	}
	return datagrams.table(used, now), nil
}

// datagrams takes the records themselves as keys.
var datagrams = view[fragments.Value, struct{}]{
	mapName: fragments.Name,
	columns: columns("PROTO", "SOURCE", "DESTINATION", "ID#", "SPORT#", "DPORT#", "IFINDEX#", "AGE#"),
	compare: func(a, b fragments.Value) int {
		return cmp.Or(cmp.Compare(a.Proto, b.Proto), compareAddr(a.Src, b.Src), compareAddr(a.Dst, b.Dst), cmp.Compare(a.ID, b.ID))
	},
	cells: func(v fragments.Value, _ struct{}, now uint64) []string {
		return []string{
			v.Proto.String(), v.Src.String(), v.Dst.String(), number(v.ID), number(v.Sport.Host()), number(v.Dport.Host()),
			orDash(v.Ifindex), Age(now, v.LastSeen),
		}
	},
}
