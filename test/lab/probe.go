package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Probe is one question to a server, and what became of it.
type Probe struct {
	// Sent is a moment before it left, Ended a moment after the answer came; zero if none did. A busy machine may take long between.
	Sent, Ended time.Time
	// By is who answered, at its own address and port; invalid when nobody did.
	By netip.AddrPort
	// Refused says that an error came back at once: the port is closed, or nobody serves it.
	Refused bool
	// Err is any other reason for which there is no answer; nil for a datagram that was lost.
	Err error
}

// Lost says that nothing came back.
func (p Probe) Lost() bool { return !p.By.IsValid() && !p.Refused }

// Probes are those of one prober, in the order in which they were sent.
type Probes []Probe

// Between are those sent in a span of time, and not answered after it.
func (p Probes) Between(from, to time.Time) (some Probes) {
	for _, probe := range p {
		if !probe.Sent.Before(from) && probe.Sent.Before(to) && probe.Ended.Before(to) {
			some = append(some, probe)
		}
	}
	return some
}

// Lost is how many were lost.
func (p Probes) Lost() (lost int) {
	for _, probe := range p {
		if probe.Lost() {
			lost++
		}
	}
	return lost
}

// Refused is how many were refused.
func (p Probes) Refused() (refused int) {
	for _, probe := range p {
		if probe.Refused {
			refused++
		}
	}
	return refused
}

// By is how many each server has answered.
func (p Probes) By() map[netip.AddrPort]int {
	by := map[netip.AddrPort]int{}
	for _, probe := range p {
		if probe.By.IsValid() {
			by[probe.By]++
		}
	}
	return by
}

// Prober asks a server at a steady rate until it is stopped.
type Prober struct {
	cancel context.CancelFunc
	all    sync.WaitGroup

	mu     sync.Mutex
	probes Probes
	asked  bool // the last question
}

// lateAnswer is how long missing answers are waited for after the last question: a busy machine may be away for most of it.
const lateAnswer = time.Second

// Stop ends it and says what became of each question.
func (p *Prober) Stop() Probes {
	p.cancel()
	p.all.Wait()
	return p.probes
}

func (p *Prober) add(sent time.Time) (number int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.probes = append(p.probes, Probe{Sent: sent})
	return len(p.probes) - 1
}

// tell completes a question that has a number; others are not ours.
func (p *Prober) tell(number uint64, answer func(*Probe)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if number < uint64(len(p.probes)) {
		answer(&p.probes[number])
	}
}

// steadily calls f at a rate until the context ends. What a busy machine has slept through it makes up for.
func steadily(ctx context.Context, rate int, f func()) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for started, calls := time.Now(), 0; ; {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for ; calls < int(now.Sub(started).Seconds()*float64(rate)) && ctx.Err() == nil; calls++ {
				f()
			}
		}
	}
}

// ProbeUDP sends numbered datagrams from one port, so many a second. A local port of 0 lets the kernel choose.
func (ns *Namespace) ProbeUDP(to netip.AddrPort, localPort uint16, rate int) (*Prober, error) {
	conn, err := ns.DialUDP(to, localPort)
	if err != nil {
		return nil, err
	}
	// What waits while a busy machine does other things is not lost on the way.
	if err := enlarge(conn); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Prober{cancel: cancel}
	p.all.Go(func() { p.hear(conn) })
	p.all.Go(func() {
		steadily(ctx, rate, func() { p.ask(conn) })
		_ = conn.SetReadDeadline(p.lastAnswer()) // ends hear
	})
	return p, nil
}

// lastAnswer is until when answers are waited for, once all is asked.
func (p *Prober) lastAnswer() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = true
	if p.probes.Lost() == 0 {
		return time.Now()
	}
	return time.Now().Add(lateAnswer)
}

// complete says whether all is asked, and nothing unanswered.
func (p *Prober) complete() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked && p.probes.Lost() == 0
}

func enlarge(conn *UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var optErr error
	err = raw.Control(func(fd uintptr) { optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20) })
	return errors.Join(err, optErr)
}

const probeSize = 64

