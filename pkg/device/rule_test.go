package device

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// cidr is a prefix as netlink takes it.
func cidr(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func TestRules(t *testing.T) {
	inside(t)
	before, err := Rules(IPv4)
	must(t, err)
	if diff := cmp.Diff([]Rule{{Table: 255}, {Priority: 32766, Table: 254}, {Priority: 32767, Table: 253}}, before, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
		t.Errorf("the kernel's own rules (-want +got):\n%s", diff)
	}
	prefix, mask := cidr("10.1.0.0/16"), uint32(0xf0)
	for _, c := range []struct {
		change func(*netlink.Rule)
		want   string
		marks  uint32
		inPart bool
	}{
		{func(r *netlink.Rule) { r.Src = prefix }, "", 0, false},
		{func(r *netlink.Rule) { r.Dst = prefix }, "", 0, false},
		{func(r *netlink.Rule) { r.Src, r.Invert = prefix, true }, "", 0, false},
		{func(r *netlink.Rule) { r.IifName = "lo" }, "", 0, false},
		{func(r *netlink.Rule) { r.IifName, r.Invert = "lo", true }, "", 0, true},
		{func(r *netlink.Rule) { r.IifName = "eth7" }, "", 0, true},
		{func(r *netlink.Rule) { r.IifName, r.Invert = "eth7", true }, "", 0, false},
		{func(r *netlink.Rule) { r.OifName = "lo" }, "", 0, true},
		{func(r *netlink.Rule) { r.IPProto = unix.IPPROTO_TCP }, "", 0, true},
		{func(r *netlink.Rule) { r.UIDRange = netlink.NewRuleUIDRange(0, 1000) }, "", 0, true},
		{func(r *netlink.Rule) { r.Mark = 0x10 }, "", ^uint32(0), true},
		{func(r *netlink.Rule) { r.Mark, r.Mask, r.Invert = 0x10, &mask, true }, "", mask, false},
		{func(r *netlink.Rule) { r.Mask = &mask }, "", mask, false},
		{func(r *netlink.Rule) { r.Tos = 0x10 }, "a TOS value", 0, true},
		{func(r *netlink.Rule) {
			r.IPProto, r.Dport = unix.IPPROTO_UDP, netlink.NewRulePortRange(53, 53)
		}, "a destination port", 0, true},
		{func(r *netlink.Rule) {
			r.IPProto, r.Sport = unix.IPPROTO_TCP, netlink.NewRulePortRange(80, 90)
		}, "a source port", 0, true},
		{func(r *netlink.Rule) { r.Src, r.Mark = prefix, 16 }, "", ^uint32(0), true},
	} {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Table = unix.AF_INET, 100, 77
		c.change(rule)
		must(t, netlink.RuleAdd(rule))
		rules, err := Rules(IPv4)
		must(t, err)
		var from netip.Prefix
		if rule.Src != nil && !rule.Invert {
			from = netip.MustParsePrefix("10.1.0.0/16")
		}
		if diff := cmp.Diff([]Rule{before[0], {100, 77, c.want, c.marks, c.inPart, from}, before[1], before[2]}, rules, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", rule, diff)
		}
		must(t, netlink.RuleDel(rule))
	}
	if _, err := parseRule([]byte{2}); err == nil {
		t.Error("half a message is taken for a rule")
	}
	unknown := append(make([]byte, 12), 8, 0, 0x77, 0, 1, 2, 3, 4)
	if r, err := parseRule(unknown); err != nil || r.Unseen == "" {
		t.Errorf("a condition that is not known yet: %+v, %v", r, err)
	}
}

func TestTableRoutes(t *testing.T) {
	h, lo := inside(t)
	for _, r := range []netlink.Route{
		{Dst: cidr("10.5.0.0/16"), Table: 77}, {Dst: cidr("10.6.0.0/16"), Table: 78}, {Dst: cidr("10.7.0.0/16"), Tos: 0x10},
		{Dst: cidr("fd00:5::/32"), Table: 77}, {Dst: cidr("fd00:6::/32"), Table: 78},
	} {
		r.LinkIndex = lo
		must(t, netlink.RouteAdd(&r))
	}
	for family, dst := range map[int]string{IPv4: "10.5.0.0/16", IPv6: "fd00:5::/32"} {
		var got []Route
		err := h.EachRoute(family, 77, 0, func(r Route) { got = append(got, r) })
		if err != nil || len(got) != 1 || got[0].Dst != netip.MustParsePrefix(dst) || got[0].Table != 77 || got[0].Index != lo {
			t.Errorf("%+v, %v", got, err)
		}
	}
	main, err := h.Routes()
	if err != nil || len(main) != 1 || main[0].TOS != 0x10 {
		t.Errorf("main table %+v, %v", main, err)
	}
}

// A family, a table and a protocol are each asked for alone.
func TestEachRoute(t *testing.T) {
	h, lo := inside(t)
	for dst, foreign := range map[string]bool{"10.1.0.0/24": false, "10.2.0.0/24": true, "fd00:1::/64": false, "fd00:2::/64": true} {
		must(t, h.ReplaceRoute(Route{Dst: netip.MustParsePrefix(dst), Index: lo, Foreign: foreign}))
	}
	for _, tt := range []struct {
		family, protocol int
		want             []string
	}{
		{IPv4, 0, []string{"10.1.0.0/24", "10.2.0.0/24"}},
		{IPv4, Protocol, []string{"10.1.0.0/24"}},
		{IPv6, 0, []string{"fd00:1::/64", "fd00:2::/64"}},
		{IPv6, Protocol, []string{"fd00:1::/64"}},
	} {
		var got []string
		must(t, h.EachRoute(tt.family, 0, tt.protocol, func(r Route) {
			if r.Protocol == Protocol || r.Protocol == unix.RTPROT_BOOT { // not the kernel's own of lo
				got = append(got, r.Dst.String())
			}
		}))
		if !slices.Equal(got, tt.want) {
			t.Errorf("family %d, protocol %d: %v, want %v", tt.family, tt.protocol, got, tt.want)
		}
	}
}

func TestPolicies(t *testing.T) {
	inside(t)
	if got, err := Policies(IPv4); err != nil || len(got) != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	protect := []netlink.XfrmPolicyTmpl{{
		Src: net.IPv4(10, 0, 0, 1), Dst: net.IPv4(10, 0, 0, 2), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL,
	}}
	ask := slices.Clone(protect)
	ask[0].Optional = 1
	const out, in, fwd, block = netlink.XFRM_DIR_OUT, netlink.XFRM_DIR_IN, netlink.XFRM_DIR_FWD, netlink.XFRM_POLICY_BLOCK
	for _, policy := range []netlink.XfrmPolicy{
		{Src: cidr("10.1.0.0/16"), Dst: cidr("192.0.2.0/24"), Dir: out, Tmpls: protect},
		{Src: cidr("192.0.2.0/24"), Dst: cidr("10.1.0.0/16"), Dir: fwd, Tmpls: ask},
		{Src: cidr("192.0.2.0/24"), Dst: cidr("10.1.0.0/16"), Dir: in, Tmpls: protect},
		{Src: cidr("0.0.0.0/0"), Dst: cidr("198.51.100.1/32"), Dir: out, Action: block},
		{Src: cidr("10.2.0.0/16"), Dst: cidr("10.3.0.0/16"), Dir: out}, // lets pass
		{Src: cidr("10.2.0.0/16"), Dst: cidr("10.4.0.0/16"), Dir: out, Ifid: 7, Tmpls: protect},
		{Src: cidr("fd00::/64"), Dst: cidr("fd01::/64"), Dir: out, Action: block},
	} {
		must(t, netlink.XfrmPolicyAdd(&policy))
	}
	p := netip.MustParsePrefix
	want := []Policy{
		{p("192.0.2.0/24"), p("10.1.0.0/16"), false, false},
		{p("10.1.0.0/16"), p("192.0.2.0/24"), true, true},
		{p("0.0.0.0/0"), p("198.51.100.1/32"), true, true},
	}
	got, err := Policies(IPv4)
	slices.SortFunc(got, func(a, b Policy) int { return a.Dst.Addr().Compare(b.Dst.Addr()) })
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" || err != nil {
		t.Errorf("error %v (-want +got):\n%s", err, diff)
	}
}

