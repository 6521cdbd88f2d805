package netfilter

import (
	"net/netip"
	"slices"
	"strings"
)

// Level says whose packets netfilter may translate.
type Level int

// The levels: nobody's; those of others than pods, which take ports of the node's addresses; pods' as well.
const (
	Nothing Level = iota
	Masquerades
	Translates
)

// Surroundings are what tells pods' packets from others'. The zero value knows of no pods, and so takes every packet for one
// of theirs.
type Surroundings struct {
	Families []int          // that are looked at, as the kernel numbers them
	Pods     []netip.Prefix // the addresses of all nodes' pods
	Own      []netip.Addr   // this node's addresses
	// Unmasqueraded are destinations that see pods' own addresses: beside pods and nodes, what is configured.
	Unmasqueraded []netip.Prefix
	// Links are those by which pods' packets come and go: names, or with an asterisk at the end what names begin with.
	Links []string
	// Mark is the bit of marks that is ours.
	Mark uint32
}

func (s *Surroundings) equal(o *Surroundings) bool {
	return slices.Equal(s.Families, o.Families) && slices.Equal(s.Pods, o.Pods) && slices.Equal(s.Own, o.Own) &&
		slices.Equal(s.Unmasqueraded, o.Unmasqueraded) && slices.Equal(s.Links, o.Links) && s.Mark == o.Mark
}

func (s *Surroundings) clone() Surroundings {
	return Surroundings{slices.Clone(s.Families), slices.Clone(s.Pods), slices.Clone(s.Own), slices.Clone(s.Unmasqueraded), slices.Clone(s.Links), s.Mark}
}

// knowsPods says that it is known where the pods of a family are.
func (s *Surroundings) knowsPods(of netip.Addr) bool {
	return slices.ContainsFunc(s.Pods, func(p netip.Prefix) bool { return p.Addr().Is4() == of.Is4() })
}

// noPods says that no pod has an address there.
func (s *Surroundings) noPods(in netip.Prefix) bool {
	return s.knowsPods(in.Addr()) && !slices.ContainsFunc(s.Pods, in.Overlaps)
}

// allPods says that every pod of the family has its address there.
func (s *Surroundings) allPods(in netip.Prefix) bool {
	return s.knowsPods(in.Addr()) && !slices.ContainsFunc(s.Pods, func(p netip.Prefix) bool {
		return p.Addr().Is4() == in.Addr().Is4() && (p.Bits() < in.Bits() || !in.Contains(p.Addr()))
	})
}

// isOwn says that the node has all addresses of a prefix.
func (s *Surroundings) isOwn(p netip.Prefix) bool {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	return p.IsSingleIP() && slices.Contains(s.Own, p.Addr()) || p.Bits() >= loopback.Bits() && loopback.Contains(p.Addr())
}

// carriesNoPods says that no packet of a pod's comes or goes by a link of that name.
func (s *Surroundings) carriesNoPods(name string, begins bool) bool {
	return len(s.Links) > 0 && !slices.ContainsFunc(s.Links, func(link string) bool {
		start, more := strings.CutSuffix(link, "*")
		switch {
		case begins && more:
			return strings.HasPrefix(start, name) || strings.HasPrefix(name, start)
		case begins:
			return strings.HasPrefix(link, name)
		case more:
			return strings.HasPrefix(name, start)
		}
		return name == link
	})
}

// condition is what is known of the packets that come to a rule. What is not known may be anything.
type condition struct {
	notPods bool   // their source is no pod's
	toNode  bool   // they are for the node's own addresses
	aside   bool   // they leave by a link that pods' packets between nodes and to the world do not take
	marks   uint32 // bits of the mark that somebody has set
}

// and is the condition of what matches as well.
func (c condition) and(m match, s *Surroundings) condition {
	switch {
	case m.of == source && m.not:
		c.notPods = c.notPods || s.allPods(m.prefix)
	case m.of == markBits && m.not:
	case m.of == source:
		c.notPods = c.notPods || s.noPods(m.prefix)
	case m.of == markBits:
		c.marks |= m.bits
	case m.not:
	case m.of == sourceLocal:
		c.notPods = true
	case m.of == destinationLocal:
		c.toNode = true
	case m.of == destination:
		c.toNode = c.toNode || s.isOwn(m.prefix)
	case m.of == comesBy:
		c.notPods = c.notPods || s.carriesNoPods(m.name, m.begins)
	case m.of == leavesBy:
		c.aside = c.aside || s.carriesNoPods(m.name, m.begins)
	}
	return c
}

// addresses are those from the first to the last; invalid: any.
type addresses struct{ first, last netip.Addr }

func (a addresses) known() bool {
	return a.first.IsValid() && a.last.IsValid() && a.first.Compare(a.last) <= 0
}

func (a addresses) meets(prefixes []netip.Prefix) bool {
	return !a.known() || slices.ContainsFunc(prefixes, func(p netip.Prefix) bool {
		return p.Contains(a.first) || p.Contains(a.last) || a.first.Compare(p.Addr()) <= 0 && p.Addr().Compare(a.last) <= 0
	})
}

// isOwn says that it is one address, of the node's.
func (a addresses) isOwn(s *Surroundings) bool {
	return a.known() && a.first == a.last && s.isOwn(netip.PrefixFrom(a.first, a.first.BitLen()))
}

// judge says whose packets an act may translate. What pods send to the node's own addresses walks its stack anyway, and so do
// the answers: from the node's addresses, or from whom it is masqueraded to on its way out of the stack.
func (s *Surroundings) judge(a act, c condition, hook uint32) Level {
	harmless := false
	switch a.does {
	case masquerade:
		harmless = c.notPods || c.aside
	case translateSource:
		harmless = (c.notPods || c.aside) && a.to.isOwn(s)
	case redirect:
		harmless = c.toNode || hook == hookOutput
	case translateDestination:
		harmless = c.toNode && (a.to.isOwn(s) || a.to.known() && s.knowsPods(a.to.first) && !a.to.meets(s.Unmasqueraded)) ||
			hook == hookOutput && a.to.known() && s.knowsPods(a.to.first) && !a.to.meets(s.Pods)
	}
	if harmless {
		return Masquerades
	}
	return Translates
}
