package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// FuzzMake gives one Node any content beside two good ones, and checks what must
// hold whatever a Node says.
func FuzzMake(f *testing.F) {
	for _, seed := range []string{
		"n4;10.244.4.0/24;172.18.0.14", "n4;0.0.0.0/0;172.18.0.14", "n4;10.244.2.0/23;172.18.0.14",
		"n4;172.18.0.0/16;172.18.0.14", "n4;10.244.4.0/24;10.244.2.9", "n1;10.244.9.0/24;172.18.0.11",
		"n2;;", ";;", "n4;fd00::/64,10.244.4.0/24;fd00::1,172.18.0.14", "n4;::ffff:10.0.0.0/104;::ffff:1.2.3.4",
		"n4;10.96.0.0/16;172.18.0.255", "n4;fd00:10:244:4::/64;fd00:172:18::14", "n4;10.244.4.0/24;fe80::1,fd00:172:18::14", "n4;10.244.4.0/24;172.18.0.14,172.18.0.13,10.96.0.10", "n4;10.244.0.0/16,10.244.0.0/17;172.18.0.14",
	} {
		f.Add(seed, true)
		f.Add(seed, false)
	}
	f.Fuzz(func(t *testing.T, text string, known bool) {
		parts := strings.SplitN(text+";;", ";", 4)
		bad := Node{
			Name: parts[0], Created: day2,
			PodCIDRs: strings.Split(parts[1], ","), InternalIPs: strings.Split(parts[2], ","),
		}
		good := withService(input(node(1), node(2), node(3)))
		good.Mode, good.Facts.Tunnel = RouteVXLAN, tunnelIndex
		before, in := Make(good), good
		in.Nodes = append(slices.Clone(in.Nodes), bad)
		in.Before, in.Known = before.Standing, known
		r := Make(in)
		checkInvariants(t, in, r)
		for k, v := range before.Destinations {
			if r.Destinations[k] != v {
				t.Errorf("%s was %v, is %v", k.Netip(), v, r.Destinations[k])
			}
		}
		// What a plan leaves standing must not change the next plan.
		in.Before = r.Standing
		if again := Make(in); fmt.Sprint(dump(again)) != fmt.Sprint(dump(r)) {
			t.Errorf("a second plan differs: %v, then %v", dump(r), dump(again))
		}
	})
}

// FuzzClaims gives three Nodes any podCIDR and age: the outcome must never
// overlap, nor depend on anything but the rules.
func FuzzClaims(f *testing.F) {
	f.Add(uint32(0x0af40200), uint8(24), uint32(0x0af40280), uint8(25), uint32(0x0af40000), uint8(16), uint8(0))
	f.Add(uint32(0), uint8(0), uint32(0x7f000001), uint8(8), uint32(0xac120000), uint8(16), uint8(7))
	f.Add(uint32(0x0af40100), uint8(24), uint32(0x0af40100), uint8(24), uint32(0x0af40100), uint8(24), uint8(3))
	f.Fuzz(func(t *testing.T, a uint32, abits uint8, b uint32, bbits uint8, c uint32, cbits uint8, ages uint8) {
		in := withService(input(node(1)))
		for i, p := range []struct {
			addr uint32
			bits uint8
		}{{a, abits}, {b, bbits}, {c, cbits}} {
			addr := netip.AddrFrom4([4]byte{byte(p.addr >> 24), byte(p.addr >> 16), byte(p.addr >> 8), byte(p.addr)})
			n := node(i + 2)
			n.PodCIDRs = []string{fmt.Sprintf("%s/%d", addr, p.bits%33)}
			n.Created = day1.Add(time.Duration(ages>>(2*i)&3) * time.Hour)
			in.Nodes = append(in.Nodes, n)
		}
		r := Make(in)
		checkInvariants(t, in, r)
		if r.NotReady != "" {
			t.Errorf("other nodes' claims made this one not ready: %s", r.NotReady)
		}
	})
}

func checkInvariants(t *testing.T, in Input, r Result) {
	t.Helper()
	var pods []netip.Prefix
	for k, v := range r.Destinations {
		p := k.Netip()
		if p.Bits() == 0 || p != p.Masked() || !Used(in.Self, in.Nodes, in.Before, in.Facts.Lacks)[wire.FamilyOf(p.Addr())] {
			t.Errorf("destination %s", p)
		}
		if v.NeighbourChecked != 0 {
			t.Errorf("%s: a field of the programs is set", p)
		}
		if v.Kind == destinations.PodCIDR || v.Kind == destinations.Local && !p.IsSingleIP() {
			pods = append(pods, p)
		}
	}
	for i, p := range pods {
		for _, q := range pods[:i] {
			if p.Overlaps(q) {
				t.Errorf("podCIDRs %s and %s overlap", p, q)
			}
		}
		_, claimed := in.Before.Claims[p]
		if q, bad := overlapsAny(p, in.Service); bad && !claimed && !slices.Contains(in.Before.Own, p) {
			t.Errorf("podCIDR %s overlaps the service CIDR %s", p, q)
		}
		for k, v := range r.Destinations {
			a := k.Netip()
			ofTunnel := a.IsSingleIP() && a.Addr() == r.Config.Tunnel[wire.FamilyOf(a.Addr())].Address.Netip()
			if (v.Kind == destinations.Node || v.Kind == destinations.Host) && p.Overlaps(a) && !ofTunnel {
				t.Errorf("podCIDR %s overlaps %s %s", p, v.Kind, a)
			}
		}
	}
	for _, l := range in.Facts.Local {
		if v := r.Destinations[destinations.KeyFrom(l)]; v.Kind != destinations.Host {
			t.Errorf("own address %s is %s", l, v.Kind)
		}
	}
	seen := map[netip.Prefix]bool{}
	for _, route := range r.Routes {
		if seen[route.Dst] {
			t.Errorf("two routes to %s", route.Dst)
		}
		seen[route.Dst] = true
	}
	for _, p := range r.Problems {
		if p.Text == "" || p.Reason == "" {
			t.Errorf("a problem without text or reason: %+v", p)
		}
	}
}
