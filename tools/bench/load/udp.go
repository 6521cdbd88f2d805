package load

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// hello asks the server for a first answer, so that neighbours are known, the flow is one that was answered, and a path that does
// not carry anything is found out before the sample.
func hello(fd int) error {
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(helloTimeout)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	var answer [8]byte
	var err error
	for range helloTries {
		if _, err = unix.Write(fd, []byte("hello")); err != nil {
			continue
		}
		if _, err = unix.Read(fd, answer[:]); err == nil {
			return nil
		}
	}
	return fmt.Errorf("the server did not answer the first datagram, sent %d times: %w", helloTries, err)
}

// sender is what the sending loop knows.
type sender struct {
	*end
	fd     int
	batch  *batch
	sent   uint64
	lost   uint64 // taken for lost, so that the sender does not wait for them
	paused time.Duration
}

func sendDatagrams(e *end) (report, error) {
	fd, err := e.open(unix.SOCK_DGRAM)
	if err != nil {
		return report{}, err
	}
	defer unix.Close(fd)
	if err := hello(fd); err != nil {
		return report{}, err
	}
	s := &sender{end: e, fd: fd, batch: newBatch(udpBatch, e.Size)}
	if err := e.ready(); err != nil {
		return report{}, err
	}
	if !e.start() {
		return report{}, unmeasured("it was stopped")
	}
	for e.tick() != over {
		if !s.room() {
			continue
		}
		n, errno := s.batch.send(fd, udpBatch)
		if errno != 0 {
			return report{}, fmt.Errorf("send datagram %d: %w", s.sent+1, errno)
		}
		s.sent += uint64(n)
		e.shared.sent.Store(s.sent)
	}
	e.shared.done.Store(true)
	r := report{Total: s.sent, Paused: s.paused}
	return r, e.fill(&r)
}

// room says whether the receiver is near enough for another batch, after a nap if it is not.
func (s *sender) room() bool {
	received := s.shared.received.Load()
	if int64(s.sent-received-s.lost)+udpBatch <= udpWindow {
		return true
	}
	before := s.now()
	for s.shared.received.Load() == received {
		nap(udpSenderNap)
		if s.now()-before > int64(udpGiveUp) { // nothing is on the way any more
			s.lost = s.sent - received
			break
		}
	}
	if s.phase == measuring {
		s.paused += time.Duration(s.now() - before)
	}
	return false
}

func receiveDatagrams(e *end) (report, error) {
	e.Ports = 1
	fds, err := e.serve(unix.SOCK_DGRAM)
	if err != nil {
		return report{}, err
	}
	defer closeAll(fds)
	if err := bigBuffer(fds[0]); err != nil {
		return report{}, err
	}
	in := newBatch(udpBatch, e.Size+1).named()
	if err := e.ready(); err != nil {
		return report{}, err
	}
	var r report
	var quiet int64 // since when nothing came
	for {
		n, errno := in.receive(fds[0])
		if errno != 0 {
			return report{}, fmt.Errorf("receive: %w", errno)
		}
		taken := r.Total
		for i := range n {
			if int(in.messages[i].length) == e.Size {
				r.Total++
			} else if err := answerHello(fds[0], in, i); err != nil {
				return report{}, err
			}
		}
		e.shared.received.Store(r.Total)
		now := e.tick()
		if now == measuring {
			r.Counted += r.Total - taken
		}
		if n > 0 {
			quiet = e.now()
			continue
		}
		if now == over && e.shared.done.Load() &&
			(r.Total == e.shared.sent.Load() || e.now()-quiet > int64(5*longNap)) {
			break
		}
		nap(udpReceiverNap)
	}
	if r.Overflow, err = overflown(fds[0]); err != nil {
		return report{}, err
	}
	return r, e.fill(&r)
}

func answerHello(fd int, in *batch, i int) error {
	one := batch{messages: in.messages[i : i+1]}
	in.vectors[i].SetLen(int(in.messages[i].length))
	_, errno := one.send(fd, 1)
	in.vectors[i].SetLen(len(in.payload))
	if errno != 0 {
		return fmt.Errorf("answer the first datagram: %w", errno)
	}
	return nil
}
