package load

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// flowsBefore are opened, and not counted, before those of a sample.
	flowsBefore = 4096
	flowPorts   = 16
	// flowSocketsAway is how many sockets' datagrams are on their way at a time.
	flowSocketsAway = 16
)

// grid is the client's side of many flows: each of its sockets talks to each of the server's ports.
type grid struct {
	*end
	fds      []int
	count    int
	out, in  *batch
	asked    int   // sockets on which something was sent
	answered []int // flows that were answered, by socket
}

// newGrid makes the sockets for so many flows. Each has a port that the kernel chooses.
func newGrid(e *end, count int) (*grid, error) {
	sockets := (count + e.ports - 1) / e.ports
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur < uint64(sockets)+512 {
		limit.Cur = uint64(sockets) + 512
		limit.Max = max(limit.Max, limit.Cur)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return nil, fmt.Errorf("raise the limit of open files to %d: %w", limit.Cur, err)
		}
	}
	g := &grid{end: e, count: count, answered: make([]int, sockets), out: newBatch(e.ports, requestSize).named(), in: newBatch(e.ports, requestSize+1)}
	for i := range g.out.names {
		g.out.names[i] = encode(e.Server.Addr(), e.port+i)
	}
	for range sockets {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			closeAll(g.fds)
			return nil, fmt.Errorf("make socket %d of %d: %w", len(g.fds)+1, sockets, err)
		}
		g.fds = append(g.fds, fd)
	}
	return g, nil
}

// flows is how many flows the socket i has: the last one may have fewer.
func (g *grid) flows(i int) int { return min(g.ports, g.count-i*g.ports) }

// ask sends one datagram on each flow of the socket i.
func (g *grid) ask(i int) error {
	g.answered[i] = 0
	if err := sendAll(g.fds[i], g.out.messages[:g.flows(i)]); err != nil {
		return fmt.Errorf("send on the flows of socket %d: %w", i+1, err)
	}
	g.total += uint64(g.flows(i))
	g.asked = max(g.asked, i+1)
	return nil
}

// sendAll gives all messages to the kernel, which may take them in parts.
func sendAll(fd int, messages []mmsghdr) error {
	for len(messages) > 0 {
		rest := batch{messages: messages}
		n, errno := rest.send(fd, len(messages))
		if errno != 0 {
			return errno
		}
		messages = messages[n:]
	}
	return nil
}

// collect takes the answers to what was asked on the socket i. It does not wait for long for one that is missing: that would be
// the time of many others.
func (g *grid) collect(i int) error {
	for quiet := g.now(); g.now()-quiet < udpGiveUp; nap(udpSenderNap) {
		before := g.answered[i]
		if err := g.take(i); err != nil || g.answered[i] >= g.flows(i) {
			return err
		}
		if g.answered[i] > before {
			quiet = g.now()
		}
	}
	return nil
}

// take counts the answers that are there.
func (g *grid) take(i int) error {
	n, errno := g.in.receive(g.fds[i])
	if errno != 0 {
		return fmt.Errorf("receive on socket %d: %w", i+1, errno)
	}
	g.answered[i] += n
	return nil
}

// missing waits a while for the answers that did not come in time, and returns how many never did.
func (g *grid) missing() (uint64, error) {
	for deadline := g.now() + helloTimeout; ; nap(longNap) {
		missing := 0
		for i := range g.asked {
			if g.answered[i] < g.flows(i) {
				if err := g.take(i); err != nil {
					return 0, err
				}
			}
			missing += max(g.flows(i)-g.answered[i], 0)
		}
		if missing == 0 || g.now() > deadline {
			return uint64(missing), nil
		}
	}
}

// all asks on all sockets and collects the answers, with some on their way at a time. After each socket it calls done with
// its number, and ends when that says so.
func (g *grid) all(done func(i int) bool) error {
	for i := range len(g.fds) + flowSocketsAway {
		if i < len(g.fds) {
			if err := g.ask(i); err != nil {
				return err
			}
		}
		old := i - flowSocketsAway
		if old < 0 {
			continue
		}
		if err := g.collect(old); err != nil {
			return err
		}
		if done(old) || g.stopped.Load() {
			return nil
		}
	}
	return nil
}

// openFlows counts by number, not by time, where the warm-up ends: flows are fast, and few.
func openFlows(e *end) error {
	g, err := newGrid(e, flowsBefore+FlowsPerSample)
	if err != nil {
		return err
	}
	defer closeAll(g.fds)
	if err := e.introduce(); err != nil {
		return err
	}
	collected := 0
	err = g.all(func(i int) bool {
		collected += g.flows(i)
		if e.phase == measuring {
			e.counted += uint64(g.answered[i])
			return e.now()-e.first.at >= e.Duration
		}
		if collected >= flowsBefore {
			e.begin()
			e.sample.phase.Store(int32(measuring))
		}
		return false
	})
	if e.phase == measuring {
		e.finish()
	}
	e.sample.phase.Store(int32(over))
	if err != nil {
		return err
	}
	if e.lost, err = g.missing(); err != nil {
		return err
	}
	return e.ended()
}

// introduce proves the path on a flow of its own.
func (e *end) introduce() error {
	fd, err := e.open(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return e.hello(fd)
}

// answerFlows answers every datagram on its ports until the client is done.
func answerFlows(e *end) error {
	fds, err := e.serve(unix.SOCK_DGRAM, flowPorts)
	if err != nil {
		return err
	}
	defer closeAll(fds)
	for _, fd := range fds {
		if err := bigBuffer(fd); err != nil {
			return err
		}
	}
	e.listens()
	b := newBatch(udpBatch, requestSize).named()
	for !e.done.Load() && !e.stopped.Load() {
		answered := 0
		for _, fd := range fds {
			n, errno := b.receive(fd)
			if errno != 0 {
				return fmt.Errorf("receive: %w", errno)
			}
			answered += n
			if err := sendAll(fd, b.messages[:n]); err != nil {
				return fmt.Errorf("answer: %w", err)
			}
		}
		e.total += uint64(answered)
		e.follow()
		if answered == 0 {
			nap(udpSenderNap)
		}
	}
	e.follow()
	return e.ended()
}
