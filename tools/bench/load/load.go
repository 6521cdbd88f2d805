package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Target says between which two places a sample is taken, on which CPUs, and for how long.
type Target struct {
	Client, Server *lab.Namespace
	// FirstPort is the server's first port, and Ports is how many it has at most; 0: the workload chooses.
	FirstPort, Ports int
	// Via is where the client sends in place of the server's address and first port: to a Service.
	Via                  netip.AddrPort
	ClientCPU, ServerCPU int // both 0 on a machine with one CPU
	Duration             time.Duration
	Warmup               time.Duration // traffic flows, nothing is counted
}

// Result is what one sample measured, in datagrams, bytes, transactions, connections or flows.
type Result struct {
	// Sent is how many there were in all, warm-up included: what the dataplane's counters must show. Lost of them never arrived or were
	// not answered; of connections it is the number of segments that were sent again.
	Sent, Lost uint64
	// Counted is how many were completed inside the window, and Rate how many a second.
	Counted uint64
	Rate    float64
	// Latencies are those of the window's transactions, of RequestResponse only.
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

// kind is what the two ends of a sample do.
type kind struct {
	what           string
	client, server func(*end) error
	// arrivals: the server counts what arrives, and what does not is lost. Otherwise the client counts what is answered.
	arrivals bool
}

// UDP sends datagrams with size bytes of payload in one direction, as fast as they get through.
func UDP(ctx context.Context, t Target, size int) (Result, error) {
	if size < minDatagram || size > maxDatagram {
		return Result{}, fmt.Errorf("datagrams of %d bytes: want %d to %d", size, minDatagram, maxDatagram)
	}
	return measure(ctx, t, kind{
		what: fmt.Sprintf("udp of %d bytes", size), arrivals: true,
		client: func(e *end) error { return sendDatagrams(e, size) }, server: func(e *end) error { return receiveDatagrams(e, size) },
	})
}

// Stream sends bytes from client to server over one TCP connection.
func Stream(ctx context.Context, t Target) (Result, error) {
	return measure(ctx, t, kind{what: "tcp stream", arrivals: true, client: sendStream, server: receiveStream})
}

// RequestResponse sends 64 bytes over an open TCP connection, waits for as many in return, and so on.
func RequestResponse(ctx context.Context, t Target) (Result, error) {
	return measure(ctx, t, kind{what: "tcp request-response", client: request, server: respond})
}

// Connect opens a TCP connection, sends a request, reads the answer to its end, closes, and so on, 16 at a time. It ends
// after ConnectionsPerSample counted connections at the latest.
func Connect(ctx context.Context, t Target) (Result, error) {
	return measure(ctx, t, kind{what: "tcp connections", client: connect, server: accept})
}

// NewFlows sends datagrams of which each is a flow of its own, and is answered. It ends after FlowsPerSample flows at the
// latest, so that many samples fit into a table of flows that lives on for minutes. The warm-up is a number of flows, not
// Target.Warmup.
func NewFlows(ctx context.Context, t Target) (Result, error) {
	return measure(ctx, t, kind{what: "new flows", client: openFlows, server: answerFlows})
}

// measure takes one sample, and refuses one that measured something other than what the network carries.
func measure(ctx context.Context, t Target, k kind) (Result, error) {
	s, err := run(ctx, t, k)
	if err != nil {
		return Result{}, fmt.Errorf("%s: %w", k.what, err)
	}
	counter := &s.client
	if k.arrivals {
		counter = &s.server
		if s.client.total < s.server.total {
			return Result{}, unmeasured("%s: %d were sent and %d received", k.what, s.client.total, s.server.total)
		}
		s.client.lost = s.client.total - s.server.total
	}
	r := Result{
		Sent: s.client.total, Lost: s.client.lost, Counted: counter.counted, Latencies: s.client.latencies, Usage: usage(counter, &s.client, &s.server),
	}
	if r.Usage.Window > 0 {
		r.Rate = float64(r.Counted) / r.Usage.Window.Seconds()
	}
	if err := r.check(t); err != nil {
		return r, fmt.Errorf("%s: %w", k.what, err)
	}
	return r, nil
}

func (r Result) check(t Target) error {
	switch {
	case r.Counted == 0:
		return unmeasured("nothing of %d was counted in %s", r.Sent, r.Usage.Window)
	case r.Lost*lossLimit > r.Sent:
		return unmeasured("%d of %d were lost or sent again", r.Lost, r.Sent)
	}
	return r.Usage.check(t)
}
