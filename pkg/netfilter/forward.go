package netfilter

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ForwardComment stands beside the rules that Forward puts into chains of other programs.
const ForwardComment = "ebpf-cni pods"

// Forwarding is what Forward goes by: which packets this node forwards for its pods.
type Forwarding struct {
	Pods []netip.Prefix // this node's podCIDRs
	// Inner are the links of pods, Outer those that lead out of the node: names, or with an asterisk at the end what names begin with.
	Inner, Outer []string
	// Accept says that accepts are put into chains whose policy drops; else those of before are taken out.
	Accept bool
}

func (f Forwarding) equal(o Forwarding) bool {
	return slices.Equal(f.Pods, o.Pods) && slices.Equal(f.Inner, o.Inner) && slices.Equal(f.Outer, o.Outer) && f.Accept == o.Accept
}

// ForwardDrop is a chain by which the host's stack drops packets of pods that it would forward.
type ForwardDrop struct {
	Chain  string // with its table
	Rule   string // the rule, or the policy
	Policy bool   // it is the policy
	Remedy string // what an administrator can do
}

// Forward looks for chains of the hook forward that drop packets of pods, and keeps accepts at the head of those that do by their policy.
// It works in the network namespace of the thread that looks first, and is for one goroutine at a time. The zero value is ready for use.
type Forward struct {
	// Lock is the file by which iptables is kept away from tables of the older form; empty: where iptables has it.
	Lock string

	newer nftables
	older [2]olderForward
	want  Forwarding
	at    time.Time     // of the newest look; zero: after an error, or before the first
	took  time.Duration // that look
	found []ForwardDrop
}

// olderForward has the tables of a family's older iptables that have the hook forward.
type olderForward struct {
	iptables
	infos []tableInfo
}

// Look says what drops packets of pods, and which chains have got accepts by this look. A change of rules is noticed by the next look; in a
// large table of the older iptables that leaves the size as it is, within half a minute. After an error it says what was found before.
func (f *Forward) Look(now time.Time, want Forwarding) (found []ForwardDrop, accepted []string, err error) {
	changed, err := f.changed(now)
	if err != nil {
		return f.found, nil, err
	}
	if !f.at.IsZero() && f.want.equal(want) && (!changed || now.Sub(f.at) < lookShare*f.took) {
		return f.found, nil, nil
	}
	began := time.Now()
	f.want, f.at = want, time.Time{}
	l, err := f.look()
	f.newer.begin(now)
	for i := range f.older {
		f.older[i].read = now
	}
	if f.found = l.found; err == nil && !l.edited { // else the next look shows what has come of it
		f.at, f.took = now, time.Since(began)
	}
	return l.found, l.accepted, err
}

// Close closes what is kept open; the accepts stay.
func (f *Forward) Close() {
	f.newer.close()
	for i := range f.older {
		f.older[i].close()
	}
}

// RemoveForward takes all accepts out. It succeeds if there are none.
func RemoveForward() error {
	var f Forward
	defer f.Close()
	_, _, err := f.Look(time.Now(), Forwarding{})
	return err
}

// changed says whether rules may have changed since the newest look.
func (f *Forward) changed(now time.Time) (bool, error) {
	changed, err := f.newer.changed(now)
	for i := range f.older {
		o := &f.older[i]
		o.family = families[i]
		infos, infosErr := o.forwarding()
		err = errors.Join(err, infosErr)
		small := !slices.ContainsFunc(infos, func(info tableInfo) bool { return !info.isSmall() })
		changed = changed || !slices.Equal(infos, o.infos) || len(infos) > 0 && (small || now.Sub(o.read) >= readLarge)
		o.infos = infos
	}
	return changed, err
}

// forwarding are the tables that have the hook forward.
func (o *olderForward) forwarding() (infos []tableInfo, err error) {
	for _, table := range o.has() {
		var info tableInfo
		if err := o.withSocket(func(fd, level int) error { return getTableInfo(fd, level, table, &info) }); err != nil {
			return nil, fmt.Errorf("read %s: %w", o.name(), err)
		}
		if info.ValidHooks&(1<<hookForward) != 0 {
			infos = append(infos, info)
		}
	}
	return infos, nil
}

// bases implements ruleset. They are the chains of the hook.
func (o *olderForward) bases([]int, bool) (found []base, err error) {
	for _, info := range o.infos {
		b, err := o.table(text(info.Name[:]))
		if err != nil {
			return nil, err
		}
		at := chainID{o.name(), o.family, text(info.Name[:]), hookNames[hookForward]}
		found = append(found, base{chainID: at, hook: hookForward, drop: b.policyDrops(at.name)})
	}
	return found, nil
}

// forwardLook is what a look has found and done.
type forwardLook struct {
	found    []ForwardDrop
	accepted []string // chains that have got accepts
	edited   bool
}

