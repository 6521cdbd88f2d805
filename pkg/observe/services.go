package observe

import (
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// servicePort is a port of a Service, as its set has it; empty where the set is nobody's.
type servicePort struct {
	services.ServiceName
	block services.Block
}

// service is "namespace/name", "-" without a name.
func (p servicePort) service() string {
	if p.Name[0] == 0 {
		return "-"
	}
	return services.Text(p.Namespace) + "/" + services.Text(p.Name)
}

// portName is "-" where a port has none.
func (p servicePort) portName() string {
	if p.PortName[0] == 0 {
		return "-"
	}
	return services.Text(p.PortName)
}

func (p servicePort) object() typed.Object {
	return typed.Object{
		{Name: "service_namespace", Value: services.Text(p.Namespace)},
		{Name: "service_name", Value: services.Text(p.Name)},
		{Name: "service_port_name", Value: services.Text(p.PortName)},
	}
}

func (p servicePort) counts() typed.Object {
	return typed.Object{{Name: "cluster", Value: p.block.Cluster()}, {Name: "local", Value: p.block.Local()}}
}

// withServices adds the names of Services to the rows of a table about them, and to frontends how many endpoints serve.
func (r Reader) withServices(t typed.Table) (typed.Table, error) {
	if !slices.Contains([]string{services.Name, services.RangesName, backends.Name, affinity.Name, affinity.ClientsName, sockets.Name}, t.Name) {
		return t, nil
	}
	ports, err := readServicePorts(r.Dir)
	if err != nil {
		return t, err
	}
	at := slices.IndexFunc(t.Columns, func(c typed.Column) bool { return c.Name == "SET" })
	cells, object, frontends := t.Cells, t.Object, t.Name == services.Name
	t.Columns = append(slices.Clip(t.Columns), typed.Columns("SERVICE", "PORT NAME")...)
	if frontends {
		t.Columns = append(t.Columns, typed.Columns("CLUSTER#", "LOCAL#")...)
	}
	texts := make(map[string]servicePort, len(ports)) // as the column has the numbers
	for set, port := range ports {
		texts[fmt.Sprint(set)] = port
	}
	t.Cells = func(i int) []string {
		row := cells(i)
		port, known := texts[row[at]]
		row = append(row, port.service(), port.portName())
		switch {
		case frontends && known:
			row = append(row, fmt.Sprint(port.block.Cluster()), fmt.Sprint(port.block.Local()))
		case frontends: // the entry of an address
			row = append(row, "-", "-")
		}
		return row
	}
	t.Object = func(i int) typed.Object {
		row := object(i)
		var port servicePort
		for _, f := range row {
			if set, ok := f.Value.(uint32); ok && f.Name == "set" {
				port = ports[set]
			}
		}
		row = append(row, port.object()...)
		if frontends {
			row = append(row, port.counts()...)
		}
		return row
	}
	return t, nil
}

// readServicePorts reads whose sets are which.
func readServicePorts(dir bpffs.Dir) (map[uint32]servicePort, error) {
	names, err := load[services.SetKey, services.ServiceName](dir, services.NamesName)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	m, err := open(dir, services.SetsName)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	last := slices.MaxFunc(names, func(a, b typed.Entry[services.SetKey, services.ServiceName]) int {
		return int(a.Key.Set) - int(b.Key.Set)
	})
	sets, err := typed.New[services.SetKey, services.Set](m, services.SetsName).Values(int(last.Key.Set) + 1)
	if err != nil {
		return nil, err
	}
	ports := make(map[uint32]servicePort, len(names))
	for _, n := range names {
		if int(n.Key.Set) < len(sets) {
			ports[n.Key.Set] = servicePort{n.Value, sets[n.Key.Set].Block}
		}
	}
	return ports, nil
}
