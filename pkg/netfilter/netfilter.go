// Package netfilter finds out whether netfilter translates addresses on this
// node: by rules of iptables or nftables, or, when those are gone, by flows that
// they have translated. It only looks at those. And it keeps a table of ours in
// nftables for each family, ebpf-cni: the rules by which netfilter does not track
// a tunnel's outer packets, and drops what it has translated to their port.
//
//	w := netfilter.New()
//	translates, err := w.Begin(time.Now())
//	translates, err = w.Look(time.Now(), translates) // now and then
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
	of      []uint8                                       // the families that are looked at
	rules   func(now time.Time) (where string, err error) // where a rule stands that translates; empty: nowhere
	flows   func() (found bool, err error)
	tracked func() bool // whether the kernel keeps flows at all
	close   func()

	where string    // of the newest rule that was seen
	seen  time.Time // when a rule, or a flow without one, was last seen
}

// New returns a Watch of IPv4 that has seen nothing yet.
func New() *Watch {
	var n nftables
	older := map[uint8]*iptables{unix.AF_INET: {family: unix.AF_INET}, unix.AF_INET6: {family: unix.AF_INET6}}
	w := &Watch{of: []uint8{unix.AF_INET}, tracked: tracksConnections}
	w.flows = func() (bool, error) { return translatedFlows(w.of) }
	w.rules = func(now time.Time) (string, error) {
		where, err := n.find(now, w.of)
		for _, family := range w.of {
			if where == "" {
				var olderErr error
				where, olderErr = older[family].find()
				err = errors.Join(err, olderErr)
			}
		}
		if where != "" {
			return where, nil
		}
		return "", err
	}
	w.close = func() {
		n.close()
		for _, i := range older {
			i.close()
		}
	}
	return w
}

// Of has the Watch look at these families from now on, as the kernel numbers them.
func (w *Watch) Of(families []int) {
	w.of = nil
	for _, f := range families {
		w.of = append(w.of, uint8(f))
	}
}

// Look reports whether netfilter translates; before is what is known so far. It
// begins with the first rule. It ends when there has been no rule for Linger and
// no translated flow is left; to ask for those costs a look at every flow. After
// an error, what was known before stays.
func (w *Watch) Look(now time.Time, before bool) (bool, error) {
	where, err := w.rules(now)
	switch {
	case where != "":
		w.where, w.seen = where, now
		return true, nil
	case err != nil || !before:
		return before, err
	case now.Sub(w.seen) < Linger:
		return true, nil
	}
	return w.outlived(now)
}

// Begin is Look for a process that has seen nothing yet. The rules may be away for a moment, as when kube-proxy changes
// its mode, and what they have translated must go on meeting netfilter. So when in doubt, and after an error, the answer is yes.
func (w *Watch) Begin(now time.Time) (bool, error) {
	translates, err := w.Look(now, false)
	if translates || !w.tracked() {
		return translates, err
	}
	w.where = olderFlows
	older, flowsErr := w.outlived(now)
	if err != nil {
		w.seen = now
	}
	return older || err != nil, errors.Join(err, flowsErr)
}

// outlived says whether flows go on that were translated by rules that are gone.
func (w *Watch) outlived(now time.Time) (bool, error) {
	found, err := w.flows()
	if found || err != nil {
		w.seen = now
	}
	return found || err != nil, err
}

// Close closes what the Watch keeps open.
func (w *Watch) Close() { w.close() }

// Where says, for people, what translates. It is valid while Look or Begin says that something does.
func (w *Watch) Where() string { return w.where }
