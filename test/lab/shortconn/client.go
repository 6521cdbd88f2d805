package shortconn

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// client opens connections, some at a time.
type client struct {
	*run
	Result

	poll   *poller
	to     netip.AddrPort
	name   unix.Sockaddr
	slots  []slot
	open   int
	buffer []byte
	// clock is the time of the client's own loop. While another process has the CPU it stands still, so that no stall is the machine's.
	clock time.Duration
	last  time.Time
}

// slot is a place in flight.
type slot struct {
	fd      int // 0: free
	opened  time.Duration
	greeted bool
}

// ask opens connections, so many at a time, and returns when all have completed or failed.
func (r *run) ask(atOnce int) (Result, error) {
	poll, err := newPoller()
	if err != nil {
		return Result{}, err
	}
	defer unix.Close(poll.fd)
	c := &client{run: r, Result: Result{Failures: map[string]uint64{}}, poll: poll, to: r.to(), slots: make([]slot, atOnce), buffer: make([]byte, 64), last: r.started}
	c.name = sockaddr(c.to)
	defer func() {
		for _, s := range c.slots {
			if s.fd != 0 {
				unix.Close(s.fd)
			}
		}
	}()
	more := true
	for sought := c.clock; more || c.open > 0; {
		if more {
			more = c.fill()
			if !more {
				c.Took, c.Within = time.Since(r.started), c.Completed
			}
		}
		for _, event := range c.poll.wait() {
			c.advance(&c.slots[event.Fd])
		}
		c.tick()
		if c.clock-sought > stallLimit/2 {
			sought = c.clock
			c.giveUp()
		}
		if r.stopped.Load() {
			return c.Result, nil
		}
	}
	return c.Result, nil
}

func (c *client) tick() {
	now := time.Now()
	c.clock += min(now.Sub(c.last), 2*turn*time.Millisecond)
	c.last = now
}

// fill opens a connection in each free slot, and says whether there may be more.
func (c *client) fill() bool {
	for i := range c.slots {
		if c.slots[i].fd != 0 {
			continue
		}
		if !c.more() {
			return false
		}
		c.Opened++
		if err := c.begin(i); err != nil {
			c.fail(&c.slots[i], err)
		}
	}
	return true
}

// begin opens a connection.
func (c *client) begin(i int) error {
	fd, err := newSocket(c.to, c.Way)
	if err != nil {
		return err
	}
	c.slots[i] = slot{fd: fd, opened: c.clock}
	c.open++
	if c.Way == ResetByClient {
		if err := lingerNot(fd); err != nil {
			return err
		}
	}
	if err := unix.Connect(fd, c.name); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	if c.Way == Question {
		if _, err := unix.Write(fd, c.buffer[:1]); err != nil {
			return err
		}
	}
	return c.poll.add(fd, i)
}

var (
	errEarly = errors.New("closed too early")
	errLate  = errors.New("not complete in time")
)

// advance does what the events of a connection allow.
func (c *client) advance(s *slot) {
	for s.fd != 0 {
		n, err := unix.Read(s.fd, c.buffer)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return
		case n > 0:
			s.greeted = true
			if c.Way.byClient() || c.Way == Question {
				c.complete(s)
			}
		case s.greeted && (c.Way == FinByServer && err == nil || c.Way == ResetByServer && errors.Is(err, unix.ECONNRESET)):
			c.complete(s)
		case err == nil:
			c.fail(s, errEarly)
		default:
			c.fail(s, err)
		}
	}
}

// complete closes a connection: with RST, if it does not linger.
func (c *client) complete(s *slot) {
	c.Completed++
	if c.clock-s.opened > stallLimit {
		c.Stalled++
	}
	c.free(s)
}

func (c *client) fail(s *slot, why error) {
	if c.Failed == 0 {
		c.BeforeFailure = c.Completed
	}
	c.Failed++
	c.Result.Failures[why.Error()]++
	c.failed.Add(1)
	c.free(s)
}

func (c *client) free(s *slot) {
	if s.fd != 0 {
		unix.Close(s.fd)
		c.open--
	}
	*s = slot{}
}

// giveUp fails what is not complete in time.
func (c *client) giveUp() {
	for i := range c.slots {
		if s := &c.slots[i]; s.fd != 0 && c.clock-s.opened > failLimit {
			c.fail(s, errLate)
		}
	}
}
