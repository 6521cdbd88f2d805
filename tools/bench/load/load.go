package load

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Target says between which two places a sample is taken, on which CPUs, and for how long.
type Target struct {
	Client, Server       *lab.Namespace
	ClientCPU, ServerCPU int // both 0 on a machine with one CPU
	Duration             time.Duration
	Warmup               time.Duration // traffic flows, nothing is counted
}

// Result is what one sample measured, in datagrams, bytes, transactions, connections or flows.
type Result struct {
	// Sent is how many there were in all, warm-up included: what the dataplane's counters must show. Lost of them never arrived or were
	// not answered; of TCP it is the number of segments that were sent again.
	Sent, Lost uint64
	// Counted is how many were completed inside the window, and Rate how many a second.
	Counted uint64
	Rate    float64
	// Latencies are those of the window's transactions in ascending order, of RequestResponse only.
	Latencies []time.Duration
	Usage     Usage
}

var (
	// ErrNotMeasured is matched by the error of a sample that ran, and did not measure what it says. Taking it again may help.
	ErrNotMeasured = errors.New("the sample did not measure what it says")
	// ErrStarved is matched too when all went well but that something else used the CPUs of the two ends. The result is
	// there beside the error, for whoever has nothing better.
	ErrStarved = fmt.Errorf("%w: another process was in its way", ErrNotMeasured)
)

// unmeasured is an error that matches ErrNotMeasured.
func unmeasured(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotMeasured, fmt.Sprintf(format, args...))
}

const (
	// ConnectionsPerSample bounds Connect: connection tracking remembers closed connections for 10 s, and may take a minute longer to find
	// that they are to be forgotten. A table that fills up drops what the next sample sends.
	ConnectionsPerSample = 32768
	// FlowsPerSample bounds NewFlows: three samples within the minutes for which the flows are remembered, and 50 000 more that are held,
	// leave a table of 262 144 under the 70 % from which on entries are collected more often.
	FlowsPerSample = 28672
	// lossLimit is one packet in so many.
	lossLimit = 1000
	// minTransactions are the fewest that have a p99.9.
	minTransactions = 1000
)

// UDP sends datagrams with size bytes of payload in one direction, as fast as they get through.
func UDP(ctx context.Context, t Target, size int) (Result, error) {
	if size < minDatagram || size > maxDatagram {
		return Result{}, fmt.Errorf("datagrams of %d bytes: want %d to %d", size, minDatagram, maxDatagram)
	}
	what := fmt.Sprintf("udp of %d bytes", size)
	s, err := run(ctx, t, what, func(e *end) error { return sendDatagrams(e, size) }, func(e *end) error { return receiveDatagrams(e, size) })
	if err != nil {
		return Result{}, err
	}
	r := s.result(&s.server)
	if s.server.total > s.client.total {
		return r, unmeasured("%s: %d datagrams were sent and %d received", what, s.client.total, s.server.total)
	}
	r.Lost = s.client.total - s.server.total
	return r, r.check(t, what, s.server.lost)
}

// check refuses a sample of datagrams that measured something other than forwarding; the receiver's socket had no room for overflow of them.
func (r Result) check(t Target, what string, overflow uint64) error {
	switch {
	case r.Counted == 0:
		return unmeasured("%s: the receiver saw nothing of %d datagrams", what, r.Sent)
	case overflow*lossLimit > r.Sent:
		return unmeasured("%s: the receiver's socket had no room for %d of %d datagrams", what, overflow, r.Sent)
	case r.Lost*lossLimit > r.Sent:
		return unmeasured("%s: %d of %d datagrams were lost", what, r.Lost, r.Sent)
	}
	return r.Usage.check(what, t)
}

// Stream sends bytes from client to server over one TCP connection.
func Stream(ctx context.Context, t Target) (Result, error) {
	s, err := run(ctx, t, "tcp stream", sendStream, receiveStream)
	if err != nil {
		return Result{}, err
	}
	r := s.result(&s.server)
	r.Lost = s.client.lost
	switch {
	case s.client.total != s.server.total:
		return r, unmeasured("tcp stream: %d bytes were sent and %d received", s.client.total, s.server.total)
	case r.Counted == 0:
		return r, unmeasured("tcp stream: nothing arrived in %s", r.Usage.Window)
	}
	return r, r.Usage.check("tcp stream", t)
}

// RequestResponse sends 64 bytes over an open TCP connection, waits for as many in return, and so on.
func RequestResponse(ctx context.Context, t Target) (Result, error) {
	s, err := run(ctx, t, "tcp request-response", request, respond)
	if err != nil {
		return Result{}, err
	}
	r := s.result(&s.client)
	r.Latencies = s.client.latencies
	slices.Sort(r.Latencies)
	if r.Counted < minTransactions {
		return r, unmeasured("tcp request-response: %d transactions in %s say nothing about the slowest of a thousand", r.Counted, r.Usage.Window)
	}
	return r, r.Usage.check("tcp request-response", t)
}

// Connect opens a TCP connection, sends a request, reads the answer to its end, closes, and so on, 16 at a time. It ends
// after ConnectionsPerSample counted connections at the latest.
func Connect(ctx context.Context, t Target) (Result, error) {
	s, err := run(ctx, t, "tcp connections", connect, accept)
	if err != nil {
		return Result{}, err
	}
	r := s.result(&s.client)
	r.Lost = s.client.lost
	switch {
	case r.Counted == 0:
		return r, unmeasured("tcp connections: none was completed in %s", r.Usage.Window)
	case r.Lost*lossLimit > r.Sent:
		return r, unmeasured("tcp connections: %d segments of %d connections had to be sent again; is a connection table full on the way?", r.Lost, r.Sent)
	}
	return r, r.Usage.check("tcp connections", t)
}

// NewFlows sends datagrams of which each is a flow of its own, and is answered. It ends after FlowsPerSample flows at the
// latest, so that many samples fit into a table of flows that lives on for minutes. The warm-up is a number of flows, not
// Target.Warmup.
func NewFlows(ctx context.Context, t Target) (Result, error) {
	s, err := run(ctx, t, "new flows", openFlows, answerFlows)
	if err != nil {
		return Result{}, err
	}
	r := s.result(&s.client)
	r.Lost = s.client.lost
	if r.Counted == 0 || r.Lost*lossLimit > r.Sent {
		return r, unmeasured("new flows: %d of %d were not answered", r.Lost, r.Sent)
	}
	return r, r.Usage.check("new flows", t)
}
