package observe

import (
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// Drops returns the counters of drops that are not zero, by direction, then reason.
func Drops(dir bpffs.Dir) ([]drops.Counter, error) {
	m, err := drops.Open(dir.Map(drops.Name))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.All()
}

// Traffic returns the counters of traffic that are not zero, by direction, then event.
func Traffic(dir bpffs.Dir) ([]traffic.Counter, error) {
	m, err := traffic.Open(dir.Map(traffic.Name))
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return m.All()
}

type dropsView struct{}

func (dropsView) name() string { return drops.Name }

func (dropsView) read(dir bpffs.Dir, _ uint64) (Table, error) {
	counters, err := Drops(dir)
	return dropsTable(counters), err
}

func dropsTable(counters []drops.Counter) Table {
	rows := make([]counterRow, 0, len(counters))
	for _, c := range counters {
		rows = append(rows, counterRow{c.Direction.String(), c.Reason.String(), c.Reason.Explain(), c.Packets, c.Bytes})
	}
	return counterTable(drops.Name, "REASON", "reason", rows)
}

type trafficView struct{}

func (trafficView) name() string { return traffic.Name }

func (trafficView) read(dir bpffs.Dir, _ uint64) (Table, error) {
	counters, err := Traffic(dir)
	return trafficTable(counters), err
}

func trafficTable(counters []traffic.Counter) Table {
	rows := make([]counterRow, 0, len(counters))
	for _, c := range counters {
		rows = append(rows, counterRow{c.Direction.String(), c.Event.String(), c.Event.Explain(), c.Packets, c.Bytes})
	}
	return counterTable(traffic.Name, "EVENT", "event", rows)
}

type counterRow struct {
	direction, what, explanation string
	packets, bytes               uint64
}

// counterTable shows counters of what; heading and field name that column.
func counterTable(name, heading, field string, rows []counterRow) Table {
	return Table{
		Name:    name,
		Columns: columns("DIRECTION", heading, "PACKETS#", "BYTES#", "EXPLANATION"),
		Len:     len(rows),
		Cells: func(i int) []string {
			r := rows[i]
			return []string{r.direction, r.what, number(r.packets), number(r.bytes), r.explanation}
		},
		Object: func(i int) Object {
			r := rows[i]
			return Object{
				{"direction", r.direction}, {field, r.what}, {"packets", r.packets}, {"bytes", r.bytes},
				{"explanation", r.explanation},
			}
		},
	}
}
