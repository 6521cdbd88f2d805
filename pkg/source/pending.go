package source

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// cidrs are the ranges that a ServiceCIDR names.
type cidrs []netip.Prefix

// pending is what is known of Services, and what of it the consumer has not heard yet: names only, so that thousands of changes
// of one object are one, and nobody who writes waits for the consumer. It shares with the consumer what the objects contain.
type pending struct {
	news chan struct{} // readable while something waits

	mu       sync.Mutex
	services table[service.Service]
	slices   table[service.Slice]
	cidrs    table[cidrs]
	// begun: the consumer has heard of everything once; whole: it is to hear of everything, not of changes alone.
	begun, whole bool
	waiting      bool // there are changes, or an error is over
	changes      []service.Change
	faults       [kinds]error
	faulty       bool // the faults have not been told
}

// kind counts what is read of the API apart from each other.
type kind uint8

const (
	kindService kind = iota
	kindSlice
	kindCIDR
	kinds
)

func newPending() *pending { return &pending{news: make(chan struct{}, 1)} }

// run delivers what waits, until ctx ends.
func (p *pending) run(ctx context.Context, deliver func(service.Update)) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.news:
			for _, u := range p.take() {
				deliver(u)
			}
		}
	}
}

// change carries out what changes the tables and reports whether it did. It was triggered at that time; zero: nobody says.
func (p *pending) change(triggered time.Time, do func() (changed bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if do() {
		p.note(service.Change{Noticed: time.Now(), Triggered: triggered})
		p.wake()
	}
}

// note has a change count. Until the consumer has heard of everything, nobody can tell what of that is new.
func (p *pending) note(c service.Change) {
	if p.begun && !p.whole && len(p.changes) < service.MostChanges {
		p.changes = append(p.changes, c)
	} else if len(p.changes) == 0 {
		p.changes = append(p.changes, service.Change{Noticed: c.Noticed})
	}
}

// wake has the consumer hear of changes. The caller holds the lock.
func (p *pending) wake() {
	p.waiting = true
	p.signal()
}

func (p *pending) signal() {
	select {
	case p.news <- struct{}{}:
	default:
	}
}

// fail notes why a kind can't be read; nil: it can again.
func (p *pending) fail(of kind, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && p.faults[of] == nil {
		return
	}
	p.faults[of] = err
	if joined(p.faults[:]) == nil {
		p.wake() // the end of the last fault is news by itself
		return
	}
	p.faulty = true
	p.signal()
}

// take returns what the consumer has to hear: first what is there, and then why that is not all.
func (p *pending) take() (all []service.Update) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fault := joined(p.faults[:])
	// Ranges that only come later must not look like none.
	known := p.services.listed && p.slices.listed && (p.cidrs.listed || p.faults[kindCIDR] != nil)
	if known && p.waiting {
		u := p.update()
		u.Faulty = fault != nil
		all = append(all, u)
	}
	if fault != nil && p.faulty {
		all = append(all, service.Update{CIDRs: p.ranges(), Err: fault})
	}
	p.faulty = false
	return all
}

// update is what the consumer has not heard yet.
func (p *pending) update() service.Update {
	u := service.Update{Complete: p.whole || !p.begun, CIDRs: p.ranges(), Changes: p.changes}
	u.Services, u.GoneServices = p.services.take(u.Complete)
	u.Slices, u.GoneSlices = p.slices.take(u.Complete)
	p.cidrs.take(true)
	p.begun, p.whole, p.waiting, p.changes = true, false, false, nil
	return u
}

// ranges are the ranges of all ServiceCIDRs, each once; nil: there are none.
func (p *pending) ranges() []netip.Prefix {
	var all []netip.Prefix
	for _, c := range p.cidrs.have {
		all = append(all, c...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// joined is one error for all faults; what several kinds have in common is said once. nil: there is no fault.
func joined(faults []error) (all error) {
	var told []failure
	add := func(err error) {
		if all == nil {
			all = err
		} else {
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	for _, fault := range faults {
		f, ok := fault.(*failure) //nolint:errorlint // as it came
		if !ok && fault != nil {
			add(fault)
		}
		if !ok {
			continue
		}
		i := slices.IndexFunc(told, f.like)
		if i < 0 {
			told = append(told, *f)
			continue
		}
		told[i].resource += ", " + f.resource
	}
	for i := range told {
		add(&told[i])
	}
	return all
}
