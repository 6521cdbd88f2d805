package cni

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// forEachStack runs a test on nodes of one family and of both, with the podCIDRs in either order.
func forEachStack(t *testing.T, test func(t *testing.T, w *fixture)) {
	for name, families := range map[string][]wire.Family{
		"IPv4": {wire.IPv4}, "IPv6": {wire.IPv6}, "dual": {wire.IPv4, wire.IPv6}, "dual, IPv6 first": {wire.IPv6, wire.IPv4},
	} {
		t.Run(name, func(t *testing.T) { test(t, newFixture(t, families...)) })
	}
}

// newDual is a node of both families.
func newDual(t testing.TB) *fixture { return newFixture(t, wire.IPv4, wire.IPv6) }

// rangesOf is the field of that name of host-local.
func rangesOf(families ...wire.Family) (sets [][]any) {
	for _, f := range families {
		sets = append(sets, []any{map[string]any{"subnet": podCIDRs[f].String()}})
	}
	return sets
}

// pick are those of each of the node's families.
func (w *fixture) pick(of [wire.Families]netip.Addr) (all []netip.Addr) {
	for _, f := range w.families {
		all = append(all, of[f])
	}
	return all
}

// Where IPv6 is disabled, as container engines do it in new namespaces, a pod's link gets it if the pod has an address of it,
// and nothing else does.
func TestIPv6Disabled(t *testing.T) {
	forEachStack(t, func(t *testing.T, w *fixture) {
		before := w.everything()
		p := w.newPod()
		disable := func(which string) error {
			_, err := device.Sysctl{}.Set("net/ipv6/conf/"+which+"/disable_ipv6", "1")
			return err
		}
		w.must(disable("default"))
		w.must(p.ns.Do(func() error { return disable("all") }))
		r := w.add(p, nil)
		disabled := func(link string, want bool) {
			got, err := device.Sysctl{}.Get("net/ipv6/conf/" + link + "/disable_ipv6")
			if err != nil || (got == "1") != want {
				t.Errorf("disable_ipv6 of %s is %s, %v", link, got, err)
			}
		}
		alone := !slices.Contains(w.families, wire.IPv6)
		disabled("default", true)
		disabled(p.id.HostLinkName(), alone)
		w.must(p.ns.Do(func() error {
			disabled("lo", true)
			disabled("default", true)
			disabled("eth0", alone)
			return nil
		}))
		w.ok("CHECK", p, prevResult(t, r))
		w.ok("DEL", p, nil)
		w.unchanged(before)
	})
}

func TestMTUTooSmallForIPv6(t *testing.T) {
	d := newDelegating(t)
	local := hostLocal(map[string]any{"ranges": rangesOf(wire.IPv4, wire.IPv6)})
	p := d.newPod()
	p.id.IfName = "net7"
	conf := merged(prevResult(t, d.add(p, local)), local)
	d.must(p.ns.Do(func() error {
		l, err := netlink.LinkByName("net7")
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(l, 1279)
	}))
	d.refused(codeCheckFailed, "CHECK", p, conf, "MTU 1279, address fd00:9::2 needs at least 1280")
	d.ok("DEL", p, local)

	small := merged(map[string]any{"mtu": 1279}, local)
	d.refused(7, "ADD", p, small, "mtu: 1279", "IPv6", "interface net7", "at least 1280")
	d.refused(7, "STATUS", nil, small, "mtu: 1279", "IPv6", "at least 1280")
	d.answer("172.20.3.4/16", "fd00:20::4/64")
	d.refused(7, "ADD", p, map[string]any{"mtu": 1279}, "mtu: 1279", "IPv6", "interface net7", "at least 1280")
	d.asked("ADD", "DEL")
	d.unchanged(d.before)
	d.answer("172.20.3.4/16")
	d.add(p, map[string]any{"mtu": 1279})
	d.add(d.newPod(), merged(map[string]any{"mtu": 1280}, local))
}
