package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Target says between which two places a sample is taken, on which CPUs, and for how long.
type Target struct {
	Client, Server       string     // paths of network namespaces
	Address              netip.Addr // of the server's namespace: where the server listens, and answers from
	ClientCPU, ServerCPU int        // both 0 on a machine with one CPU
	Duration             time.Duration
	Warmup               time.Duration // traffic flows, nothing is counted
}

// UDPResult is what one sender got through to one receiver.
type UDPResult struct {
	Size     int    // bytes of payload of each datagram
	Sent     uint64 // datagrams in all, warm-up included: what the dataplane's counters must show
	Received uint64 // of those
	Overflow uint64 // of those, how many the receiver's socket had no room for
	Lost     uint64 // Sent - Received

	Packets uint64        // datagrams received inside the window
	Rate    float64       // of these, per second
	Paused  time.Duration // how long, inside the window, the sender waited for a slower receiver
	Usage   Usage
}

// StreamResult is what one or more TCP connections carried together.
type StreamResult struct {
	Connections   int
	Bytes         uint64   // received inside the window
	Rate          float64  // bytes received per second
	PerConnection []uint64 // Bytes, by connection
	Sent          uint64   // bytes given to the kernel in all, warm-up included
	Retransmitted uint64   // segments sent again in all
	Usage         Usage
}

// LatencyResult is how long requests on one open TCP connection waited for their answers.
type LatencyResult struct {
	Total        uint64 // transactions in all, warm-up included
	Transactions uint64 // inside the window
	Rate         float64
	P50, P99     time.Duration
	P999, Max    time.Duration
	Histogram    *Histogram // of the window
	Usage        Usage
}

// ConnectResult is how many times a TCP connection was opened, used for one request and its answer, and closed.
type ConnectResult struct {
	Total       uint64 // connections in all, warm-up included
	Connections uint64 // completed inside the window
	Rate        float64
	Concurrent  int    // how many were under way at any time
	Resent      uint64 // segments that the client's namespace had to send again: something dropped them
	Usage       Usage
}

// FlowResult is how many flows were opened that the dataplane had never seen before.
type FlowResult struct {
	Total  uint64 // flows in all, warm-up included
	Flows  uint64 // opened and answered inside the window
	Rate   float64
	Window time.Duration // Duration, or less when the sample's flows came to an end before
	Lost   uint64        // opened, and not answered
	Usage  Usage
}

var (
	// ErrNotMeasured is matched by the error of a sample that ran, and did not measure what it says. Taking it again may help.
	ErrNotMeasured = errors.New("the sample did not measure what it says")
	// ErrStarved is matched too when all went well but that something else used the CPUs of the two ends. The result is
	// there beside the error, for whoever has nothing better.
	ErrStarved = fmt.Errorf("%w: another process was in its way", ErrNotMeasured)
)

// UDP sends datagrams with size bytes of payload in one direction, as fast as they get through.
func UDP(ctx context.Context, t Target, size int) (UDPResult, error) {
	if size < minSize || size > maxSize {
		return UDPResult{}, fmt.Errorf("datagrams of %d bytes: want %d to %d", size, minSize, maxSize)
	}
	c, s, err := sample(ctx, t, order{Work: udpSender, Size: size}, order{Work: udpReceiver, Size: size})
	if err != nil {
		return UDPResult{}, fmt.Errorf("udp of %d bytes: %w", size, err)
	}
	r := UDPResult{
		Size: size, Sent: c.Total, Received: s.Total, Overflow: s.Overflow, Lost: c.Total - s.Total,
		Packets: s.Counted, Rate: perSecond(s.Counted, s), Paused: c.Paused, Usage: usage(s, c, s),
	}
	return r, r.check(t)
}

// Stream sends bytes from client to server over that many TCP connections at once.
func Stream(ctx context.Context, t Target, connections int) (StreamResult, error) {
	if connections < 1 {
		return StreamResult{}, fmt.Errorf("%d connections: want at least one", connections)
	}
	c, s, err := sample(ctx, t, order{Work: streamSender, Count: connections}, order{Work: streamReceiver, Count: connections})
	if err != nil {
		return StreamResult{}, fmt.Errorf("tcp stream: %w", err)
	}
	r := StreamResult{
		Connections: connections, Bytes: s.Counted, Rate: perSecond(s.Counted, s), PerConnection: s.Each,
		Sent: c.Total, Retransmitted: c.Resent, Usage: usage(s, c, s),
	}
	if c.Total != s.Total {
		return r, unmeasured("tcp stream: %d bytes were sent and %d received", c.Total, s.Total)
	}
	for i, n := range r.PerConnection {
		if n == 0 {
			return r, unmeasured("tcp stream: connection %d of %d carried nothing", i+1, connections)
		}
	}
	return r, r.Usage.check("tcp stream", t)
}

