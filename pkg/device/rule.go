package device

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Rule is a rule that chooses a routing table (`ip rule`).
type Rule struct {
	Priority int
	Table    int
	// Unseen names what the rule matches that the programs cannot pass to a route lookup; empty: nothing.
	Unseen string
	// Marks are the bits of a packet's mark that the rule asks for, set or not. Lookups of the programs are for mark 0.
	Marks uint32
	// InPart says that it does not match each packet that the host itself sends without a mark: it asks for a mark, an interface, a protocol,
	// a user or a TOS value.
	InPart bool
	// From is the only prefix that sources which the rule matches are in; invalid: there is none.
	From netip.Prefix
}

// seen are the attributes that a lookup by interface, addresses and protocol takes into account, and those that match
// nothing of a packet.
var seen = map[uint16]bool{
	unix.FRA_DST: true, unix.FRA_SRC: true, unix.FRA_IIFNAME: true, unix.FRA_OIFNAME: true, unix.FRA_IP_PROTO: true,
	unix.FRA_UID_RANGE: true, unix.FRA_L3MDEV: true,
	unix.FRA_PRIORITY: true, unix.FRA_TABLE: true, unix.FRA_GOTO: true, unix.FRA_PROTOCOL: true, unix.FRA_FLOW: true,
	unix.FRA_SUPPRESS_IFGROUP: true, unix.FRA_SUPPRESS_PREFIXLEN: true, unix.FRA_PAD: true,
	unix.FRA_FWMARK: true, // FRA_FWMASK comes with it
}

// unseen names the others. Attributes that are newer than this list are shown as a number.
var unseen = map[uint16]string{
	unix.FRA_TUN_ID:      "a tunnel",
	unix.FRA_SPORT_RANGE: "a source port", unix.FRA_DPORT_RANGE: "a destination port",
	// FRA_DSCP, FRA_SPORT_MASK, FRA_DPORT_MASK and FRA_DSCP_MASK, which have no names here yet.
	25: "a DSCP value", 28: "a source port", 29: "a destination port", 30: "a DSCP value",
}

// Rules lists the rules of these families in the namespace of the calling goroutine's thread.
func Rules(families ...int) (all []Rule, err error) {
	for _, family := range families {
		some, err := rulesOf(family)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func rulesOf(family int) ([]Rule, error) {
	list, err := dump(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(family))
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWRULE)
	})
	if isErrno(err, unix.EOPNOTSUPP, unix.EAFNOSUPPORT) { // a kernel without policy routing, or without the family
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	out := make([]Rule, 0, len(list))
	for _, m := range list {
		r, err := parseRule(m)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func parseRule(m []byte) (r Rule, err error) {
	if len(m) < unix.SizeofRtMsg {
		return r, fmt.Errorf("list routing rules: a message of %d bytes", len(m))
	}
	head := nl.DeserializeRtMsg(m)
	attrs, err := nl.ParseRouteAttr(m[unix.SizeofRtMsg:])
	if err != nil {
		return r, fmt.Errorf("list routing rules: %w", err)
	}
	r.Table = int(head.Table)
	inverted := head.Flags&unix.FIB_RULE_INVERT != 0
	if head.Tos != 0 {
		r.Unseen, r.InPart = "a TOS value", !inverted
	}
	for _, a := range attrs {
		kind := a.Attr.Type & nl.NLA_TYPE_MASK
		r.InPart = r.InPart || isInPart(kind, a.Value, inverted)
		switch {
		case kind == unix.FRA_SRC && !inverted:
			addr, _ := netip.AddrFromSlice(a.Value)
			r.From = netip.PrefixFrom(addr, int(head.Src_len))
		case kind == unix.FRA_PRIORITY && len(a.Value) == 4:
			r.Priority = int(binary.NativeEndian.Uint32(a.Value))
		case kind == unix.FRA_TABLE && len(a.Value) == 4:
			r.Table = int(binary.NativeEndian.Uint32(a.Value))
		case kind == unix.FRA_FWMASK && len(a.Value) == 4:
			r.Marks = binary.NativeEndian.Uint32(a.Value)
		case seen[kind]:
		case unseen[kind] != "":
			r.Unseen = unseen[kind]
		default:
			r.Unseen = fmt.Sprintf("something new (attribute %d)", kind)
		}
	}
	return r, nil
}

// isInPart says so of one attribute of a rule. The input interface of the host's own packets is lo.
func isInPart(kind uint16, value []byte, inverted bool) bool {
	switch kind {
	case unix.FRA_FWMARK:
		unmarked := len(value) == 4 && binary.NativeEndian.Uint32(value) == 0
		return unmarked == inverted
	case unix.FRA_IIFNAME:
		lo := unix.ByteSliceToString(value) == "lo"
		return lo == inverted
	case unix.FRA_OIFNAME, unix.FRA_IP_PROTO, unix.FRA_UID_RANGE:
		return !inverted
	}
	return false
}

// sourcePriority is the priority of source rules, just before the main table's. The kernel puts rules that are added without a priority
// before them.
const sourcePriority = 32765

// AddSourceRule has packets from an address routed by a table. It succeeds if the rule is there.
func (h *Handle) AddSourceRule(source netip.Addr, table int) error {
	err := again(func() error { return h.nl.RuleAdd(sourceRule(source, table)) })
	if err != nil && !isErrno(err, unix.EEXIST) {
		return fmt.Errorf("add routing rule for packets from %s: %w", source, err)
	}
	return nil
}

// DeleteSourceRule deletes the rule that AddSourceRule has added. It succeeds if the rule is gone.
func (h *Handle) DeleteSourceRule(source netip.Addr, table int) error {
	err := again(func() error { return h.nl.RuleDel(sourceRule(source, table)) })
	if err != nil && !isErrno(err, unix.ENOENT, unix.EAFNOSUPPORT) {
		return fmt.Errorf("delete routing rule for packets from %s: %w", source, err)
	}
	return nil
}

// HasSourceRule reports whether the rule that AddSourceRule adds is there.
func (h *Handle) HasSourceRule(source netip.Addr, table int) (bool, error) {
	want := sourceRule(source, table)
	all, err := dump(func() ([]netlink.Rule, error) { return h.nl.RuleList(want.Family) })
	if err != nil {
		return false, fmt.Errorf("list routing rules: %w", err)
	}
	return slices.ContainsFunc(all, func(r netlink.Rule) bool {
		return r.Src != nil && r.Src.String() == want.Src.String() && r.Table == table && r.Priority == sourcePriority
	}), nil
}

func sourceRule(source netip.Addr, table int) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Src, r.Table, r.Priority = family(source), ipNet(netip.PrefixFrom(source, source.BitLen())), table, sourcePriority
	return r
}
