package load

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// flowsBefore are opened, and not counted, before those of a sample.
	flowsBefore = 4096
	// Each of the client's sockets has a port that the kernel chooses, and talks to each of the server's ports.
	flowPorts   = 16
	flowSockets = (flowsBefore + FlowsPerSample) / flowPorts
	// flowSocketsAway is how many sockets' datagrams are on their way at a time.
	flowSocketsAway = 16
)

// flows is the client's side of many flows.
type flows struct {
	*end

	fds      []int
	out, in  *batch
	asked    int              // sockets on which something was sent
	answered [flowSockets]int // flows that were answered, by socket
}

// openFlows counts by number, not by time, where the warm-up ends: flows are fast, and few.
func openFlows(e *end) error {
	first, err := e.hello() // which proves the path on a flow of its own
	if err != nil {
		return err
	}
	unix.Close(first)
	f := &flows{end: e, out: newBatch(flowPorts, requestSize).named(), in: newBatch(flowPorts, requestSize+1)}
	for i := range f.out.names {
		f.out.names[i] = encode(e.to(i))
	}
	defer func() { closeAll(f.fds) }()
	for range flowSockets {
		fd, err := e.newSocket(unix.SOCK_DGRAM)
		if err != nil {
			return err
		}
		f.fds = append(f.fds, fd)
	}
	for i := range flowSockets + flowSocketsAway {
		if i < flowSockets {
			if err := f.ask(i); err != nil {
				return err
			}
		}
		if i >= flowSocketsAway {
			if err := f.collect(i - flowSocketsAway); err != nil {
				return err
			}
		}
		if e.stopped.Load() || e.phase == measuring && e.now()-e.first.at >= e.Duration {
			break
		}
	}
	e.enter(over)
	return f.missing()
}

// ask sends one datagram on each flow of the socket i.
func (f *flows) ask(i int) error {
	if err := send(f.fds[i], f.out.messages); err != nil {
		return fmt.Errorf("send on the flows of socket %d: %w", i+1, err)
	}
	f.total += flowPorts
	f.asked++
	return nil
}

// collect takes and counts the answers to what was asked on the socket i. It does not wait for long for one that is missing: that would be
// the time of many others.
func (f *flows) collect(i int) error {
	for quiet := f.now(); f.answered[i] < flowPorts && f.now()-quiet < udpGiveUp; {
		before := f.answered[i]
		if err := f.take(i); err != nil {
			return err
		}
		if f.answered[i] > before {
			quiet = f.now()
		} else {
			nap(udpSenderNap)
		}
	}
	if f.phase == measuring {
		f.counted += uint64(f.answered[i])
	} else if i >= flowsBefore/flowPorts {
		f.enter(measuring)
	}
	return nil
}

// take counts the answers that are there.
func (f *flows) take(i int) error {
	n, err := f.in.receive(f.fds[i])
	if err != nil {
		return fmt.Errorf("receive on socket %d: %w", i+1, err)
	}
	f.answered[i] += n
	return nil
}

// missing waits a while for the answers that did not come in time, and counts those that never did.
func (f *flows) missing() error {
	for deadline := f.now() + 20*longNap; ; nap(longNap) {
		f.lost = 0
		for i := range f.asked {
			if f.answered[i] < flowPorts {
				if err := f.take(i); err != nil {
					return err
				}
				f.lost += uint64(flowPorts - f.answered[i])
			}
		}
		if f.lost == 0 || f.now() > deadline {
			return nil
		}
	}
}

// answerFlows answers every datagram on its ports until the client is done.
func answerFlows(e *end) error {
	fds, err := e.serve(unix.SOCK_DGRAM, flowPorts)
	if err != nil {
		return err
	}
	defer closeAll(fds)
	close(e.listening)
	b := newBatch(udpBatch, requestSize).named()
	for !e.done.Load() && !e.stopped.Load() {
		answered := 0
		for _, fd := range fds {
			n, err := b.receive(fd)
			if err == nil {
				err = send(fd, b.messages[:n])
			}
			if err != nil {
				return fmt.Errorf("answer: %w", err)
			}
			answered += n
		}
		e.tick()
		if answered == 0 {
			nap(udpSenderNap)
		}
	}
	return nil
}
