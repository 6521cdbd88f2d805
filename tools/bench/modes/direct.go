package modes

import (
	"context"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// directPlane is the machine's own limit: no network at all. On one node that is two namespaces at the ends of a veth
// pair; across nodes and to the outside it is the nodes themselves, over the fabric that every mode's packets take.
type directPlane struct {
	lab  *lab.Lab
	a, b *lab.Namespace
}

func (d *directPlane) prepare(context.Context) (err error) {
	if d.a, err = d.lab.NewHost("a", netip.MustParseAddr("10.244.0.2")); err != nil {
		return err
	}
	if d.b, err = d.lab.NewHost("b", netip.MustParseAddr("10.244.0.3")); err != nil {
		return err
	}
	return d.lab.Wire(d.a, d.b, 24)
}

func (d *directPlane) ends() map[string][2]*lab.Namespace {
	node := d.lab.Nodes[0].Namespace
	return map[string][2]*lab.Namespace{
		result.SameNode:    {d.a, d.b},
		result.AcrossNodes: {node, d.lab.Nodes[1].Namespace},
		result.Egress:      {node, d.lab.Outside},
	}
}

func (d *directPlane) count(_ context.Context, into Counters, _ map[string]*lab.Pod) error {
	if err := countLink(into, "a", d.a, lab.Uplink); err != nil {
		return err
	}
	return countLink(into, "b", d.b, lab.Uplink)
}

func (*directPlane) proof(path string) proof {
	switch path {
	case result.SameNode:
		return proof{through: []string{"a tx", "b rx"}, few: []string{"n1 eth0 tx"}}
	case result.AcrossNodes:
		return proof{through: []string{"n1 eth0 tx", "n2 eth0 rx"}, few: []string{"a tx"}}
	default:
		return proof{through: []string{"n1 eth0 tx"}, few: []string{"n2 eth0 rx", "a tx"}}
	}
}

func (*directPlane) setNodes(context.Context, int) error    { return ErrNotApplicable }
func (*directPlane) setServices(context.Context, int) error { return ErrNotApplicable }
func (*directPlane) forget(*lab.Node) error                 { return nil }
