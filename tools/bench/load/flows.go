package load

import (
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// FlowsPerSample bounds NewFlows: three samples within the minutes for which the flows are remembered, and 50 000 more that are held,
	// leave a table of 262 144 under the 70 % from which on entries are collected more often.
	FlowsPerSample = 28672
	// flowsBefore are opened, and not counted, before those.
	flowsBefore = 4096
)

// grid is the client's side of many flows: each of its sockets talks to each of the server's ports.
type grid struct {
	*end
	fds      []int
	last     int // flows of the last socket, which may have fewer than the others
	out, in  *batch
	opened   uint64 // flows on which something was sent
	asked    int    // sockets on which something was sent
	answered []int  // flows that were answered, by socket
}

// newGrid makes the sockets for o.Count flows. Each has a port that the kernel chooses.
func newGrid(e *end) (*grid, error) {
	sockets := (e.Count + e.Ports - 1) / e.Ports
	limit := unix.Rlimit{Cur: uint64(sockets) + 64, Max: uint64(sockets) + 64}
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err == nil && now.Cur < limit.Cur {
		limit.Max = max(limit.Max, now.Max)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			return nil, fmt.Errorf("raise the limit of open files to %d: %w", limit.Cur, err)
		}
	}
	g := &grid{end: e, last: e.Count - (sockets-1)*e.Ports, out: newBatch(e.Ports, requestSize).named(), in: newBatch(e.Ports, requestSize+1)}
	for i := range e.Ports {
		g.out.to(i, e.Address, e.Port+i)
	}
	g.answered = make([]int, sockets)
	for range sockets {
		fd, err := unix.Socket(family(e.Address), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			closeAll(g.fds)
			return nil, fmt.Errorf("make socket %d of %d: %w", len(g.fds)+1, sockets, err)
		}
		g.fds = append(g.fds, fd)
	}
	return g, nil
}

// flows is how many flows the socket i has.
func (g *grid) flows(i int) int {
	if i == len(g.fds)-1 {
		return g.last
	}
	return g.Ports
}

// ask sends one datagram on each flow of the socket i.
func (g *grid) ask(i int) error {
	g.answered[i] = 0
	for sent := 0; sent < g.flows(i); {
		rest := batch{messages: g.out.messages[sent:g.flows(i)]}
		n, errno := rest.send(g.fds[i], len(rest.messages))
		if errno != 0 {
			return fmt.Errorf("send on flow %d: %w", i*g.Ports+sent+1, errno)
		}
		sent += n
	}
	g.opened += uint64(g.flows(i))
	g.asked = max(g.asked, i+1)
	return nil
}

// collect takes the answers to what was asked on the socket i. It does not wait for long for one that is missing: that would be
// the time of many others.
func (g *grid) collect(i int) error {
	for quiet := g.now(); g.now()-quiet < int64(udpGiveUp); nap(udpSenderNap) {
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
	for deadline := g.now() + int64(helloTimeout); ; nap(longNap) {
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
		if done(old) {
			return nil
		}
	}
	return nil
}

// openFlows counts by number, not by time, where the warm-up ends: flows are fast, and few.
func openFlows(e *end) (report, error) {
	g, err := newGrid(e)
	if err != nil {
		return report{}, err
	}
	defer closeAll(g.fds)
	if err := e.introduce(); err != nil {
		return report{}, err
	}
	if !e.start() {
		return report{}, unmeasured("it was stopped")
	}
	var r report
	deadline := e.window.Load().End - e.window.Load().Begin
	collected := 0
	err = g.all(func(i int) bool {
		collected += g.flows(i)
		if e.phase == measuring {
			r.Counted += uint64(g.answered[i])
			return e.now()-e.first.at >= deadline
		}
		if collected >= flowsBefore {
			e.begin()
			e.shared.phase.Store(int32(measuring))
		}
		return false
	})
	r.Total = g.opened
	e.finish()
	e.shared.phase.Store(int32(over))
	if err != nil {
		return report{}, err
	}
	if r.Lost, err = g.missing(); err != nil {
		return report{}, err
	}
	return r, e.fill(&r)
}

// introduce proves the path on a flow of its own, and reports that the end is ready.
func (e *end) introduce() error {
	fd, err := e.open(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := hello(fd); err != nil {
		return err
	}
	return e.ready()
}

// answerFlows answers every datagram on its ports until it is stopped.
func answerFlows(e *end) (report, error) {
	fds, err := e.serve(unix.SOCK_DGRAM)
	if err != nil {
		return report{}, err
	}
	defer closeAll(fds)
	poll, err := watch(fds)
	if err != nil {
		return report{}, err
	}
	for _, fd := range fds {
		if err := bigBuffer(fd); err != nil {
			return report{}, err
		}
	}
	if err := e.ready(); err != nil {
		return report{}, err
	}
	var r report
	b := newBatch(udpBatch, requestSize).named()
	for idle := 0; !e.stopped.Load(); {
		answered, err := answerRound(fds, b)
		if err != nil {
			return report{}, err
		}
		r.Total += uint64(answered)
		e.follow()
		switch {
		case answered > 0:
			idle = 0
		case idle < 100:
			idle++
			nap(udpSenderNap)
		default: // flows are held, and another sample runs: out of its way
			poll.wait(longNap * 10)
		}
	}
	e.follow()
	if e.phase == over {
		err = e.fill(&r)
	}
	return r, err
}

// follow opens and closes the window when the other end does.
func (e *end) follow() {
	now := phase(e.shared.phase.Load())
	if now >= measuring && e.phase < measuring {
		e.begin()
	}
	if now == over && e.phase == measuring {
		e.finish()
	}
}

// answerRound sends back what has come on each socket.
func answerRound(fds []int, b *batch) (int, error) {
	sum := 0
	for _, fd := range fds {
		n, errno := b.receive(fd)
		if errno == 0 && n > 0 {
			sum += n
			for sent := 0; sent < n && errno == 0; {
				rest := batch{messages: b.messages[sent:n]}
				var more int
				more, errno = rest.send(fd, n-sent)
				sent += more
			}
		}
		if errno != 0 {
			return sum, fmt.Errorf("answer: %w", errno)
		}
	}
	return sum, nil
}

// holdFlows opens flows and keeps their sockets until it is stopped. It uses each flow again when it is told to.
func holdFlows(e *end) (report, error) {
	g, err := newGrid(e)
	if err != nil {
		return report{}, err
	}
	defer closeAll(g.fds)
	if err := e.introduce(); err != nil {
		return report{}, err
	}
	for !e.stopped.Load() {
		live, err := g.use()
		if err != nil {
			return report{}, err
		}
		if err := e.tell(report{Live: live}); err != nil {
			return report{}, err
		}
		<-e.wake // refresh, or stop
	}
	return report{}, nil
}

// use sends on all flows, and again on those of sockets that miss answers. It returns how many flows are answered.
func (g *grid) use() (live int, err error) {
	if err := g.all(func(int) bool { return false }); err != nil {
		return 0, err
	}
	for range helloTries {
		missing, err := g.missing()
		if err != nil {
			return 0, err
		}
		if live = g.Count - int(missing); missing == 0 {
			return live, nil
		}
		if err := g.again(); err != nil {
			return 0, err
		}
	}
	return live, nil
}

// again asks on the sockets that miss answers.
func (g *grid) again() error {
	for i := range g.fds {
		if g.answered[i] >= g.flows(i) {
			continue
		}
		if err := g.ask(i); err != nil {
			return err
		}
		if err := g.collect(i); err != nil {
			return err
		}
	}
	return nil
}
