package netfilter

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Marks looks, again and again, for rules that mark pods' packets before the kernel routes them. Only the chains of connections' first
// packets, those of type nat, are not looked at. It looks into the network namespace of the thread that looks first, and is for one goroutine
// at a time. The zero value is ready for use.
type Marks struct {
	sets  []ruleset
	bits  uint32
	among Surroundings
	at    time.Time     // of the newest look; zero: after an error, or before the first
	took  time.Duration // that look
	found string
}

// lookShare is which part of the time looks may take, while rules change all the time.
const lookShare = 50

// Look says which rule may set one of these bits in the mark of a pod's packet, for people; empty: none. A change of the older iptables is
// noticed within half a minute. After an error it says what was found before.
func (m *Marks) Look(now time.Time, bits uint32, among Surroundings) (string, error) {
	if m.sets == nil {
		m.sets = rulesets()
	}
	due := m.at.IsZero() || m.bits != bits || !m.among.equal(&among) || now.Sub(m.at) >= readLarge
	for _, set := range m.sets {
		changed, err := set.changed(now)
		if err != nil {
			return m.found, err
		}
		due = due || changed && now.Sub(m.at) >= lookShare*m.took
	}
	if !due {
		return m.found, nil
	}
	began := time.Now()
	m.bits, m.among, m.at = bits, among.clone(), time.Time{}
	found, err := m.find()
	for _, set := range m.sets {
		set.begin(now)
		set.end()
	}
	if err == nil {
		m.found, m.at, m.took = found, now, time.Since(began)
	}
	return m.found, err
}

// find goes through the chains. A mark that a rule restores from a connection was set in a packet or in the connection
// before; a mark of one of the host's sockets is only in the host's own packets.
func (m *Marks) find() (string, error) {
	var sets, restores, origin string
	look := func(w *walk, at chainID, r rule, a act, c condition) bool {
		if a.bits&m.bits == 0 || a.does != setsMark && a.does != keepsMark && a.does != restoresMark {
			return false
		}
		where := at.String() + ": " + r.text
		ofPods := w.hook == hookPrerouting && !c.notPods && !c.toNode
		switch {
		case a.does == restoresMark && ofPods:
			restores = where
		case a.does == setsMark && ofPods:
			sets = where
		case a.does != restoresMark:
			origin = where
		}
		return sets != ""
	}
	s := search{Surroundings: &m.among}
	for _, set := range m.sets {
		bases, err := set.bases(m.among.Families, true)
		for _, b := range bases {
			if !b.nat && sets == "" {
				w := walk{search: &s, set: set, hook: b.hook, done: map[visit]bool{}, each: look}
				err = errors.Join(err, w.through(b.chainID, condition{notPods: b.hook == hookOutput}))
			}
		}
		if err != nil {
			return "", fmt.Errorf("look for rules that mark packets: %w", err)
		}
	}
	if origin == "" {
		restores = ""
	}
	return cmp.Or(sets, restores), nil
}

// Close closes what is kept open.
func (m *Marks) Close() {
	for _, set := range m.sets {
		set.close()
	}
}
