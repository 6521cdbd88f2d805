package load

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A hello is shorter than the shortest datagram, and the longest is still one packet on an Ethernet.
	minDatagram, maxDatagram = 16, 1472
	helloTries               = 10
	helloTimeout             = 200 * time.Millisecond

	// udpBatch datagrams go into one system call, udpWindow at most are between sender and receiver: fewer than the 1000 packets that
	// the kernel lets wait for a CPU (net.core.netdev_max_backlog), so that no queue on the way can be full.
	udpBatch, udpWindow = 64, 960
	// The receiver's nap is a tenth of the time in which the window fills on a fast machine.
	udpReceiverNap, udpSenderNap = 100 * time.Microsecond, 50 * time.Microsecond
	// udpGiveUp is how long the receiver must see nothing for what is missing to be lost: many naps.
	udpGiveUp = 2 * time.Millisecond
)

// hello asks the server for a first answer, so that neighbours are known, the flow is one that was answered, and a path that does
// not carry anything is found out before the sample.
func (e *end) hello(fd int) error {
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, timeval(helloTimeout)); err != nil {
		return fmt.Errorf("set a time limit: %w", err)
	}
	var answer [8]byte
	var err error
	for range helloTries {
		if e.stopped.Load() {
			return errStopped
		}
		if _, err = unix.Write(fd, []byte("hello")); err != nil {
			continue
		}
		if _, err = unix.Read(fd, answer[:]); err == nil {
			return nil
		}
	}
	return fmt.Errorf("the server did not answer the first datagram, sent %d times: %w", helloTries, err)
}

func sendDatagrams(e *end, size int) error {
	fd, err := e.open(unix.SOCK_DGRAM)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := e.hello(fd); err != nil {
		return err
	}
	batch := newBatch(udpBatch, size)
	e.start()
	for e.tick() != over {
		if !e.room() {
			continue
		}
		n, errno := batch.send(fd, udpBatch)
		if errno != 0 {
			return fmt.Errorf("send datagram %d: %w", e.total+1, errno)
		}
		e.total += uint64(n)
		e.sent.Store(e.total)
	}
	return e.ended()
}

// room says whether the receiver is near enough for another batch, after a nap if it is not. What does not arrive for a while is taken for
// lost, so that the sender does not wait for it.
func (e *end) room() bool {
	received := e.received.Load()
	if int64(e.total-received-e.lost)+udpBatch <= udpWindow {
		return true
	}
	before := e.now()
	for e.received.Load() == received {
		nap(udpSenderNap)
		if e.now()-before > udpGiveUp { // nothing is on the way any more
			e.lost = e.total - received
			break
		}
	}
	return false
}

func receiveDatagrams(e *end, size int) error {
	fds, err := e.serve(unix.SOCK_DGRAM, 1)
	if err != nil {
		return err
	}
	defer closeAll(fds)
	if err := bigBuffer(fds[0]); err != nil {
		return err
	}
	in := newBatch(udpBatch, size+1).named()
	e.listens()
	var quiet time.Duration // since when nothing came
	for {
		n, errno := in.receive(fds[0])
		if errno != 0 {
			return fmt.Errorf("receive: %w", errno)
		}
		before := e.total
		for i := range n {
			if int(in.messages[i].length) == size {
				e.total++
			} else if err := answerHello(fds[0], in, i); err != nil {
				return err
			}
		}
		e.received.Store(e.total)
		now := e.tick()
		if now == measuring {
			e.counted += e.total - before
		}
		if n > 0 {
			quiet = e.now()
			continue
		}
		if now == over && (e.stopped.Load() || e.done.Load() && (e.total == e.sent.Load() || e.now()-quiet > 5*longNap)) {
			break
		}
		nap(udpReceiverNap)
	}
	if e.lost, err = overflown(fds[0]); err != nil {
		return err
	}
	return e.ended()
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
