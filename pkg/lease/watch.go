package lease

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

const (
	// lookInterval is how often, at least, this node asks whether its lease stands, and whether the registry is what it was.
	lookInterval = 15 * time.Second
	// listsPerSecond is how many lists all nodes together make where all of them have a reason to.
	listsPerSecond = 25
)

// deadline is the earliest time that has been asked for.
type deadline struct {
	at   time.Time
	come <-chan time.Time
}

func (d *deadline) by(t time.Time) {
	if d.come == nil || t.Before(d.at) {
		d.at, d.come = t, time.After(time.Until(t))
	}
}

// watcher follows changes from one list to the next. What is about this node alone is looked at without waiting, by its own keys; what
// all nodes hear leads to a list in this node's turn, since until then what stood stays.
type watcher struct {
	*follower
	look, list deadline
	turn       time.Duration
	from       int64                         // the revision of the next change
	changes    <-chan clientv3.WatchResponse // nil: not yet
	opened     <-chan clientv3.WatchChan
	end        context.CancelFunc // of what has been opened
	deaf       bool               // changes are refused, and the error that says so stays
}

// newWatcher returns one whose turn is drawn once: each node's is to be anywhere, and the first of many draws would be soon.
func (f *follower) newWatcher(from int64) *watcher {
	w := &watcher{follower: f, from: from, turn: f.drawTurn()}
	if first := f.table.nextEnd(); !first.IsZero() {
		w.list.by(f.listed.Add(max(listPause, first.Sub(f.listed)) + w.turn))
	}
	return w
}

// soon and inTurn are when to look at this node's own lease, and when to list everything.
func (w *watcher) soon() { w.look.by(w.looked.Add(listPause)) }
func (w *watcher) inTurn() {
	w.list.by(time.Now().Add(max(0, time.Until(w.listed.Add(listPause))) + w.turn))
}

// watch goes on until it is time to list everything, which it is not while etcd is away.
func (w *watcher) watch(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	connection, wait := w.followConnection(ctx)
	defer wait()
	defer cancel()
	w.open(ctx, 0)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.list.come:
			if w.said == "" {
				return nil
			}
			w.list = deadline{}
			w.list.by(time.Now().Add(listPause + w.turn))
		case <-w.look.come:
			w.lookAtOwn(ctx)
		case <-connection:
			w.lookAtOwn(ctx)
		case _, ok := <-w.own.renewed:
			if !ok {
				w.own.ended, w.own.renewed = true, nil
				w.soon()
			}
		case w.changes = <-w.opened:
		case answer, ok := <-w.changes:
			if ok && answer.Err() == nil {
				w.apply(answer)
			} else {
				w.lost(ctx, answer)
			}
		}
	}
}

// open asks for changes after a pause, and returns at once: etcd may be away, and answers when it is there.
func (w *watcher) open(ctx context.Context, pause time.Duration) {
	if w.end != nil {
		w.end()
	}
	ctx, w.end = context.WithCancel(ctx)
	opened, from := make(chan clientv3.WatchChan, 1), w.from
	w.changes, w.opened = nil, opened
	go func() {
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			opened <- w.client.Watch(clientv3.WithRequireLeader(ctx), w.Prefix+"/", clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithCreatedNotify())
		}
	}()
}

// lost goes on where changes have ended. Those that are forgotten by now are in the next list.
func (w *watcher) lost(ctx context.Context, last clientv3.WatchResponse) {
	err := last.Err()
	if err == nil || last.CompactRevision > 0 {
		w.log.Info("changes of leases have been missed; listing all", "error", err)
		w.from = max(w.from, last.CompactRevision)
		w.inTurn()
	} else {
		w.deaf = true
		w.say(fmt.Errorf("follow changes of leases: %w", err))
	}
	w.soon()
	w.open(ctx, listPause+rand.N(listPause)) //nolint:gosec // no secret
}

// followConnection rings when the connection is lost, and when there is one again: perhaps to another etcd, where the watch would wait
// for a revision that is far away. wait waits for its end, which comes with that of ctx.
func (f *follower) followConnection(ctx context.Context) (rings <-chan struct{}, wait func()) {
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	connection := f.client.ActiveConnection()
	go func() {
		defer close(ended)
		// A list has just been had: whatever else the state is, it has changed since.
		for state := connectivity.Ready; connection.WaitForStateChange(ctx, state); {
			was := state == connectivity.Ready
			if state = connection.GetState(); was == (state == connectivity.Ready) {
				continue
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return changed, func() { <-ended }
}

// lookAtOwn asks for this node's own keys, and has it hold its lease. The answer says as well which registry that is.
func (w *watcher) lookAtOwn(ctx context.Context) {
	w.looked, w.look = time.Now(), deadline{}
	l, err := w.listOwn(ctx)
	if err != nil {
		w.failures++
		w.say(err)
		w.look.by(time.Now().Add(min(w.pause(), lookInterval)))
		return
	}
	w.Heard()
	if w.isAnother(l) {
		w.inTurn()
	}
	if w.from > l.revision+1 { // so far is another etcd not yet
		w.from = l.revision + 1
		w.open(ctx, 0)
	}
	pause := lookInterval
	if e := l.entries[w.own.subnet.String()]; e != nil && !w.isMine(e) {
		w.list.by(w.listed.Add(listPause)) // which other one is free, only all tell
	} else {
		if e == nil {
			w.missed = true
			delete(w.table.entries, w.own.subnet.String())
			w.inTurn()
		}
		pause = w.judge(w.ensure(ctx, l))
		w.own.chosen = false // the list is to come
	}
	w.look.by(time.Now().Add(min(pause, lookInterval)))
	if !w.deaf {
		w.tell(time.Now())
	}
}

// apply takes changes into the table, and sees what they are a reason for.
func (w *watcher) apply(answer clientv3.WatchResponse) {
	w.Heard()
	w.deaf = false
	now := time.Now()
	w.revision = max(w.revision, answer.Header.Revision)
	public, changed := w.public[wire.IPv4], newList()
	for _, e := range answer.Events {
		w.from = e.Kv.ModRevision + 1
		if e.Type == clientv3.EventTypeDelete {
			w.removed(changed, string(e.Kv.Key), now)
		} else {
			w.put(changed, e.Kv)
		}
	}
	if changed.config != nil {
		w.compare(changed.config)
	}
	for key, e := range changed.entries {
		if key == w.own.subnet.String() {
			if e.lease != w.own.lease && e.lease != 0 || e.record.PublicIP != public {
				w.soon()
			}
			continue
		}
		if e.record.PublicIP != public && w.network.fits(e.subnet) && e.subnet.overlaps(w.own.subnet) {
			w.list.by(w.listed.Add(listPause))
		}
		w.table.put(key, e)
	}
	for a, h := range changed.holders {
		if a == public && h.holder != w.holder() {
			w.soon()
		}
		w.table.holders[a] = h
	}
	w.tell(now)
}

// removed takes note of a key that is gone. Another node's lease counts until it has had time to lease again, and a list lacks it.
func (w *watcher) removed(changed *list, key string, now time.Time) {
	switch text, isSubnet := strings.CutPrefix(key, w.subnetsKey()); {
	case key == w.subnetKey(w.own.subnet) || key == w.holderKey(w.public[wire.IPv4]):
		w.soon()
	case key == w.configKey():
		changed.config = nil
		w.compare(nil)
	case isSubnet:
		delete(changed.entries, text)
		if e := w.table.entries[text]; e != nil && e.until.IsZero() {
			e.until = now.Add(returnPause)
		}
		w.list.by(now.Add(returnPause + w.turn))
	}
}
