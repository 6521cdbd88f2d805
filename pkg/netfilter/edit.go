package netfilter

import (
	"errors"
	"fmt"
	"slices"
)

// listing is what a change of a table has to know of it.
type listing struct {
	chains []string
	rules  []placed
}

// placed is a rule in its place.
type placed struct {
	chain string
	at    uint64 // what names it: the handle of nftables, or where it begins in a table of the older iptables
	rule
}

// change is what is done to a table in one step: chains are taken out with all that they have, and rules of chains that stay. Accepts
// are put at the head of a chain.
type change struct {
	chains  []string
	rules   []placed
	of      []string // whose they were, for people
	into    string   // the chain that gets accepts
	accepts []accept
}

func (r change) isEmpty() bool { return len(r.chains)+len(r.rules)+len(r.accepts) == 0 }

// without removes chains, and the rules that lead to them.
func (l listing) without(chains []string) change {
	r, goes := change{chains: chains}, setOf(chains)
	for _, p := range l.rules {
		if !goes[p.chain] && p.leadsTo(goes) {
			r.rules = append(r.rules, p)
		}
	}
	return r
}

// there are those of some chains that the table has, each once.
func (l listing) there(chains []string) []string {
	has, all := setOf(l.chains), slices.Clone(chains)
	slices.Sort(all)
	return slices.Compact(slices.DeleteFunc(all, func(chain string) bool { return !has[chain] }))
}

func setOf[T comparable](all []T) map[T]bool {
	set := make(map[T]bool, len(all))
	for _, one := range all {
		set[one] = true
	}
	return set
}

// editable is a table that is changed while others may be writing to it.
type editable interface {
	fmt.Stringer
	// keep keeps others from writing, if that takes anything, until done is called.
	keep() (done func(), err error)
	// list reads the table; of one that is not there, nothing.
	list() (listing, error)
	// apply changes the table as it was listed last; errChanged: it is no longer that.
	apply(change) error
}

// errChanged says that somebody else was faster.
var errChanged = errors.New("others change it all the time")

// edit changes a table as choose wants, by what is in it now. Other writers are kept away only if there is something to change.
func edit(t editable, choose func(listing) (change, error)) (change, error) {
	want := func() (change, error) {
		l, err := t.list()
		if err != nil {
			return change{}, fmt.Errorf("read %s: %w", t, err)
		}
		return choose(l)
	}
	r, err := want()
	if err != nil || r.isEmpty() {
		return change{}, err
	}
	done, err := t.keep()
	if err != nil {
		return change{}, fmt.Errorf("change the rules of %s: %w", t, err)
	}
	defer done()
	for range 5 {
		if r, err = want(); err != nil || r.isEmpty() {
			return change{}, err
		}
		if err = t.apply(r); !errors.Is(err, errChanged) {
			break
		}
	}
	if err != nil {
		return change{}, fmt.Errorf("change the rules of %s: %w", t, err)
	}
	return r, nil
}