// What setDefault takes, besides 0, which leaves a direction as it is.
const (
	block  = 1
	accept = 2
)

// setDefault says what becomes of packets that no policy is about.
func setDefault(in, fwd, out byte) error {
	const setDefault = 0x27 // XFRM_MSG_SETDEFAULT
	req := nl.NewNetlinkRequest(setDefault, unix.NLM_F_ACK)
	req.AddRawData([]byte{in, fwd, out})
	_, err := req.Execute(unix.NETLINK_XFRM, 0)
	return err
}

func TestDefaultPolicies(t *testing.T) {
	inside(t)
	everything := netip.MustParsePrefix("0.0.0.0/0")
	for _, step := range []struct {
		in, fwd, out byte
		want         []Policy
	}{
		{block, 0, 0, nil},
		{0, 0, block, []Policy{{everything, everything, true, true}}},
		{0, block, 0, []Policy{{everything, everything, true, true}, {everything, everything, false, true}}},
		{0, 0, accept, []Policy{{everything, everything, false, true}}},
		{0, accept, 0, nil},
	} {
		must(t, setDefault(step.in, step.fwd, step.out))
		got, err := Policies(IPv4)
		if !slices.Equal(step.want, got) || err != nil {
			t.Errorf("after %d, %d, %d: %+v, %v; want %+v", step.in, step.fwd, step.out, got, err, step.want)
		}
	}
}

