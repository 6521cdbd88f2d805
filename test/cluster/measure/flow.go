package measure

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// rate is how many datagrams a second a flow sends.
const rate = 1000

// drain is how long a datagram may be under way.
const drain = 500 * time.Millisecond

// flow sends numbered datagrams one way, and counts those that arrive.
type flow struct {
	sent atomic.Int64

	mu      sync.Mutex
	arrived []bool // by number
	last    time.Time
	gap     time.Duration // the longest time between two arrivals
}

// send sends at the rate until the context ends. Who comes late sends what it owes.
func (f *flow) send(ctx context.Context, conn net.Conn) error {
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	started, datagram := time.Now(), make([]byte, 8)
	for {
		for owed := int64(time.Since(started) * rate / time.Second); f.sent.Load() < owed; {
			binary.BigEndian.PutUint64(datagram, uint64(f.sent.Load()))
			if _, err := conn.Write(datagram); err != nil {
				return fmt.Errorf("send a datagram: %w", err)
			}
			f.sent.Add(1)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// receive counts until the socket is closed. With echo each datagram goes back, once, and counts as sent by that flow.
func (f *flow) receive(conn *net.UDPConn, echo *flow) error {
	buffer := make([]byte, 64)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive a datagram: %w", err)
		}
		if n != 8 {
			return fmt.Errorf("a datagram of %d bytes came from %s, want 8", n, from)
		}
		if !f.note(binary.BigEndian.Uint64(buffer), time.Now()) || echo == nil {
			continue
		}
		// In the order in which they came, without holes: the flow back has numbers of its own.
		binary.BigEndian.PutUint64(buffer, uint64(echo.sent.Load()))
		if _, err := conn.WriteToUDPAddrPort(buffer[:8], from); err != nil {
			return fmt.Errorf("send a datagram back: %w", err)
		}
		echo.sent.Add(1)
	}
}

// note says whether a datagram is one that has not arrived before.
func (f *flow) note(number uint64, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if number > 1<<24 {
		return false // nobody has sent so many
	}
	for uint64(len(f.arrived)) <= number {
		f.arrived = append(f.arrived, false)
	}
	if f.arrived[number] {
		return false
	}
	f.arrived[number] = true
	if !f.last.IsZero() {
		f.gap = max(f.gap, now.Sub(f.last))
	}
	f.last = now
	return true
}

// lost is how many datagrams have not arrived.
func (f *flow) lost() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	lost := f.sent.Load()
	for _, there := range f.arrived {
		if there {
			lost--
		}
	}
	return lost
}

func (f *flow) longestGap() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gap
}

// host is a pod, or the world.
type host struct {
	do   func(func() error) error
	addr netip.Addr
}

// roomy lets a socket keep seconds of datagrams: one that waits for a processor must not look lost.
const roomy = 8 << 20

// listen opens a socket that receives on an address of its own choice of port.
func (h host) listen() (conn *net.UDPConn, err error) {
	err = h.do(func() error {
		conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(h.addr, 0)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", h.addr, err)
	}
	return conn, enlarge(conn)
}

// dial opens a socket that sends to another's.
func (h host) dial(to net.Addr) (conn *net.UDPConn, err error) {
	err = h.do(func() error {
		conn, err = net.DialUDP("udp4", nil, to.(*net.UDPAddr))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return conn, enlarge(conn)
}

// enlarge needs no sysctl: this process is root.
func enlarge(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, roomy) })
	if err = errors.Join(err, set); err != nil {
		return fmt.Errorf("enlarge a socket's buffer: %w", err)
	}
	return nil
}
