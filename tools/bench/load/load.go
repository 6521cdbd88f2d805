package load

import (
	"context"
	"errors"
	"net/netip"
	"time"
)

// Target says between which two places a sample is taken, on which CPUs, and for how long.
type Target struct {
	Client, Server       string     // paths of network namespaces
	Address              netip.Addr // where the server is reached; any address of the server's namespace
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
	Concurrent  int // how many were under way at any time
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

// ErrNotMeasured is matched by the error of a sample that ran, and did not measure what it says. Taking it again may help.
var ErrNotMeasured = errors.New("the sample did not measure what it says")

// UDP sends datagrams with size bytes of payload in one direction, as fast as they get through.
func UDP(ctx context.Context, t Target, size int) (UDPResult, error) {
	return UDPResult{}, errors.ErrUnsupported
}

// Stream sends bytes from client to server over that many TCP connections at once.
func Stream(ctx context.Context, t Target, connections int) (StreamResult, error) {
	return StreamResult{}, errors.ErrUnsupported
}

// RequestResponse sends 64 bytes over an open TCP connection, waits for as many in return, and so on.
func RequestResponse(ctx context.Context, t Target) (LatencyResult, error) {
	return LatencyResult{}, errors.ErrUnsupported
}

// Connect opens a TCP connection, sends a request, reads the answer to its end, closes, and so on.
func Connect(ctx context.Context, t Target) (ConnectResult, error) {
	return ConnectResult{}, errors.ErrUnsupported
}

// NewFlows sends datagrams of which each is a flow of its own, and is answered. It ends after FlowsPerSample flows at the
// latest, so that many samples fit into a table of flows that lives on for minutes.
func NewFlows(ctx context.Context, t Target) (FlowResult, error) {
	return FlowResult{}, errors.ErrUnsupported
}

// Held is a number of flows that are kept open.
type Held struct{}

// HoldFlows opens n UDP flows, each answered once, and keeps their sockets open. Nothing is sent after that but by Refresh.
// Of the Target only the two ends count.
func HoldFlows(ctx context.Context, t Target, n int) (*Held, error) {
	return nil, errors.ErrUnsupported
}

// Live is how many of the flows were answered when they were last asked.
func (h *Held) Live() int { return 0 }

// Refresh sends one datagram on each flow and waits for the answers. A flow that nobody uses is forgotten after 30 s by
// netfilter, after 60 s by this project.
func (h *Held) Refresh(ctx context.Context) error { return errors.ErrUnsupported }

// Close ends both ends.
func (h *Held) Close() error { return nil }

// WorkerCommand is the first argument of a process that is one end of a sample: the executable that calls this package
// must hand over to Worker when it finds it, before anything else (its tests too, in TestMain).
const WorkerCommand = "worker"

// Worker is one end of a sample: it takes its orders from standard input. What it returns is the exit status.
func Worker() int { return 1 }
