package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// TestForeignRoutesAreLittleWork has somebody else change routes all the time: most of that is nothing to the agent, the rest
// makes it look now and then, and what is ours comes back all the same.
func TestForeignRoutesAreLittleWork(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, way string) {
		d := startDamaged(t, []string{way, "--log-level=debug"})
		for before := -1; before != d.eventPasses(t); time.Sleep(time.Second) { // those for the pod
			before = d.eventPasses(t)
		}
		route := func(bits, table int) *netlink.Route {
			dst := &net.IPNet{IP: net.IPv4(198, 18, 7, 0).To4(), Mask: net.CIDRMask(bits, 32)}
			return &netlink.Route{Dst: dst, LinkIndex: d.uplink(t), Scope: netlink.SCOPE_LINK, Protocol: unix.RTPROT_BOOT, Table: table}
		}
		const long = 3 * time.Second
		before := d.eventPasses(t)
		stop := flood(t, d.node, route(32, unix.RT_TABLE_MAIN), route(24, 4711))
		time.Sleep(long)
		changes := stop()
		if made := d.eventPasses(t) - before; made != 0 {
			t.Errorf("%d passes for %d changes that are nothing to us", made, changes)
		}

		before = d.eventPasses(t)
		began := time.Now()
		stop = flood(t, d.node, route(24, unix.RT_TABLE_MAIN))
		far := d.Nodes[1].PodCIDR()
		for what, remove := range map[string]func() error{
			"a route": func() error {
				return d.node.Netlink().RouteDel(&netlink.Route{Dst: &net.IPNet{IP: far.Addr().AsSlice(), Mask: net.CIDRMask(far.Bits(), 32)}})
			},
			"a program": func() error { return d.detach(way, d.link.Attrs().Index, "from_pod") },
			"pins":      func() error { return emptyDir(d.dir.Maps()) },
		} {
			ours := lookAt(func() lab.Snapshot { return d.owned(t) })
			if err := remove(); err != nil {
				t.Fatalf("remove %s: %v", what, err)
			}
			ours.assertBack(t, repairPromise, what)
		}
		time.Sleep(max(0, long-time.Since(began)))
		changes = stop()
		if made := d.eventPasses(t) - before; made == 0 || made > changes/10 {
			t.Errorf("%d passes for %d changes", made, changes)
		}
	})
}

// eventPasses is how many passes the agent has made because of events.
func (d *damaged) eventPasses(t *testing.T) (made int) {
	t.Helper()
	log, err := os.ReadFile(d.node.AgentLog())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "msg=pass") && strings.Contains(line, "whole=false") {
			made++
		}
	}
	return made
}

// owned is what of a node is ours and is removed while others are busy.
func (d *damaged) owned(t *testing.T) (found lab.Snapshot) {
	t.Helper()
	routes, err := d.node.Netlink().RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: device.Protocol}, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		found = append(found, r.String())
	}
	for path := range pinnedObjects(t, d.dir) {
		found = append(found, path)
	}
	slices.Sort(found)
	err = d.node.Do(func() error {
		state, err := (attach.Attacher{Dir: d.dir}).Attached(d.link.Attrs().Index, attach.FromPod)
		found = append(found, fmt.Sprintf("the pod's program: %s", state.Mode))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// flood adds and deletes routes until the function returned is called, which says how many changes that were.
func flood(t *testing.T, node *lab.Node, routes ...*netlink.Route) (stop func() (changes int)) {
	const each = 5 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	made := make(chan int, 1)
	go func() {
		changes := 0
		for tick := time.NewTicker(each); ctx.Err() == nil; <-tick.C {
			for _, r := range routes {
				for _, change := range []func(*netlink.Route) error{node.Netlink().RouteReplace, node.Netlink().RouteDel} {
					if err := change(r); err != nil {
						t.Errorf("change the route %v: %v", r, err)
					}
					changes++
				}
			}
		}
		made <- changes
	}()
	return func() int { cancel(); return <-made }
}
