package attach

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// foreignFilter adds somebody else's clsact filter.
func (d *device) foreignFilter(name string, priority uint16, handle uint32, p *ebpf.Program) {
	d.t.Helper()
	if _, err := ensureQdisc(d.index); err != nil {
		d.t.Fatal(err)
	}
	err := netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: d.index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: handle, Protocol: unix.ETH_P_ALL, Priority: priority,
		},
		Fd: p.FD(), Name: name, DirectAction: true,
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *device) filterNames() []string {
	d.t.Helper()
	filters, err := listFilters(d.index, FromPod)
	if err != nil {
		d.t.Fatal(err)
	}
	var names []string
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			names = append(names, b.Name)
		}
	}
	return names
}

func TestForeignFiltersAreLeftAlone(t *testing.T) {
	for _, mode := range []Mode{TCX, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			p, foreign := hookProgram(t, FromPod, 1), pins.Program(t, "foreign", 2)
			d.foreignFilter("first", 1, 1, foreign)
			d.foreignFilter("same_priority", filterPriority, 1, foreign)
			d.foreignFilter("same_handle", 200, filterHandle, foreign)
			d.foreignFilter("ec_from_pod", 300, 1, foreign) // same name
			before := strings.Join(d.filterNames(), " ")

			d.assert(FromPod, "", 0)
			if d.attach(FromPod, p) {
				t.Error("the qdisc was there")
			}
			d.assert(FromPod, mode, pins.ID(t, p))
			d.attach(FromPod, hookProgram(t, FromPod, 3))
			if err := d.Detach(d.index, FromPod); err != nil {
				t.Fatal(err)
			}
			if after := strings.Join(d.filterNames(), " "); after != before {
				t.Errorf("filters before: %s; after: %s", before, after)
			}
			if _, err := RemoveQdisc(d.index); err != nil {
				t.Fatal(err)
			}
			if after := strings.Join(d.filterNames(), " "); after != before {
				t.Errorf("RemoveQdisc took others' filters: %s", after)
			}
		})
	}
}

// TestPlaceTakenByForeignFilter: somebody has our priority and our handle.
func TestPlaceTakenByForeignFilter(t *testing.T) {
	d := newDevice(t, Clsact)
	d.foreignFilter("foreign", filterPriority, filterHandle, pins.Program(t, "foreign", 2))
	_, err := d.Attach(d.index, FromPod, hookProgram(t, FromPod, 1))
	if err == nil || !strings.Contains(err.Error(), "foreign") {
		t.Errorf("error must name the filter in the way: %v", err)
	}
	if names := d.filterNames(); len(names) != 1 || names[0] != "foreign" {
		t.Errorf("filters: %v", names)
	}
}

func TestForeignTCXIsLeftAlone(t *testing.T) {
	d := newDevice(t, TCX)
	foreign := pins.Program(t, "foreign", 2)
	l, err := link.AttachTCX(link.TCXOptions{Interface: d.index, Program: foreign, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ours := hookProgram(t, FromPod, 1)
	d.attach(FromPod, ours)
	if ids := d.tcx(); len(ids) != 2 || ids[0] != pins.ID(t, foreign) || ids[1] != pins.ID(t, ours) {
		t.Errorf("programs on the hook: %v", ids)
	}
	if err := d.Detach(d.index, FromPod); err != nil {
		t.Fatal(err)
	}
	if ids := d.tcx(); len(ids) != 1 || ids[0] != pins.ID(t, foreign) {
		t.Errorf("programs after detach: %v", ids)
	}
}

func (d *device) tcx() (ids []ebpf.ProgramID) {
	d.t.Helper()
	got, err := link.QueryPrograms(link.QueryOptions{Target: d.index, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		d.t.Fatal(err)
	}
	for _, p := range got.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

// TestForeignIngressQdisc is where clsact would be; a filter for what leaves would see there what arrives.
func TestForeignIngressQdisc(t *testing.T) {
	for _, mode := range []Mode{Auto, Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			d := newDevice(t, mode)
			foreign := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: d.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
			}}
			if err := netlink.QdiscAdd(foreign); err != nil {
				t.Fatal(err)
			}
			p := hookProgram(t, ToPod, 1)
			_, err := d.Attach(d.index, ToPod, p)
			if mode == Clsact || !priv.HasTCX(t) {
				if err == nil || !strings.Contains(err.Error(), "ingress") {
					t.Errorf("error must name the qdisc in the way: %v", err)
				}
				d.assert(ToPod, "", 0)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			d.assert(ToPod, TCX, pins.ID(t, p))
			if err := netlink.QdiscDel(foreign); err != nil {
				t.Fatal(err)
			}
			next := hookProgram(t, ToPod, 2)
			d.attach(ToPod, next)
			d.assert(ToPod, Clsact, pins.ID(t, next))
		})
	}
}
