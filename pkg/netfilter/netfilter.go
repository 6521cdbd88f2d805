// Package netfilter finds out whose packets netfilter translates on this node: by rules of iptables and nftables, or,
// when those are gone, by flows that they have translated. It only looks at those. And it keeps a table of ours in
// nftables for each family, ebpf-cni: the rules by which netfilter does not track a tunnel's outer packets, and drops what
// it has translated to their port.
//
//	w := netfilter.New()
//	w.Among(surroundings)
//	level, err := w.Begin(time.Now())
//	level, err = w.Look(time.Now(), level) // now and then
//	w.Close()
package netfilter

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// Linger is how long translation is taken to go on after the last rule is gone:
// kube-proxy and others delete theirs for a moment to write them anew.
const Linger = time.Minute

// olderFlows stands for rules that are gone, or can't be read, while flows may be left that they have translated.
const olderFlows = "flows that earlier rules translated"

// Watch is a look that remembers the ones before it. It looks into the network
// namespace of the thread that looks first, and is for one goroutine at a time.
type Watch struct {
	around  Surroundings
	rules   func(now time.Time) (Found, error)
	flows   func() (Level, error)
	tracked func() bool // whether the kernel keeps flows at all
	close   func()

	where [Translates + 1]string    // of each level, the newest rule that was seen
	seen  [Translates + 1]time.Time // when a rule, or a flow without one, was last seen that makes it that level at least
}

// New returns a Watch that has seen nothing yet, and knows of no pods.
func New() *Watch {
	w := &Watch{tracked: tracksConnections, around: Surroundings{Families: []int{unix.AF_INET}}}
	r := newRules(&w.around)
	w.flows = func() (Level, error) { return translatedFlows(&w.around) }
	w.rules, w.close = r.find, r.close
	return w
}

// Among says what is around the rules from now on. What was in doubt as long as pods were unknown does not linger.
func (w *Watch) Among(s Surroundings) {
	if len(w.around.Pods) == 0 && len(s.Pods) > 0 {
		w.seen[Translates] = time.Time{}
	}
	w.around = s
}

// Look reports what netfilter translates; before is what is known so far. A level
// begins with the first rule. It ends when there has been no rule for Linger and
// no translated flow is left; to ask for those costs a look at every flow. After
// an error, what was known before stays.
func (w *Watch) Look(now time.Time, before Level) (Level, error) {
	found, err := w.rules(now)
	if found.Level > Nothing {
		w.note(now, found)
	}
	switch {
	case found.Level >= before:
		return found.Level, err
	case err != nil:
		return before, err
	case now.Sub(w.seen[before]) < Linger:
		return before, nil
	}
	older, err := w.outlived(now, before)
	return max(found.Level, min(older, before)), err
}

// note keeps when rules of a level were seen.
func (w *Watch) note(now time.Time, found Found) {
	w.where[found.Level] = found.Where
	for level := range found.Level + 1 {
		w.seen[level] = now
	}
}

// Begin is Look for a process that has seen nothing yet. The rules may be away for a moment, as when kube-proxy changes
// its mode, and what they have translated must go on meeting netfilter. So when in doubt, and after an error, the answer is the highest level.
func (w *Watch) Begin(now time.Time) (Level, error) {
	level, err := w.Look(now, Nothing)
	if level == Translates || !w.tracked() {
		return level, err
	}
	older, flowsErr := w.outlived(now, Translates)
	if err != nil {
		older = Translates
		w.note(now, Found{older, olderFlows})
	}
	return max(level, older), errors.Join(err, flowsErr)
}

// outlived says what flows that go on were translated by rules that are gone. When they can't be listed, it may be all that is known.
func (w *Watch) outlived(now time.Time, known Level) (Level, error) {
	level, err := w.flows()
	if err != nil {
		level = known
	}
	if level > Nothing && (level >= known || now.Sub(w.seen[level]) >= Linger) {
		w.note(now, Found{level, olderFlows})
	}
	return level, err
}

// Close closes what the Watch keeps open.
func (w *Watch) Close() { w.close() }

// Where says, for people, what makes it that level. It is valid while Look or Begin says that it is.
func (w *Watch) Where(level Level) string { return w.where[level] }

// lookAgain is how long a rule that translates pods' packets is taken to be there: kube-proxy changes its rules all the time.
const lookAgain = 5 * time.Second

// rules are those of all programs, with what was found in them.
type rules struct {
	around *Surroundings
	marks  bool // something depended on who sets marks, so the programs' rules concern each other
	sets   []*looked
}

// looked is a ruleset with what was found in it, when, and among what; nil: nothing yet, or not all.
type looked struct {
	ruleset
	found Found
	at    time.Time
	among *Surroundings
}

// due says whether to look again. A rule that translates stays one for a while, whatever changes: Nodes come and go all the time, and
// to read all of kube-proxy's rules for each is dear. But what was found when no pod was known may not be so.
func (l *looked) due(now time.Time, changed bool, around *Surroundings) bool {
	if l.among == nil || l.found.Level < Translates || len(l.among.Pods) == 0 {
		return changed || l.among == nil || !l.among.equal(around)
	}
	since := now.Sub(l.at)
	return changed && since >= lookAgain || since >= l.pause() && !l.among.equal(around)
}

func newRules(around *Surroundings) *rules {
	r := &rules{around: around}
	for _, set := range rulesets() {
		r.sets = append(r.sets, &looked{ruleset: set})
	}
	return r
}

// rulesets are those of all programs.
func rulesets() []ruleset {
	return []ruleset{&nftables{}, &iptables{family: unix.AF_INET}, &iptables{family: unix.AF_INET6}}
}

// find says what rules translate. It looks at them anew only if they may have changed, or what is around them has.
func (r *rules) find(now time.Time) (worst Found, err error) {
	var changed []*looked
	for _, set := range r.sets {
		yes, setErr := set.changed(now)
		err = errors.Join(err, setErr)
		if set.due(now, yes, r.around) {
			changed = append(changed, set)
		}
	}
	if len(changed) > 0 && r.marks {
		changed = r.sets
	}
	if len(changed) > 0 {
		err = errors.Join(err, r.look(now, changed))
	}
	for _, set := range r.sets {
		if set.found.Level > worst.Level {
			worst = set.found
		}
	}
	if worst.Level == Translates {
		return worst, nil // whatever else there is
	}
	return worst, err
}

// look goes through changed rulesets. After an error it is to be done again.
func (r *rules) look(now time.Time, changed []*looked) (err error) {
	s := search{Surroundings: r.around, marks: map[uint32]bool{}}
	for _, set := range r.sets {
		s.sets = append(s.sets, set)
	}
	among := r.around.clone()
	for _, set := range changed {
		set.begin(now)
		s.found = Found{}
		setErr := s.in(set)
		if set.found, set.at, set.among = s.found, now, &among; setErr != nil {
			set.among = nil
		}
		err = errors.Join(err, setErr)
	}
	for _, set := range r.sets {
		set.end()
	}
	r.marks = len(s.marks) > 0
	return err
}

func (r *rules) close() {
	for _, set := range r.sets {
		set.close()
	}
}
