// Package shortconn opens many short connections between network namespaces and counts those that fail, stall or are refused. It shows how soon a
// network that translates addresses can use a port again. It knows nothing of the network in between.
//
//	result, err := shortconn.Run(ctx, shortconn.Options{Clients: pods, Server: outside, At: world, Way: shortconn.ResetByClient, For: 5 * time.Second})
//	fmt.Println(result.Rate(), result.Failed, result.Stalled)
//
// All connections go to one address and port. The server speaks first: one byte, after which one of the two ends closes. A datagram is a question, and the server
// echoes it; each question has a socket of its own.
//
// Each client is a thread in its namespace with a fixed number of connections in flight, and so is the server. A connection that has not completed within
// a limit has failed, and its place in flight is free again.
package shortconn

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Way is how a connection ends.
type Way string

// The ways. Question is a datagram and its answer.
const (
	ResetByClient Way = "RST by the client"
	ResetByServer Way = "RST by the server"
	FinByClient   Way = "FIN, the client first"
	FinByServer   Way = "FIN, the server first"
	Question      Way = "UDP question"
)

// Ways are all of them.
func Ways() []Way { return []Way{ResetByClient, ResetByServer, FinByClient, FinByServer, Question} }

func (w Way) byClient() bool { return w == ResetByClient || w == FinByClient }

const (
	// stallLimit is the time after which a connection has stalled: a SYN is sent again after a second, other segments after 200 ms at the earliest.
	stallLimit = 200 * time.Millisecond
	// failLimit is the time after which a connection has failed. It includes one SYN that is sent again.
	failLimit = 2 * time.Second
	// inFlight is the number of connections that all clients together have open at a time.
	inFlight = 160
)

// Options say who connects where, and for how long.
type Options struct {
	Clients []*lab.Namespace
	Server  *lab.Namespace
	// At is where the server listens, and To where clients connect to if that is another place: a Service.
	At, To netip.AddrPort

	Way Way
	// For is how long new connections are opened. Count, if it is not 0, is how many there are at most.
	For   time.Duration
	Count uint64
	// Failures, if it is not 0, is after how many failures no more connections are opened.
	Failures uint64
}

func (o Options) to() netip.AddrPort {
	if o.To.IsValid() {
		return o.To
	}
	return o.At
}

// Result counts connections.
type Result struct {
	Opened, Completed uint64
	// Failed were refused, reset too early or not complete within two seconds; Failures tells them apart by what the socket said. BeforeFailure is how many
	// of one client had completed before its first failure.
	Failed, BeforeFailure uint64
	Failures              map[string]uint64
	// Stalled took more than 200 ms to complete.
	Stalled uint64
	// Took is the time for which connections were opened, and Within how many completed meanwhile.
	Took   time.Duration
	Within uint64
}

// Rate is how many connections completed in a second.
func (r Result) Rate() float64 { return float64(r.Within) / r.Took.Seconds() }

func (r Result) String() string {
	return fmt.Sprintf("%d opened in %s, %.0f/s, %d failed (the first after %d; %v), %d stalled",
		r.Opened, r.Took.Round(time.Millisecond), r.Rate(), r.Failed, r.BeforeFailure, r.Failures, r.Stalled)
}

// run is one Run while it goes on.
type run struct {
	Options

	opened, failed atomic.Uint64
	started        time.Time
	// done ends the server, and stopped everything.
	done, stopped atomic.Bool
}

// Run opens connections, and returns when all have completed or failed.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Way == FinByClient {
		// The client's own TIME_WAIT would keep each of its ports for a minute.
		for _, ns := range o.Clients {
			if err := ns.WriteSysctl("net/ipv4/tcp_tw_reuse", "1"); err != nil {
				return Result{}, err
			}
		}
	}
	r := &run{Options: o}
	s, err := newServer(r)
	if err != nil {
		return Result{}, fmt.Errorf("serve %s: %w", o.Way, err)
	}
	stop := context.AfterFunc(ctx, func() { r.stopped.Store(true) })
	defer stop()
	serving := make(chan error, 1)
	go func() { serving <- o.Server.Do(s.serve) }()
	r.started = time.Now()
	results, errs := make([]Result, len(o.Clients)), make([]error, len(o.Clients))
	var asking sync.WaitGroup
	for i, ns := range o.Clients {
		asking.Go(func() {
			errs[i] = ns.Do(func() (err error) {
				results[i], err = r.ask(max(inFlight/len(o.Clients), 1))
				return err
			})
		})
	}
	asking.Wait()
	r.done.Store(true)
	err = errors.Join(errors.Join(errs...), <-serving, context.Cause(ctx))
	if err != nil {
		err = fmt.Errorf("%s: %w", o.Way, err)
	}
	return sum(results), err
}

func sum(results []Result) (all Result) {
	all.Failures = map[string]uint64{}
	for _, r := range results {
		if r.Failed > 0 && (all.Failed == 0 || r.BeforeFailure < all.BeforeFailure) {
			all.BeforeFailure = r.BeforeFailure
		}
		all.Opened, all.Completed, all.Failed, all.Stalled = all.Opened+r.Opened, all.Completed+r.Completed, all.Failed+r.Failed, all.Stalled+r.Stalled
		all.Within, all.Took = all.Within+r.Within, max(all.Took, r.Took)
		for why, n := range maps.All(r.Failures) {
			all.Failures[why] += n
		}
	}
	return all
}

// more takes one of the connections that are still to be opened.
func (r *run) more() bool {
	if r.stopped.Load() || time.Since(r.started) >= r.For || r.Options.Failures > 0 && r.failed.Load() >= r.Options.Failures {
		return false
	}
	return r.Count == 0 || r.opened.Add(1) <= r.Count
}
