package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// numbered is a one-way stream of numbered datagrams that waits for nobody: each one that does not arrive is known by its
// number and by the time at which it was sent.
type numbered struct {
	name     string
	sender   *net.UDPConn
	receiver *net.UDPConn
	stop     chan struct{}
	sending  sync.WaitGroup
	reading  sync.WaitGroup
	sentAt   []time.Time
	failed   error
	arrived  map[uint64]bool
	last     atomic.Int64 // when something arrived, in ns
}

var pace = flag.Duration("pace", 500*time.Microsecond, "time between two datagrams of a flow that must lose none")

const numberedSize = 100

func startNumbered(t *testing.T, name string, from, to *lab.Namespace) *numbered {
	t.Helper()
	n := &numbered{name: name, stop: make(chan struct{}), arrived: map[uint64]bool{}}
	n.receiver = listenUDP(t, to, netip.AddrPortFrom(to.Addr(), 0))
	enlarge(t, n.receiver)
	port := n.receiver.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	n.sender = dialUDP(t, from, 0, netip.AddrPortFrom(to.Addr(), port))
	n.reading.Go(n.receive)
	n.sending.Go(n.send)
	t.Cleanup(n.finish)
	return n
}

// enlarge gives a socket room for what arrives while this process waits for a processor.
func enlarge(t *testing.T, conn *net.UDPConn) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var optErr error
	err = raw.Control(func(fd uintptr) {
		optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
	})
	if err := errors.Join(err, optErr); err != nil {
		t.Fatal(err)
	}
}

func (n *numbered) send() {
	tick := time.NewTicker(*pace)
	defer tick.Stop()
	packet := make([]byte, numberedSize)
	for {
		binary.BigEndian.PutUint64(packet, uint64(len(n.sentAt)))
		n.sentAt = append(n.sentAt, time.Now())
		if _, err := n.sender.Write(packet); err != nil {
			n.failed = errors.Join(n.failed, fmt.Errorf("datagram %d: %w", len(n.sentAt)-1, err))
		}
		select {
		case <-n.stop:
			return
		case <-tick.C:
		}
	}
}

func (n *numbered) receive() {
	packet := make([]byte, 2*numberedSize)
	for {
		size, err := n.receiver.Read(packet)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			lab.Drain(n.receiver, packet, n.note)
			return
		case err == nil:
			n.note(packet[:size])
		}
	}
}

func (n *numbered) note(packet []byte) {
	if len(packet) == numberedSize {
		n.arrived[binary.BigEndian.Uint64(packet)] = true
		n.last.Store(time.Now().UnixNano())
	}
}

// finish ends the sender, then the receiver once nothing has come for a while. It may be called again.
func (n *numbered) finish() {
	select {
	case <-n.stop:
		return
	default:
		close(n.stop)
	}
	n.sending.Wait()
	quiet := priv.Patience(200 * time.Millisecond)
	for time.Sleep(quiet); time.Since(time.Unix(0, n.last.Load())) < quiet; {
		time.Sleep(quiet / 10)
	}
	_ = n.receiver.SetReadDeadline(time.Now())
	n.reading.Wait()
}

// end ends the stream; a datagram that did not arrive is an error.
func (n *numbered) end(t *testing.T) {
	t.Helper()
	n.finish()
	var lost []string
	for i, at := range n.sentAt {
		if !n.arrived[uint64(i)] {
			lost = append(lost, fmt.Sprintf("%d (%s)", i, at.Format("15:04:05.000")))
		}
	}
	if len(lost) > 0 {
		t.Errorf("%s: %d of %d datagrams were lost, the first: %v", n.name, len(lost), len(n.sentAt), lost[:min(len(lost), 5)])
	}
	if n.failed != nil {
		t.Errorf("%s: sending: %v", n.name, n.failed)
	}
	if len(n.arrived) < 100 {
		t.Errorf("%s: only %d datagrams arrived: this shows nothing", n.name, len(n.arrived))
	}
}

// connections are TCP connections that have to live on: some are in use all the time, the others idle between two
// calls of assertAlive.
type connections struct {
	busy, idle []*lab.TCPConn
	stop       context.CancelFunc
	users      sync.WaitGroup
	mu         sync.Mutex
	lost       []error
}

// connect opens connections to a server.
func connect(t *testing.T, from *lab.Namespace, to netip.AddrPort, busy, idle int) *connections {
	t.Helper()
	all := make([]*lab.TCPConn, busy+idle)
	work, ctx := errgroup.WithContext(t.Context())
	work.SetLimit(8)
	for i := range all {
		work.Go(func() (err error) {
			all[i], err = from.DialTCP(ctx, to, 0)
			return err
		})
	}
	err := work.Wait()
	running, stop := context.WithCancel(t.Context())
	c := &connections{busy: all[:busy], idle: all[busy:], stop: stop}
	t.Cleanup(c.close)
	if err != nil {
		t.Fatal(err)
	}
	for _, conn := range c.busy {
		c.users.Go(func() { c.use(running, conn) })
	}
	return c
}

func (c *connections) use(ctx context.Context, conn *lab.TCPConn) {
	tick := time.NewTicker(20 * *pace)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := echo(conn, 2000); err != nil {
			c.mu.Lock()
			c.lost = append(c.lost, fmt.Errorf("busy: %w", err))
			c.mu.Unlock()
			return
		}
		<-tick.C
	}
}

// echo may take as long as TCP takes to repeat a few times what was lost: that a connection lives on is for it to say,
// whether a packet was lost for numbered.
func echo(conn *lab.TCPConn, size int) error {
	ctx, cancel := context.WithTimeout(context.Background(), priv.Patience(5*time.Second))
	defer cancel()
	return conn.Echo(ctx, size)
}

// assertAlive uses every idle connection once, and asks whether all busy ones are in use still.
func (c *connections) assertAlive(t *testing.T, when string) {
	t.Helper()
	c.mu.Lock()
	lost := append([]error{}, c.lost...)
	c.mu.Unlock()
	const enough = 5 // a dead one takes its time
	for _, conn := range c.idle {
		if err := echo(conn, 100); err != nil {
			if lost = append(lost, fmt.Errorf("idle: %w", err)); len(lost) >= enough {
				break
			}
		}
	}
	if len(lost) > 0 {
		t.Fatalf("%s: of %d busy and %d idle connections some are dead, at least %d:\n%v",
			when, len(c.busy), len(c.idle), len(lost), errors.Join(lost...))
	}
}

func (c *connections) close() {
	c.stop()
	c.users.Wait()
	for _, conn := range slices.Concat(c.busy, c.idle) {
		if conn != nil {
			conn.Close()
		}
	}
}
