package netfilter

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// rule is one of a chain: what it asks of packets, and what it does, in that order. What is not understood of the first is
// left out, since it can only make the packets fewer.
type rule struct {
	steps   []step
	text    string // for people
	comment string // the comment that its author gave it
}

// leadsTo says that a rule jumps to one of these chains.
func (r rule) leadsTo(chains map[string]bool) bool {
	return slices.ContainsFunc(r.steps, func(s step) bool { return s.act.does == jumps && chains[s.act.chain] })
}

// step is a match or, if that is nothing, an act.
type step struct {
	match match
	act   act
}

// subject is what a match is about.
type subject int

const (
	nothing  subject = iota
	anything         // something that is not understood
	familyIs
	source
	destination
	sourceLocal
	destinationLocal
	comesBy
	leavesBy
	markBits
)

// match holds packets of which the subject is, or is not, something.
type match struct {
	of     subject
	not    bool
	prefix netip.Prefix
	name   string // of a link
	begins bool   // links' names begin with it
	bits   uint32 // of the mark, or the family
}

// deed is what a rule does.
type deed int

const (
	passes     deed = iota
	jumps           // to a chain
	jumpsToAny      // to a chain of its table
	accepts
	drops
	rejects
	returns
	queues // has a program decide
	setsMark
	keepsMark    // in the connection
	restoresMark // from it
	masquerade
	translateSource
	translateDestination
	redirect
	translateUnknown
)

// act is one thing that a rule does.
type act struct {
	does  deed
	chain string
	goes  bool   // to the chain, without coming back
	bits  uint32 // of the mark, that it may set
	to    addresses
}

func (d deed) translates() bool { return d >= masquerade }

// dialect is how a program writes rules.
type dialect int

const (
	ofIptables dialect = iota
	ofNft
)

// words are what each dialect calls something.
var words = map[any][2]string{
	source: {"-s", "saddr"}, destination: {"-d", "daddr"}, comesBy: {"-i", "iifname"}, leavesBy: {"-o", "oifname"},
	sourceLocal: {"-m addrtype --src-type", "fib saddr type"}, destinationLocal: {"-m addrtype --dst-type", "fib daddr type"},
	markBits: {"-m mark --mark", "meta mark"}, jumps: {"-j", "jump"}, jumpsToAny: {"-j", "vmap"}, setsMark: {"-j MARK --set-xmark", "meta mark set"},
	keepsMark: {"-j CONNMARK --set-xmark", "ct mark set"}, restoresMark: {"-j CONNMARK --restore-mark", "meta mark set ct mark"},
	accepts: {"-j ACCEPT", "accept"}, drops: {"-j DROP", "drop"}, rejects: {"-j REJECT", "reject"}, returns: {"-j RETURN", "return"}, queues: {"-j NFQUEUE", "queue"},
	masquerade: {"-j MASQUERADE", "masquerade"}, translateSource: {"-j SNAT --to-source", "snat to"},
	translateDestination: {"-j DNAT --to-destination", "dnat to"}, redirect: {"-j REDIRECT", "redirect"}, translateUnknown: {"-j", ""},
}

// say is a match in words.
func (m match) say(in dialect) string {
	var is string
	switch {
	case m.prefix.IsValid() && m.prefix.IsSingleIP() && in == ofNft:
		is = m.prefix.Addr().String()
	case m.prefix.IsValid():
		is = m.prefix.String()
	case m.of == markBits:
		is = fmt.Sprintf("%#x", m.bits)
	case m.name != "" && in == ofNft:
		is = fmt.Sprintf("%q", m.name+map[bool]string{true: "*"}[m.begins])
	case m.name != "":
		is = m.name + map[bool]string{true: "+"}[m.begins]
	default:
		is = map[dialect]string{ofIptables: "LOCAL", ofNft: "local"}[in]
	}
	word := words[m.of][in]
	switch {
	case m.not && in == ofNft:
		return word + " != " + is
	case m.not:
		return "! " + word + " " + is
	}
	return word + " " + is
}

// say is an act in words; more is what belongs to it, such as a port.
func (a act) say(in dialect, more string) string {
	said := words[a.does][in]
	switch {
	case a.chain != "":
		said += " " + a.chain
	case a.does == setsMark || a.does == keepsMark || a.does == restoresMark && in == ofIptables:
		said += fmt.Sprintf(" %#x", a.bits)
	case (a.does == translateSource || a.does == translateDestination) && a.to.known():
		to := a.to.first.String()
		if a.to.first != a.to.last {
			to += "-" + a.to.last.String()
		}
		said += " " + to
	}
	return strings.TrimSpace(said + more)
}

// written collects a rule.
type written struct {
	in   dialect
	goes bool // where it leads it does not come back from
	rule
}

func (w *written) asks(m match) {
	w.steps = append(w.steps, step{match: m})
	w.also(m.say(w.in))
}

func (w *written) does(a act, more string) {
	a.goes = a.goes || w.goes && a.does == jumps
	w.steps = append(w.steps, step{act: a})
	w.also(a.say(w.in, more))
}

// some notes that the rule asks for something that nothing is decided by.
func (w *written) some(text string) {
	w.steps = append(w.steps, step{match: match{of: anything}})
	w.also(text)
}

// also adds words that nothing is decided by.
func (w *written) also(text string) {
	if text != "" {
		w.text = strings.TrimSpace(w.text + " " + text)
	}
}