// What changes is noticed, whatever it is.
func TestWatchNotices(t *testing.T) {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table, rule.Mark = unix.AF_INET, 100, 77, 1
	policy := &netlink.XfrmPolicy{
		Src: cidr("10.1.0.0/16"), Dst: cidr("192.0.2.0/24"), Dir: netlink.XFRM_DIR_OUT, Action: netlink.XFRM_POLICY_BLOCK,
	}
	six := netlink.NewRule()
	six.Family, six.Priority, six.Table = IPv6, 100, 77
	write := func(name, value string) func() error {
		return func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }
	}
	filter := func(value string) func() error { return write("ipv4/conf/lo/rp_filter", value) }
	forward := func(value string) func() error { return write("ipv4/ip_forward", value) }
	for name, c := range map[string]struct {
		want         Event
		watch        func(context.Context, func(Event)) error
		change, back func() error
	}{
		"rule":         {Event{Kind: RuleEvent, Family: IPv4}, Watch, func() error { return netlink.RuleAdd(rule) }, func() error { return netlink.RuleDel(rule) }},
		"rule of IPv6": {Event{Kind: RuleEvent, Family: IPv6}, Watch, func() error { return netlink.RuleAdd(six) }, func() error { return netlink.RuleDel(six) }},
		"forwarding of all in IPv6": {
			Event{Kind: SettingEvent, Family: IPv6, Settings: Settings{Index: AllLinks, Forwarding: 1, RPFilter: Untold}}, Watch,
			write("ipv6/conf/all/forwarding", "1"), write("ipv6/conf/all/forwarding", "0"),
		},
		"sysctl": {Event{Kind: SettingEvent, Family: IPv4, Settings: Settings{Index: 1, Forwarding: Untold, RPFilter: 2}}, Watch, filter("2"), filter("1")},
		"forwarding of all": {
			Event{Kind: SettingEvent, Family: IPv4, Settings: Settings{Index: AllLinks, Forwarding: 1, RPFilter: Untold}}, Watch, forward("1"), forward("0"),
		},
		"policy": {Event{Kind: PolicyEvent}, WatchPolicies, func() error { return netlink.XfrmPolicyAdd(policy) }, netlink.XfrmPolicyFlush},
		"default policy": {
			Event{Kind: PolicyEvent}, WatchPolicies, func() error { return setDefault(0, 0, block) }, func() error { return setDefault(0, 0, accept) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			inside(t)
			ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(5*time.Second))
			defer cancel()
			namespace, err := os.Open("/proc/thread-self/ns/net")
			must(t, err)
			defer namespace.Close()
			done := make(chan struct{})
			go func() { // again and again: nobody knows when the watch has begun
				defer close(done)
				runtime.LockOSThread() // for good: the thread ends with the goroutine
				if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
					t.Error(err)
					return
				}
				for ctx.Err() == nil {
					for _, do := range []func() error{c.change, c.back} {
						if err := do(); err != nil {
							t.Error(err)
						}
						time.Sleep(time.Millisecond)
					}
				}
			}()
			noticed := false
			err = c.watch(ctx, func(e Event) {
				if e.Gone = false; cmp.Equal(e, c.want, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})) {
					noticed = true
					cancel()
				}
			})
			<-done
			if !noticed || !errors.Is(err, context.Canceled) {
				t.Errorf("noticed %v, error %v", noticed, err)
			}
		})
	}
}

// A source rule is written once, found, and deleted, as often as that is asked for.
func TestSourceRules(t *testing.T) {
	p := newPair(t)
	for _, source := range []netip.Addr{netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("fd00:9::2")} {
		const table = 1<<27 + 7
		expect := func(want bool) {
			t.Helper()
			for number, want := range map[int]bool{table: want, table + 1: false} {
				if there, err := p.host.HasSourceRule(source, number); err != nil || there != want {
					t.Errorf("%s, table %d: %t, %v, want %t", source, number, there, err, want)
				}
			}
		}
		for range 2 {
			must(t, p.host.AddSourceRule(source, table))
			expect(true)
		}
		must(t, p.host.DeleteSourceRule(source, table+1))
		expect(true)
		for range 2 {
			must(t, p.host.DeleteSourceRule(source, table))
			expect(false)
		}
	}
}
