package netfilter

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// depth is how many chains may lead to each other, as in the kernel; more are read while rules change.
const depth = 16

// probe is any packet that opens a connection of pods: one that they send, or one that is sent to them.
type probe struct {
	*Forwarding
	set ruleset
	accept
	at   chainID // the chain that drops it
	rule string  // and the rule there
}

// through says what becomes of the packet in a chain: drops, accepts, or passes. Rules that may not match all such packets count for nothing.
func (p *probe) through(at chainID, deep int) (deed, error) {
	rules, err := p.set.rules(at)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return passes, fmt.Errorf("read %s: %w", at, err)
	}
	if deep == 0 && at.program != nftablesName && len(rules) > 0 {
		rules = rules[:len(rules)-1] // the policy
	}
	for _, r := range rules {
		a := p.meets(r)
		switch a.does {
		case drops, rejects:
			p.at, p.rule = at, r.text
			return drops, nil
		case accepts, queues:
			return accepts, nil
		case returns:
			return passes, nil
		case jumps:
			to := at
			to.name = a.chain
			if deep < depth {
				end, err := p.through(to, deep+1)
				if err != nil || end != passes || a.goes {
					return end, err
				}
			}
		}
	}
	return passes, nil
}

// meets is the verdict of a rule for all such packets; passes: it has none.
func (p *probe) meets(r rule) act {
	if r.comment == ForwardComment {
		return act{}
	}
	for _, s := range r.steps {
		if s.match.of != nothing && !p.matches(s.match) {
			return act{}
		}
		switch s.act.does {
		case drops, rejects, accepts, queues, returns, jumps:
			return s.act
		}
	}
	return act{}
}

// matches says that all such packets have what is asked for. Of most it is not known.
func (p *probe) matches(m match) bool {
	inner := p.of == source // it comes by a pod's link
	switch m.of {
	case familyIs:
		return (m.bits == unix.NFPROTO_IPV4) == p.pods.Addr().Is4() != m.not
	case source, destination:
		if m.of != p.of {
			return m.prefix.IsValid() && m.prefix.Bits() == 0 && !m.not
		}
		if m.not {
			return !m.prefix.Overlaps(p.pods)
		}
		return m.prefix.Bits() <= p.pods.Bits() && m.prefix.Contains(p.pods.Addr())
	case sourceLocal, destinationLocal:
		return m.not
	case comesBy:
		return p.by(inner, m)
	case leavesBy:
		return p.by(!inner, m)
	}
	return false
}

// by says that all links have such a name, or that none has.
func (p *probe) by(inner bool, m match) bool {
	links := p.Outer
	if inner {
		links = p.Inner
	}
	if m.not {
		return len(links) > 0 && (&Surroundings{Links: links}).carriesNoPods(m.name, m.begins)
	}
	return len(links) > 0 && !slices.ContainsFunc(links, func(link string) bool {
		start, more := strings.CutSuffix(link, "*")
		return (!m.begins || !strings.HasPrefix(start, m.name)) && (more || link != m.name)
	})
}

// remedy is what lets packets of pods pass a chain with such rules. A firewall that writes its rules anew has a program of its own for that.
func remedy(at chainID, rules []rule, pods []netip.Prefix) string {
	tools := map[bool]string{true: "iptables", false: "ip6tables"}
	isUFWs := func(chain string) bool { return strings.HasPrefix(chain, "ufw") }
	leadsToUFW := func(r rule) bool {
		return slices.ContainsFunc(r.steps, func(s step) bool { return isUFWs(s.act.chain) })
	}
	var commands []string
	each := func(format string) {
		for _, p := range pods {
			if v4 := p.Addr().Is4(); at.family == unix.NFPROTO_INET || v4 == (at.family == unix.NFPROTO_IPV4) {
				tool := tools[v4]
				if at.program != nftablesName {
					tool += "-legacy"
				}
				family := map[bool]string{true: "ip", false: "ip6"}[v4]
				commands = append(commands, strings.NewReplacer("TOOL", tool, "FAMILY", family, "PODS", p.Masked().String()).Replace(format))
			}
		}
	}
	switch {
	case isUFWs(at.name) || slices.ContainsFunc(rules, leadsToUFW):
		each("ufw route allow from PODS && ufw route allow to PODS")
	case at.program == nftablesName && at.table == "firewalld":
		each("firewall-cmd --permanent --zone=trusted --add-source=PODS")
		const policy = "firewall-cmd --permanent --policy=ebpf-cni --" // what is sent to pods; their zone is about what they send
		return strings.Join(append(commands, "firewall-cmd --permanent --new-policy=ebpf-cni", policy+"add-ingress-zone=ANY", policy+"add-egress-zone=trusted",
			policy+"set-target=ACCEPT", "firewall-cmd --reload"), "; ")
	case at.program != nftablesName || at.table == "filter" && at.name == hookNames[hookForward] && at.family != unix.NFPROTO_INET:
		each("TOOL -t " + at.table + " -I " + at.name + " -s PODS -j ACCEPT && TOOL -t " + at.table + " -I " + at.name + " -d PODS -j ACCEPT")
	default:
		table := familyNames[at.family] + " " + at.table + " " + at.name
		each("nft insert rule " + table + " FAMILY saddr PODS accept && nft insert rule " + table + " FAMILY daddr PODS accept")
	}
	return strings.Join(commands, " && ")
}
