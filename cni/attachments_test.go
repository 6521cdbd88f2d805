package cni

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// again is another attachment of the same container, under that name.
func (p *pod) again(ifname string) *pod {
	other := *p
	other.id.IfName = ifname
	return &other
}

// inside calls do in the pod, with its network.
func (p *pod) inside(do func() error) {
	p.w.t.Helper()
	p.w.must(p.ns.Do(do))
}

// leavesBy returns the interface by which the pod sends packets from an address to the world; an invalid one leaves the choice of the source to
// the kernel. Empty: it has no route.
func (p *pod) leavesBy(family wire.Family, from netip.Addr) (name string) {
	p.w.t.Helper()
	world := [wire.Families]net.IP{wire.IPv4: net.IPv4(198, 51, 100, 1), wire.IPv6: net.ParseIP("2001:db8:ffff::1")}[family]
	p.inside(func() error {
		o := &netlink.RouteGetOptions{}
		if from.IsValid() {
			o.SrcAddr = from.AsSlice()
		}
		routes, err := netlink.RouteGetWithOptions(world, o)
		if err != nil {
			return nil //nolint:nilerr // there is no route
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err == nil {
			name = l.Attrs().Name
		}
		return err
	})
	return name
}

// routing are the pod's rules, but for the kernel's own, and its routes in all tables but the local one and the kernel's own.
func (p *pod) routing() (all []string) {
	p.w.t.Helper()
	p.inside(func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Src != nil {
					all = append(all, "rule from "+r.Src.String())
				}
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE) // table 0: all of them
			if err != nil {
				return err
			}
			for _, r := range routes {
				if r.Protocol == unix.RTPROT_BOOT {
					all = append(all, fmt.Sprintf("route to %v over %d, table %d, metric %d", r.Dst, r.LinkIndex, r.Table, r.Priority))
				}
			}
		}
		return nil
	})
	slices.Sort(all)
	return all
}

func addressOf(r *current.Result, family wire.Family) netip.Addr {
	for _, ip := range r.IPs {
		if a := toAddr(ip.Address.IP); wire.FamilyOf(a) == family {
			return a
		}
	}
	return netip.Addr{}
}

// With several attachments of the network in a pod each address leaves by its own link, and all else by the first, in whatever order they go.
func TestSeveralAttachments(t *testing.T) {
	w := newDual(t)
	before := w.everything()
	eth0 := w.newPod()
	results := map[string]*current.Result{"eth0": w.add(eth0, nil)}
	attachments := map[string]*pod{"eth0": eth0}
	expect := func(when, first string) {
		t.Helper()
		for name, p := range attachments {
			for _, f := range w.families {
				if by := p.leavesBy(f, netip.Addr{}); by != first {
					t.Errorf("%s: %s leaves by %q, want %q", when, f.Name(), by, first)
				}
				a := addressOf(results[name], f)
				if by := p.leavesBy(f, a); by != name {
					t.Errorf("%s: packets from %s of %s leave by %q", when, a, name, by)
				}
				c, err := w.reach(p, a)
				if err != nil {
					t.Errorf("%s: %s of %s does not answer: %v", when, a, name, err)
					continue
				}
				c.Close()
			}
			w.ok("CHECK", p, prevResult(t, results[name]))
		}
	}
	add := func(name string) {
		attachments[name] = eth0.again(name)
		results[name] = w.add(attachments[name], nil)
	}
	remove := func(name string) {
		w.ok("DEL", attachments[name], nil)
		delete(attachments, name)
	}
	alone, node := eth0.routing(), w.everything()
	add("net1")
	expect("a second one", "eth0")
	remove("net1")
	expect("without it", "eth0")
	if diff := cmp.Diff(alone, eth0.routing()); diff != "" {
		t.Errorf("left in the pod (+) or lost (-):\n%s", diff)
	}
	w.unchanged(node)
	add("net1")
	add("net2")
	expect("three", "eth0")
	three, killed := eth0.routing(), eth0.again("net3")
	w.killed(killed, "state file")
	w.ok("DEL", killed, nil)
	if diff := cmp.Diff(three, eth0.routing()); diff != "" {
		t.Errorf("an ADD that was killed has left in the pod (+) or taken (-):\n%s", diff)
	}
	w.ok("GC", nil, gcList(eth0, attachments["net2"]))
	delete(attachments, "net1")
	expect("the second was collected", "eth0")
	remove("eth0")
	expect("without the first", "net2")
	remove("net2")
	if left := eth0.routing(); len(left) > 0 {
		t.Errorf("left in the pod: %v", left)
	}
	w.unchanged(before)
}

// A rule of an attachment's that is missing is a fault of that attachment's, not of the other.
func TestCheckSeesSourceRules(t *testing.T) {
	w := newDual(t)
	eth0 := w.newPod()
	net1 := eth0.again("net1")
	first, second := w.add(eth0, nil), w.add(net1, nil)
	e, err := endpoint.Read(w.stateDir, net1.id)
	w.must(err)
	h, err := device.OpenIn(eth0.ns)
	w.must(err)
	defer h.Close()
	for _, a := range e.Addresses {
		w.must(h.DeleteSourceRule(a, 1<<27+e.HostIndex))
		w.refused(codeCheckFailed, "CHECK", net1, prevResult(t, second), "no routing rule for packets from "+a.String())
		w.ok("CHECK", eth0, prevResult(t, first))
		w.must(h.AddSourceRule(a, 1<<27+e.HostIndex))
		w.ok("CHECK", net1, prevResult(t, second))
	}
}
