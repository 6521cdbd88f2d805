package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// caller is who opens flows: a pod, a host outside, or a process of a node's.
type caller struct {
	tcp func(context.Context, netip.AddrPort) (*lab.TCPConn, error)
	udp func(netip.AddrPort) (*lab.UDPConn, error)
	// pushed is nil for who is never spoken to first.
	pushed func(context.Context, netip.AddrPort) (*lab.TCPConn, error)
}

func callerIn(ns *lab.Namespace) caller {
	return caller{
		tcp:    func(ctx context.Context, to netip.AddrPort) (*lab.TCPConn, error) { return ns.DialTCP(ctx, to, 0) },
		udp:    func(to netip.AddrPort) (*lab.UDPConn, error) { return ns.DialUDP(to, 0) },
		pushed: ns.DialPushed,
	}
}

// callerOf makes the sockets of a process one after the other, as it does itself.
func callerOf(p *lab.Process) caller {
	var mu sync.Mutex
	return caller{
		tcp: func(ctx context.Context, to netip.AddrPort) (*lab.TCPConn, error) {
			mu.Lock()
			defer mu.Unlock()
			return p.DialTCP(ctx, to)
		},
		udp: func(to netip.AddrPort) (*lab.UDPConn, error) {
			mu.Lock()
			defer mu.Unlock()
			return p.DialUDP(to)
		},
	}
}

// trip is from whom to where flows go, and by which node kube-proxy's rules would translate them.
type trip struct {
	name string
	from caller
	to   netip.AddrPort
	by   *lab.Node
}

// exchangeLimit is how long an answer may take. TCP repeats what was lost: an answer that has come within this time was late at most.
// What UDP has lost has no answer.
const exchangeLimit = 6 * time.Second

// survivor is a flow that must live on whoever serves its Service. Only one goroutine uses it at a time.
type survivor struct {
	name   string
	opened int                         // the step
	use    func(context.Context) error // one exchange
	close  func() error
	udp    bool

	exchanges int
	longest   time.Duration
	lost      []error
}

// exchange uses the flow once. A connection that has failed is dead, and is not used again.
func (s *survivor) exchange() {
	if !s.udp && len(s.lost) > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), priv.Patience(exchangeLimit))
	defer cancel()
	began := time.Now()
	err := s.use(ctx)
	s.exchanges++
	s.longest = max(s.longest, time.Since(began))
	if err != nil {
		s.lost = append(s.lost, fmt.Errorf("%s %s, open since step %d: %w", began.Format("15:04:05.000"), s.name, s.opened, err))
	}
}

// survivors are many of them, beside flows that are opened and closed all the time.
type survivors struct {
	step  int // how often who serves has changed
	every time.Duration
	busy  []*survivor
	// idle flows are silent for some steps, each for another number of them.
	idle []*survivor
	// pushed are connections whose servers speak first, once in a step.
	pushed []*survivor
	anew   []*survivor // the exchanges of each are new flows

	stop    context.CancelFunc
	running context.Context
	users   sync.WaitGroup
}

// maxSilence is for how many steps an idle flow may be silent.
const maxSilence = 4

func newSurvivors(t *testing.T, every time.Duration) *survivors {
	s := &survivors{every: every}
	s.running, s.stop = context.WithCancel(t.Context())
	t.Cleanup(s.close)
	return s
}

// keep uses a flow all the time, or opens new ones.
func (s *survivors) keep(one *survivor, every time.Duration) {
	s.users.Go(func() {
		time.Sleep(rand.N(every)) // not all at once
		tick := time.NewTicker(every)
		defer tick.Stop()
		for s.running.Err() == nil {
			one.exchange()
			<-tick.C
		}
	})
}

// open adds flows on each trip: busy connections, idle ones, and half as many flows of datagrams; and a connection that the server uses.
func (s *survivors) open(t *testing.T, trips []trip, each int) {
	t.Helper()
	var mu sync.Mutex
	var work errgroup.Group
	work.SetLimit(8)
	add := func(list *[]*survivor, one *survivor) {
		mu.Lock()
		defer mu.Unlock()
		one.opened = s.step
		*list = append(*list, one)
		if list == &s.busy {
			s.keep(one, s.every)
		}
	}
	for _, trip := range trips {
		for range each {
			for _, list := range []*[]*survivor{&s.busy, &s.idle} {
				work.Go(func() error { return trip.stream(func(one *survivor) { add(list, one) }) })
			}
		}
		for range (each + 1) / 2 {
			for _, list := range []*[]*survivor{&s.busy, &s.idle} {
				work.Go(func() error { return trip.datagrams(func(one *survivor) { add(list, one) }) })
			}
		}
		if trip.from.pushed != nil {
			work.Go(func() error { return trip.listens(func(one *survivor) { add(&s.pushed, one) }) })
		}
	}
	if err := work.Wait(); err != nil {
		t.Fatalf("step %d: %v", s.step, err)
	}
}

