package modes

import (
	"context"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
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

func (d *directPlane) ends() map[Path][2]End {
	node := end("node n1", d.lab.Nodes[0].Namespace)
	return map[Path][2]End{
		SameNode:    {end("one end", d.a), end("other end", d.b)},
		AcrossNodes: {node, end("node n2", d.lab.Nodes[1].Namespace)},
		SNAT:        {node, end("host outside", d.lab.Outside)},
	}
}

func (d *directPlane) count(_ context.Context, into Counters) error {
	if err := countUplinks(into, d.lab); err != nil {
		return err
	}
	if err := countLink(into, "a", d.a, lab.Uplink); err != nil {
		return err
	}
	return countLink(into, "b", d.b, lab.Uplink)
}

func (*directPlane) proof(path Path) proof {
	switch path {
	case SameNode:
		return proof{through: []string{"a tx", "b rx"}, few: []string{"n1 eth0 tx"}}
	case AcrossNodes:
		return proof{through: []string{"n1 eth0 tx", "n2 eth0 rx"}, few: []string{"a tx"}}
	default:
		return proof{through: []string{"n1 eth0 tx"}, few: []string{"n2 eth0 rx", "a tx"}}
	}
}

func (*directPlane) setNodes(context.Context, int) error    { return ErrNotApplicable }
func (*directPlane) setServices(context.Context, int) error { return ErrNotApplicable }
