package load

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A hello is shorter than the shortest datagram, and the longest is still one packet on an Ethernet.
	minDatagram, maxDatagram = 16, 1452
	helloLimit               = 2 * time.Second

	// udpBatch datagrams go into one system call, udpWindow at most are between sender and receiver: fewer than the 1000 packets that
	// the kernel lets wait for a CPU (net.core.netdev_max_backlog), so that no queue on the way can be full.
	udpBatch, udpWindow = 64, 960
	// The receiver's nap is a tenth of the time in which the window fills on a fast machine.
	udpReceiverNap, udpSenderNap = 100 * time.Microsecond, 50 * time.Microsecond
	// udpGiveUp is how long the receiver must see nothing for what is missing to be lost: many naps.
	udpGiveUp = 2 * time.Millisecond
)

// hello makes a socket for datagrams and asks the server for a first answer, so that neighbours are known, the flow is one that was answered, and a path
// that does not carry anything is found out before the sample.
func (e *end) hello() (fd int, err error) {
	if fd, err = e.open(unix.SOCK_DGRAM); err != nil {
		return fd, err
	}
	var answer [8]byte
	for deadline := e.now() + helloLimit; e.now() < deadline && !e.stopped.Load(); {
		if _, err = write(fd, []byte("hello")); err != nil {
			nap(longNap)
		} else if _, err = read(fd, answer[:]); err == nil {
			return fd, nil
		}
	}
	unix.Close(fd)
	return -1, fmt.Errorf("the server did not answer a first datagram within %s: %w", helloLimit, err)
}

func sendDatagrams(e *end, size int) error {
	fd, err := e.hello()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	batch := newBatch(udpBatch, size)
	e.start()
	for e.tick() != over {
		if !e.room() {
			continue
		}
		if err := send(fd, batch.messages); err != nil {
			return fmt.Errorf("send datagram %d: %w", e.total+1, err)
		}
		e.total += udpBatch
		e.sent.Store(e.total)
	}
	return nil
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
	in := newBatch(udpBatch, size+1).named()
	close(e.listening)
	for quiet := e.now(); ; nap(udpReceiverNap) { // quiet is since when nothing came
		n, err := in.receive(fds[0])
		for ; n > 0 && err == nil; n, err = in.receive(fds[0]) {
			before := e.total
			for i := range n {
				if int(in.messages[i].length) == size {
					e.total++
				} else if err := in.answer(fds[0], i); err != nil {
					return fmt.Errorf("answer the first datagram: %w", err)
				}
			}
			e.received.Store(e.total)
			if e.tick() == measuring {
				e.counted += e.total - before
			}
			quiet = e.now()
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if e.tick() == over && (e.stopped.Load() || e.done.Load() && (e.total == e.sent.Load() || e.now()-quiet > 5*longNap)) {
			return nil
		}
	}
}

// answer sends a datagram back to where it came from.
func (b *batch) answer(fd, i int) error {
	b.vectors[i].SetLen(int(b.messages[i].length))
	err := send(fd, b.messages[i:i+1])
	b.vectors[i].SetLen(len(b.payload))
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil // of an earlier one, whose sender is gone
	}
	return err
}
