package datapath

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// hasClsact says whether the interface has a clsact qdisc.
func hasClsact(t *testing.T, ifindex int) bool {
	t.Helper()
	l, err := netlink.LinkByIndex(ifindex)
	check(t, err)
	all, err := netlink.QdiscList(l)
	check(t, err)
	for _, q := range all {
		if q.Type() == "clsact" {
			return true
		}
	}
	return false
}

func addClsact(t *testing.T, ifindex int) {
	t.Helper()
	check(t, netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}))
}

// addFilter adds a filter that is not ours.
func addFilter(t *testing.T, ifindex int, prog *ebpf.Program) {
	t.Helper()
	check(t, netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: "theirs", DirectAction: true,
	}))
}

func TestRemoveLeavesNothingOfOurs(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, isolated(t, mode))
			check(t, Remove(context.Background(), n.opts))
			for _, i := range append(n.pods, n.uplink) {
				for _, hook := range attach.Hooks() {
					state, err := n.opts.attacher().Attached(i, hook)
					check(t, err)
					if state.Mode != "" {
						t.Errorf("%s of interface %d still carries %+v", hook, i, state)
					}
				}
				if hasClsact(t, i) {
					t.Errorf("interface %d still has a clsact qdisc", i)
				}
			}
			if _, err := os.Stat(string(n.opts.Dir)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is still there", n.opts.Dir)
			}
			if _, err := os.Stat(qdiscs{n.opts.StateDir}.path()); !errors.Is(err, os.ErrNotExist) {
				t.Error("the record of qdiscs is still there")
			}
			check(t, Remove(context.Background(), n.opts))
		})
	}
}

func TestRemoveOnANodeThatNeverHadUs(t *testing.T) {
	opts := isolated(t, attach.Auto)
	opts.StateDir += "/none"
	check(t, Remove(context.Background(), opts))
	if _, err := os.Stat(opts.StateDir); !errors.Is(err, os.ErrNotExist) {
		t.Error("Remove made the state directory")
	}
}

func TestOthersQdiscsAndFiltersStay(t *testing.T) {
	opts := isolated(t, attach.Clsact)
	dp := mustLoad(t, opts)
	theirs, filtered := addVeth(t, "theirs"), addVeth(t, "filtered")
	addClsact(t, theirs)
	check(t, dp.AttachUplink(theirs, attach.UplinkHooks()))
	check(t, dp.AttachUplink(filtered, attach.UplinkHooks()))
	addFilter(t, filtered, dp.Program("ec_to_uplink"))
	check(t, Remove(context.Background(), opts))
	if !hasClsact(t, theirs) {
		t.Error("a qdisc that somebody else made is gone")
	}
	l, err := netlink.LinkByIndex(filtered)
	check(t, err)
	filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	check(t, err)
	if len(filters) != 1 || filters[0].Attrs().Priority != 1 {
		t.Errorf("filters %v, want the other one alone", filters)
	}
}

// TestFiltersThatNobodyRecorded are on a qdisc that somebody else made: whoever
// was killed between attaching them and writing that down left no other trace.
func TestFiltersThatNobodyRecorded(t *testing.T) {
	opts := isolated(t, attach.Clsact)
	dp := mustLoad(t, opts)
	theirs := addVeth(t, "theirs")
	addClsact(t, theirs)
	addFilter(t, theirs, dp.Program("ec_to_uplink"))
	check(t, dp.AttachUplink(theirs, attach.UplinkHooks()))
	all, err := dp.Attachments(attach.Hooks()...)
	check(t, err)
	if len(all) != 2 || all[0].Ifindex != theirs || all[1].Ifindex != theirs {
		t.Errorf("attachments %+v, want both of interface %d", all, theirs)
	}
	if state, err := opts.attacher().Attached(theirs, all[0].Hook); err != nil || state.Mode != attach.Clsact {
		t.Errorf("attached by %q, %v", state.Mode, err)
	}

	// The next start replaces them like any other.
	dp = mustLoad(t, opts)
	for _, hook := range attach.UplinkHooks() {
		if ok, err := dp.Attached(theirs, hook); !ok || err != nil {
			t.Errorf("%s carries an older program after a start (%v)", hook, err)
		}
	}

	check(t, Remove(context.Background(), opts))
	if left, err := attach.Filters(); err != nil || len(left) != 0 {
		t.Errorf("filters of ours %+v (error %v), want none", left, err)
	}
	l, err := netlink.LinkByIndex(theirs)
	check(t, err)
	filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	check(t, err)
	if len(filters) != 1 || !hasClsact(t, theirs) {
		t.Errorf("filters %v, want the other one alone, on the other's qdisc", filters)
	}
}

func TestUplinksComeAndGo(t *testing.T) {
	for _, mode := range []attach.Mode{attach.Auto, attach.Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			opts := isolated(t, mode)
			dp := mustLoad(t, opts)
			up := addVeth(t, "up")
			for range 2 {
				check(t, dp.AttachUplink(up, attach.UplinkHooks()))
				for _, hook := range attach.UplinkHooks() {
					if ok, err := dp.Attached(up, hook); !ok || err != nil {
						t.Errorf("%s is not attached (%v)", hook, err)
					}
				}
			}
			all, err := dp.Attachments(attach.Hooks()...)
			check(t, err)
			if len(all) != 2 {
				t.Errorf("attachments %+v", all)
			}
			for range 2 {
				check(t, dp.DetachUplink(up))
				for _, hook := range attach.UplinkHooks() {
					if ok, err := dp.Attached(up, hook); ok || err != nil {
						t.Errorf("%s is still attached (%v)", hook, err)
					}
				}
				if hasClsact(t, up) {
					t.Error("the qdisc is still there")
				}
			}
			if made, err := dp.qdiscs.list(); len(made) > 0 || err != nil {
				t.Errorf("recorded qdiscs %v (%v)", made, err)
			}
		})
	}
}

func TestAttachToAnInterfaceThatIsGone(t *testing.T) {
	opts := isolated(t, attach.Clsact)
	dp := mustLoad(t, opts)
	up := addVeth(t, "up")
	check(t, dp.AttachUplink(up, attach.UplinkHooks()))
	removeVeth(t, "up")
	mustLoad(t, opts)
	if made, err := dp.qdiscs.list(); len(made) > 0 || err != nil {
		t.Errorf("recorded qdiscs after a start %v (%v)", made, err)
	}
	if err := dp.AttachUplink(up, attach.UplinkHooks()); err == nil {
		t.Error("no error")
	}
	check(t, dp.DetachUplink(up))
	check(t, dp.DetachUplink(up))
	if _, err := net.InterfaceByIndex(up); err == nil {
		t.Fatal("the interface is still there")
	}
	if made, err := dp.qdiscs.list(); len(made) > 0 || err != nil {
		t.Errorf("recorded qdiscs %v (%v)", made, err)
	}
}

func TestADamagedRecordIsNamed(t *testing.T) {
	q := qdiscs{t.TempDir()}
	check(t, os.WriteFile(q.path(), []byte("3\nx\n"), 0o600))
	_, err := q.list()
	refused(t, "damaged", err, nil, q.path(), `"x"`)
}