// ProbeNumber is that of a prober's datagram: its place among the probes.
func ProbeNumber(payload []byte) (number uint64, ok bool) {
	if len(payload) != probeSize || !bytes.HasPrefix(payload, askWho) {
		return 0, false
	}
	return binary.BigEndian.Uint64(payload[seenLength:]), true
}

func (p *Prober) ask(conn *UDPConn) {
	packet := make([]byte, probeSize)
	copy(packet, askWho)
	number := p.add(time.Now())
	binary.BigEndian.PutUint64(packet[seenLength:], uint64(number))
	// A refusal of an earlier datagram ends the sending of this one: it is sent again, and which one was refused is not said.
	for range 3 {
		_, err := conn.Write(packet)
		if err == nil {
			return
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			p.refuse()
			continue
		}
		p.tell(uint64(number), func(probe *Probe) { probe.Err = err })
		return
	}
}

// refuse: a socket does not say which of its datagrams was refused. It is taken for the first since the last answer; several
// refusals may come as one.
func (p *Prober) refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := len(p.probes)
	for first > 0 && p.probes[first-1].Lost() {
		first--
	}
	if first < len(p.probes) {
		p.probes[first].Refused = true
	}
}

func (p *Prober) hear(conn *UDPConn) {
	defer conn.Close()
	packet := make([]byte, 1<<12)
	for !p.complete() {
		n, err := conn.Read(packet)
		switch {
		case errors.Is(err, unix.ECONNREFUSED):
			p.refuse()
		case err != nil:
			return
		case n > probeSize:
			if by, err := netip.ParseAddrPort(string(packet[probeSize:n])); err == nil {
				p.tell(binary.BigEndian.Uint64(packet[seenLength:]), func(probe *Probe) { probe.By, probe.Ended = by, time.Now() })
			}
		}
	}
}

// AskUDP sends one datagram from a port of the kernel's choice, and says who has answered.
func (ns *Namespace) AskUDP(ctx context.Context, to netip.AddrPort) (by netip.AddrPort, err error) {
	conn, err := ns.DialUDP(to, 0)
	if err != nil {
		return by, err
	}
	defer conn.Close()
	packet := make([]byte, probeSize)
	copy(packet, askWho)
	if err := conn.SetDeadline(deadlineOf(ctx)); err != nil {
		return by, err
	}
	if _, err := conn.Write(packet); err != nil {
		return by, err
	}
	answer := make([]byte, 2*probeSize)
	n, err := conn.Read(answer)
	if err != nil {
		return by, fmt.Errorf("UDP from %s to %s: %w", ns.name, to, err)
	}
	return netip.ParseAddrPort(string(answer[min(n, probeSize):n]))
}

// ProbeTCP opens and closes connections, so many a second, each from another port. One that isn't answered within the limit is lost.
func (ns *Namespace) ProbeTCP(to netip.AddrPort, rate int, limit time.Duration) *Prober {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Prober{cancel: cancel}
	p.all.Go(func() {
		steadily(ctx, rate, func() {
			number := p.add(time.Now())
			p.all.Go(func() { p.connect(ns, to, uint64(number), limit) })
		})
	})
	return p
}

func (p *Prober) connect(ns *Namespace, to netip.AddrPort, number uint64, limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := ns.DialTCP(ctx, to, 0)
	p.tell(number, func(probe *Probe) {
		probe.Ended = time.Now()
		switch {
		case err == nil:
			probe.By = conn.By
		case errors.Is(err, unix.ECONNREFUSED):
			probe.Refused = true
		default:
			probe.Err = err
		}
	})
	if err == nil {
		_ = conn.Conn.(*net.TCPConn).SetLinger(0) // leaves no port in TIME_WAIT
		conn.Close()
	}
}

// String says how they ended, for the message of a test that failed.
func (p Probes) String() string {
	text := fmt.Sprintf("%d probes, %d lost, %d refused, answered by %v", len(p), p.Lost(), p.Refused(), p.By())
	for _, probe := range p {
		if probe.Lost() {
			return fmt.Sprintf("%s; the first lost %v after the first, error: %v", text, probe.Sent.Sub(p[0].Sent), probe.Err)
		}
	}
	return text
}
