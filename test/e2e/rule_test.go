package e2e

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// routesDecided waits until the agent has given routes to the stack, or taken them back.
func routesDecided(t *testing.T, node *lab.Node, want bool) {
	t.Helper()
	eventually(t, answerLimit, "the stack decides on routes", func() bool {
		flags, _ := dump(t, node, "config")[0]["flags"].(string)
		return strings.Contains(flags, "routes_to_stack") == want
	})
}

// byStack has the stack decide on routes while flows are opened, which go by the stack for good.
func byStack(t *testing.T, node *lab.Node, open func()) {
	t.Helper()
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table, rule.Tos = [wire.Families]int{unix.AF_INET, unix.AF_INET6}[wire.FamilyOf(node.Addr())], 100, 77, 0x10
	must(t, node.Netlink().RuleAdd(rule))
	routesDecided(t, node, true)
	open()
	eventually(t, changeLimit, "a flow goes by the host's stack", func() bool { return slices.ContainsFunc(dump(t, node, "snat"), walksStack) })
	must(t, node.Netlink().RuleDel(rule))
	routesDecided(t, node, false)
}

// A rule that asks for the mark of a packet is about no pod's, and changes nothing for them. Where the host's firewall sets such a mark
// in theirs, the stack decides on every packet's way. Open connections live through both.
func TestRuleThatAsksForAMark(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		all := startSecured(t, lab.Options{AgentFlags: []string{flag}})
		family := firstFamily(all.Lab)
		s, names := all.in(t, family), netfilters[family]
		var olds []*lab.TCPConn
		for from, to := range map[*lab.Namespace]netip.AddrPort{s.pod.Namespace: s.outside, s.Outside: s.own, s.far.Namespace: s.own} {
			old, err := from.DialTCP(t.Context(), to, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer old.Close()
			olds = append(olds, old)
		}
		assertAll := func(when string) {
			t.Helper()
			for _, old := range olds {
				if err := old.Echo(within(t, 10*time.Second), 5000); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			}
			s.assertOpen(t)
		}
		// A firewall that wants to see both directions of what it sees at all.
		runOn(t, s.node, names.iptables+"-nft", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Table, rule.Mark = [wire.Families]int{unix.AF_INET, unix.AF_INET6}[family], 100, 77, 0x10
		if err := s.node.Netlink().RuleAdd(rule); err != nil {
			t.Fatal(err)
		}
		assertAll("with the rule")
		routesDecided(t, s.node, false)
		err := s.node.Netlink().RouteAdd(&netlink.Route{Dst: prefix(lab.FabricPrefix[family].String()), Table: 77, Type: unix.RTN_PROHIBIT})
		if err != nil {
			t.Fatal(err)
		}
		runOn(t, s.node, names.iptables+"-nft", "-t", "mangle", "-A", "PREROUTING", "-p", "tcp", "--dport", "7", "-j", "MARK", "--set-mark", "0x10")
		routesDecided(t, s.node, true)
		if out, err := s.node.Ebpfctl(t.Context(), "status"); err == nil || !strings.Contains(string(out), "- rule 100 asks for a packet mark") {
			t.Errorf("status names no problem, error %v:\n%s", err, out)
		}
		if _, err := s.pod.TCP(within(t, 2*time.Second), netip.AddrPortFrom(s.outside.Addr(), 7)); err == nil || strings.Contains(err.Error(), "refused") {
			t.Errorf("what the rule prohibits: %v", err)
		}
		assertAll("beside what the rule prohibits")
		if err := s.node.Netlink().RuleDel(rule); err != nil {
			t.Fatal(err)
		}
		routesDecided(t, s.node, false)
		assertAll("without the rule")
	})
}

func runOn(t *testing.T, node *lab.Node, program string, args ...string) {
	t.Helper()
	if out, err := node.Exec(t.Context(), program, args...); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