func (w trip) stream(add func(*survivor)) error {
	conn, err := w.from.tcp(context.Background(), w.to)
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	add(&survivor{name: "TCP, " + w.name, close: conn.Close, use: func(ctx context.Context) error { return conn.Echo(ctx, 100) }})
	return nil
}

// datagrams has a flow that has been answered once, as one is that anybody waits for.
func (w trip) datagrams(add func(*survivor)) error {
	conn, err := w.from.udp(w.to)
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	one := &survivor{name: "UDP, " + w.name, udp: true, close: conn.Close, use: func(ctx context.Context) error {
		_, err := conn.Echo(ctx, 100)
		return err
	}}
	one.exchange()
	add(one)
	return nil
}

func (w trip) listens(add func(*survivor)) error {
	conn, err := w.from.pushed(context.Background(), w.to)
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	add(&survivor{name: "TCP, the server speaks, " + w.name, close: conn.Close, use: conn.Pushed})
	return nil
}

// openAnew opens a connection and a flow of datagrams on each trip every so often, until all ends.
func (s *survivors) openAnew(trips []trip, every time.Duration) {
	for _, w := range trips {
		stream := &survivor{name: "new TCP, " + w.name, udp: true, close: func() error { return nil }, use: func(ctx context.Context) error {
			conn, err := w.from.tcp(ctx, w.to)
			if err != nil {
				return err
			}
			defer conn.Close()
			return conn.Echo(ctx, 100)
		}}
		datagram := &survivor{name: "new UDP, " + w.name, udp: true, close: func() error { return nil }, use: func(ctx context.Context) error {
			conn, err := w.from.udp(w.to)
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Echo(ctx, 100)
			return err
		}}
		s.anew = append(s.anew, stream, datagram)
		s.keep(stream, every)
		s.keep(datagram, every)
	}
}

// changed says that another one serves now: the next of the idle flows speak, and servers do.
func (s *survivors) changed(t *testing.T, servers []*lab.Server) {
	t.Helper()
	s.step++
	for _, server := range servers {
		server.Push()
	}
	var work errgroup.Group
	work.SetLimit(32) // what is dead takes its time
	for i, one := range s.idle {
		if i%maxSilence < s.step-one.opened {
			work.Go(func() error { one.exchange(); return nil })
		}
	}
	for _, one := range s.pushed {
		work.Go(func() error { one.exchange(); return nil })
	}
	_ = work.Wait() // what failed stands with its flow
}

// end stops all, uses what is idle once more, and tells what was lost.
func (s *survivors) end(t *testing.T) {
	t.Helper()
	s.stop()
	s.users.Wait()
	var idle errgroup.Group
	idle.SetLimit(32)
	for _, one := range s.idle {
		idle.Go(func() error { one.exchange(); return nil })
	}
	_ = idle.Wait()
	for _, group := range []struct {
		what string
		all  []*survivor
	}{{"busy", s.busy}, {"idle", s.idle}, {"spoken to first", s.pushed}, {"opened all the time", s.anew}} {
		var exchanges, hurt int
		var lost []error
		var longest time.Duration
		for _, one := range group.all {
			exchanges, longest = exchanges+one.exchanges, max(longest, one.longest)
			if len(one.lost) > 0 {
				hurt, lost = hurt+1, append(lost, one.lost...)
			}
		}
		t.Logf("%s: %d flows, %d exchanges, the longest took %v", group.what, len(group.all), exchanges, longest.Round(time.Millisecond))
		if len(lost) > 0 {
			t.Errorf("%s: %d of %d flows have lost %d of %d exchanges:\n%v", group.what, hurt, len(group.all), len(lost), exchanges, errors.Join(lost[:min(len(lost), 25)]...))
		}
		if exchanges < len(group.all) || exchanges == 0 {
			t.Errorf("%s: %d exchanges of %d flows: this shows nothing", group.what, exchanges, len(group.all))
		}
	}
}

func (s *survivors) close() {
	s.stop()
	s.users.Wait()
	for _, all := range [][]*survivor{s.busy, s.idle, s.pushed} {
		for _, one := range all {
			_ = one.close()
		}
	}
	s.busy, s.idle, s.pushed = nil, nil, nil
}
