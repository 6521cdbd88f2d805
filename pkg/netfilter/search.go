package netfilter

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// The hooks that packets come to chains by, as all families number them.
const (
	hookPrerouting  = 0
	hookInput       = 1
	hookForward     = 2
	hookOutput      = 3
	hookPostrouting = 4
)

// chainID names a chain of a table, which a program keeps.
type chainID struct {
	program     string // "nftables", "iptables" or "ip6tables"
	family      uint8
	table, name string
}

func (c chainID) String() string {
	if c.program != nftablesName {
		return fmt.Sprintf("%s table %s, chain %s", c.program, c.table, c.name)
	}
	return fmt.Sprintf("%s table %s %s, chain %s", c.program, familyNames[c.family], c.table, c.name)
}

// base is a chain that packets come to from a hook.
type base struct {
	chainID
	hook uint32
	nat  bool
	drop bool // its policy
}

// ruleset is what one program keeps.
type ruleset interface {
	// changed says whether the rules may have changed since begin was called.
	changed(now time.Time) (bool, error)
	// pause is for how long a rule that translates is taken to be there whatever is around it.
	pause() time.Duration
	// begin and end are around a look at it, end also after one that only asked who sets marks.
	begin(now time.Time)
	end()
	close()
	// bases are the chains that packets of some families come to: those that translate, or all.
	bases(families []int, all bool) ([]base, error)
	// rules are those of a chain.
	rules(chainID) ([]rule, error)
	// siblings are the chains of a chain's table that rules jump to.
	siblings(chainID) ([]chainID, error)
}

// Found is what netfilter may translate, and the rule that says so.
type Found struct {
	Level Level
	Where string
}

// search looks through rules for those that translate.
type search struct {
	*Surroundings
	sets  []ruleset
	found Found
	marks map[uint32]bool // by bits of marks, what marksOthers has found
}

// in looks through a ruleset until it finds a rule that translates pods' packets. What has been found in others stays.
func (s *search) in(set ruleset) error {
	bases, err := set.bases(s.Families, false)
	if err != nil {
		return err
	}
	// What masquerades is mostly found first, and in few steps.
	slices.SortStableFunc(bases, func(a, b base) int { return int(b.hook) - int(a.hook) })
	for _, b := range bases {
		w := walk{search: s, set: set, hook: b.hook, done: map[visit]bool{}, each: s.weigh}
		if err := w.through(b.chainID, condition{notPods: b.hook == hookOutput}); err != nil || s.found.Level == Translates {
			return err
		}
	}
	return nil
}

// weigh keeps an act that translates more than what has been found; it says that there can be no worse one.
func (s *search) weigh(w *walk, at chainID, r rule, a act, c condition) bool {
	if !a.does.translates() {
		return false
	}
	level := s.judge(a, c, w.hook)
	if level == Translates && a.does == masquerade && c.marks&^s.Mark != 0 && s.marksOthers(c.marks&^s.Mark) {
		level = Masquerades
	}
	if level > s.found.Level {
		s.found = Found{level, at.String() + ": " + r.text}
	}
	return s.found.Level == Translates
}

// marksOthers says that these bits of marks are set in no pod's packet but those for the node's own addresses, as far as rules do.
func (s *search) marksOthers(bits uint32) bool {
	if harmless, known := s.marks[bits]; known {
		return harmless
	}
	harmless := true
	look := func(_ *walk, _ chainID, _ rule, a act, c condition) bool {
		if (a.does == setsMark || a.does == restoresMark) && a.bits&bits != 0 && !c.notPods && !c.toNode {
			harmless = false
		}
		return !harmless
	}
	for _, set := range s.sets {
		bases, err := set.bases(s.Families, true)
		for _, b := range bases {
			w := walk{search: s, set: set, hook: b.hook, done: map[visit]bool{}, each: look}
			err = errors.Join(err, w.through(b.chainID, condition{notPods: b.hook == hookOutput}))
		}
		harmless = harmless && err == nil
	}
	s.marks[bits] = harmless
	return harmless
}

// walk goes through the chains that packets of one hook come to.
type walk struct {
	*search
	set   ruleset
	hook  uint32
	done  map[visit]bool
	each  func(w *walk, at chainID, r rule, a act, c condition) (enough bool)
	ended bool
}

// visit is a chain, and what is known of packets that come to it.
type visit struct {
	chainID
	condition
}

// through goes through a chain and those that it leads to. That rules before it took some of the packets is not looked at.
func (w *walk) through(at chainID, known condition) error {
	if w.ended || w.done[visit{at, known}] {
		return nil
	}
	w.done[visit{at, known}] = true
	rules, err := w.set.rules(at)
	if err != nil {
		return fmt.Errorf("read %s: %w", at, err)
	}
	for _, r := range rules {
		c := known
		for _, s := range r.steps {
			if s.match.of != nothing {
				c = c.and(s.match, w.Surroundings)
				continue
			}
			if w.each(w, at, r, s.act, c) {
				w.ended = true
				return nil
			}
			if err := w.follow(at, s.act, c); err != nil || w.ended {
				return err
			}
		}
	}
	return nil
}

// follow goes where an act leads.
func (w *walk) follow(from chainID, a act, c condition) error {
	switch a.does {
	case jumps:
		to := from
		to.name = a.chain
		return w.through(to, c)
	case jumpsToAny: // what the map has is not read
		all, err := w.set.siblings(from)
		for _, to := range all {
			err = errors.Join(err, w.through(to, c))
		}
		return err
	}
	return nil
}