// RequestResponse sends 64 bytes over an open TCP connection, waits for as many in return, and so on.
func RequestResponse(ctx context.Context, t Target) (LatencyResult, error) {
	c, s, err := sample(ctx, t, order{Work: requester}, order{Work: responder, Count: 1})
	if err != nil {
		return LatencyResult{}, fmt.Errorf("tcp request-response: %w", err)
	}
	r := LatencyResult{
		Total: c.Total, Transactions: c.Counted, Rate: perSecond(c.Counted, c), Histogram: c.Histogram, Usage: usage(c, c, s),
		P50: c.Histogram.Quantile(0.5), P99: c.Histogram.Quantile(0.99), P999: c.Histogram.Quantile(0.999), Max: c.Histogram.Max(),
	}
	if r.Transactions < minTransactions {
		return r, unmeasured("tcp request-response: %d transactions in %s say nothing about the slowest of a thousand", r.Transactions, r.Usage.Window)
	}
	return r, r.Usage.check("tcp request-response", t)
}

// Connect opens a TCP connection, sends a request, reads the answer to its end, closes, and so on, 16 at a time. It ends
// after ConnectionsPerSample counted connections at the latest.
func Connect(ctx context.Context, t Target) (ConnectResult, error) {
	c, s, err := sample(ctx, t, order{Work: connector, Ports: connectPorts}, order{Work: acceptor, Ports: connectPorts})
	if err != nil {
		return ConnectResult{}, fmt.Errorf("tcp connections: %w", err)
	}
	r := ConnectResult{
		Total: c.Total, Connections: c.Counted, Rate: perSecond(c.Counted, c), Concurrent: connectAtOnce,
		Resent: c.Resent, Usage: usage(c, c, s),
	}
	if r.Connections == 0 {
		return r, unmeasured("tcp connections: none was completed in %s", r.Usage.Window)
	}
	if r.Resent*lossLimit > r.Total {
		return r, unmeasured("tcp connections: %d segments of %d connections had to be sent again; is a connection table full on the way?", r.Resent, r.Total)
	}
	return r, r.Usage.check("tcp connections", t)
}

// NewFlows sends datagrams of which each is a flow of its own, and is answered. It ends after FlowsPerSample flows at the
// latest, so that many samples fit into a table of flows that lives on for minutes. The warm-up is a number of flows, not
// Target.Warmup.
func NewFlows(ctx context.Context, t Target) (FlowResult, error) {
	c, s, err := sample(ctx, t, order{Work: flowOpener, Ports: flowPorts, Count: flowsBefore + FlowsPerSample},
		order{Work: flowAnswerer, Ports: flowPorts})
	if err != nil {
		return FlowResult{}, fmt.Errorf("new flows: %w", err)
	}
	r := FlowResult{
		Total: c.Total, Flows: c.Counted, Rate: perSecond(c.Counted, c), Window: c.Measured, Lost: c.Lost, Usage: usage(c, c, s),
	}
	if r.Flows == 0 || r.Lost*lossLimit > r.Total {
		return r, unmeasured("new flows: %d of %d were not answered", r.Lost, r.Total)
	}
	return r, r.Usage.check("new flows", t)
}

// Held is a number of flows that are kept open.
type Held struct {
	session *session
	want    int
	live    int
}

// HoldFlows opens n UDP flows, each answered once, and keeps their sockets open. Nothing is sent after that but by Refresh.
// Of the Target only the two ends count. When ctx ends, so do the flows' sockets.
func HoldFlows(ctx context.Context, t Target, n int) (*Held, error) {
	if n < 1 {
		return nil, fmt.Errorf("hold %d flows: want at least one", n)
	}
	ends, err := begin(ctx, t, order{Work: flowHolder, Ports: flowPorts, Count: n}, order{Work: flowAnswerer, Ports: flowPorts})
	if err != nil {
		return nil, fmt.Errorf("hold %d flows: %w", n, err)
	}
	h := &Held{session: ends, want: n}
	if err := h.used(ctx); err != nil {
		ends.end()
		return nil, err
	}
	return h, nil
}

// Live is how many of the flows were answered when they were last used.
func (h *Held) Live() int { return h.live }

// Refresh sends one datagram on each flow and waits for the answers. A flow that nobody uses is forgotten after 30 s by
// netfilter, after a minute or more by this project.
func (h *Held) Refresh(ctx context.Context) error {
	if err := h.session.client.tell(message{Refresh: true}); err != nil {
		return fmt.Errorf("use %d flows again: %w", h.want, err)
	}
	return h.used(ctx)
}

// used waits until the flows have been used.
func (h *Held) used(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 6*patience, unmeasured("the flows were not all answered within %s", 6*patience))
	defer cancel()
	r, err := h.session.client.next(ctx)
	if err != nil {
		return fmt.Errorf("hold %d flows: %w", h.want, h.session.blame(err))
	}
	if h.live = r.Live; h.live != h.want {
		return unmeasured("hold %d flows: only %d were answered", h.want, h.live)
	}
	return nil
}

// Close ends both ends and waits until they are gone. The dataplane remembers the flows for as long as it does.
func (h *Held) Close() error {
	h.session.end()
	return nil
}