// look goes through all chains of the hook.
func (f *Forward) look() (l forwardLook, err error) {
	through := func(set ruleset, table func(base) editable) {
		bases, basesErr := set.bases([]int{unix.AF_INET, unix.AF_INET6}, true)
		err = errors.Join(err, basesErr)
		for _, b := range bases {
			if b.hook == hookForward && !b.nat {
				err = errors.Join(err, l.at(&f.want, set, b, table(b)))
			}
		}
		set.end()
	}
	through(&f.newer, func(b base) editable {
		return &nftTable{questions: &f.newer.questions, family: b.family, name: b.table, only: []string{b.name}}
	})
	for i := range f.older {
		through(&f.older[i], func(b base) editable {
			return &legacyTable{iptables: iptables{family: b.family}, table: b.table, only: []string{b.name}, lock: cmp.Or(f.Lock, xtablesLock)}
		})
	}
	return l, err
}

// accept is a rule of ours, about the packets that pods send, or that are sent to them.
type accept struct {
	of   subject // source or destination
	pods netip.Prefix
}

// at looks at a chain, and has it contain the accepts that it needs, and no others.
func (l *forwardLook) at(want *Forwarding, set ruleset, b base, t editable) error {
	rules, err := set.rules(b.chainID)
	if errors.Is(err, unix.ENOENT) { // gone since it was listed
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", b, err)
	}
	needs, err := l.judge(want, set, b)
	if err != nil {
		return err
	}
	puts := needs
	if !want.Accept {
		puts = nil
	}
	if !hasAccepts(rules, puts) {
		err, l.edited = put(t, b.name, puts), true
		if err == nil && len(puts) > 0 {
			l.accepted = append(l.accepted, b.String())
		}
	}
	if len(needs) > 0 && (err != nil || !want.Accept) {
		l.drops(ForwardDrop{b.String(), "policy drop", true, remedy(b.chainID, rules, want.Pods)})
	}
	return err
}

// judge finds the rules of a chain that drop packets of pods, and the accepts that its policy calls for.
func (l *forwardLook) judge(want *Forwarding, set ruleset, b base) (needs []accept, err error) {
	for _, pods := range want.Pods {
		if b.family != unix.NFPROTO_INET && pods.Addr().Is4() != (b.family == unix.NFPROTO_IPV4) {
			continue
		}
		for _, of := range []subject{source, destination} {
			p := probe{Forwarding: want, set: set, accept: accept{of, pods.Masked()}}
			end, err := p.through(b.chainID, 0)
			switch {
			case err != nil:
				return nil, err
			case end == drops:
				l.drops(ForwardDrop{p.at.String(), p.rule, false, remedy(p.at, nil, want.Pods)})
			case end == passes && b.drop:
				needs = append(needs, p.accept)
			}
		}
	}
	return needs, nil
}

// drops notes a rule, or a policy, once.
func (l *forwardLook) drops(d ForwardDrop) {
	if !slices.Contains(l.found, d) {
		l.found = append(l.found, d)
	}
}

// put has a chain contain accepts, and none of before.
func put(t editable, chain string, accepts []accept) error {
	_, err := edit(t, func(l listing) (change, error) {
		c := change{into: chain}
		var rules []rule
		for _, p := range l.rules {
			if rules = append(rules, p.rule); p.comment == ForwardComment {
				c.rules = append(c.rules, p)
			}
		}
		if hasAccepts(rules, accepts) {
			return change{}, nil
		}
		c.accepts = accepts
		return c, nil
	})
	return err
}

// hasAccepts says that of ours the rules of a chain have these, and no others.
func hasAccepts(rules []rule, want []accept) bool {
	left := slices.Clone(want)
	for _, r := range rules {
		if r.comment != ForwardComment {
			continue
		}
		i := slices.IndexFunc(left, func(a accept) bool { return a.isIn(r) })
		if i < 0 {
			return false
		}
		left = slices.Delete(left, i, i+1)
	}
	return len(left) == 0
}

// isIn says that a rule is what the accept was written as.
func (a accept) isIn(r rule) bool {
	asks := slices.ContainsFunc(r.steps, func(s step) bool { return s.match == match{of: a.of, prefix: a.pods} })
	does := slices.ContainsFunc(r.steps, func(s step) bool { return s.act.does == accepts })
	return asks && does
}

// expressions are the accept as a rule of a table of nftables.
func (a accept) expressions(family uint8) (all []*nl.RtAttr) {
	offset, address := map[subject]uint32{source: 12, destination: 16}[a.of], a.pods.Addr().AsSlice() // in struct iphdr
	number := byte(unix.NFPROTO_IPV4)
	if len(address) == 16 {
		offset, number = map[subject]uint32{source: 8, destination: 24}[a.of], unix.NFPROTO_IPV6 // in struct ipv6hdr
	}
	if family == unix.NFPROTO_INET {
		all = append(all, meta(unix.NFT_META_NFPROTO), compare(unix.NFT_CMP_EQ, []byte{number}))
	}
	all = append(all, payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(len(address))))
	if !a.pods.IsSingleIP() {
		all = append(all, masked(net.CIDRMask(a.pods.Bits(), 8*len(address))))
	}
	return append(all, compare(unix.NFT_CMP_EQ, address), expression("counter"), verdict(accepted))
}
