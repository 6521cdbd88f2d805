package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// traffic runs between a pod and others until it ends, and counts what is lost.
type traffic struct {
	stop  context.CancelFunc
	flows sync.WaitGroup

	mu     sync.Mutex
	lost   []string
	counts map[string]int
	worst  map[string]time.Duration
}

// answerLimit is how long an answer may take. Two processors run a whole cluster: a second is not yet a loss.
const answerLimit = 5 * time.Second

// startTraffic starts to each target: UDP datagrams in one flow, requests in one TCP connection, and new connections.
func startTraffic(t *testing.T, from *cluster.Pod, to map[string]netip.Addr) *traffic {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	tr := &traffic{stop: stop, counts: map[string]int{}, worst: map[string]time.Duration{}}
	t.Cleanup(func() { stop(); tr.flows.Wait() })
	for name, addr := range to {
		datagrams, err := from.Dial(ctx, "udp", at(addr, cluster.UDPPort))
		if err != nil {
			t.Fatal(err)
		}
		tr.repeat(ctx, "datagrams to "+name, 5*time.Millisecond, datagrams, echo)
		requests, err := from.Dial(within(t, answerLimit), "tcp", at(addr, cluster.HTTPPort))
		if err != nil {
			t.Fatal(err)
		}
		reader := bufio.NewReader(requests)
		tr.repeat(ctx, "one connection to "+name, 10*time.Millisecond, requests, func(conn net.Conn, message string) error {
			return request(conn, reader, message)
		})
		tr.repeat(ctx, "new connections to "+name, 100*time.Millisecond, nil, func(_ net.Conn, message string) error {
			return connectAnew(ctx, from, addr, message)
		})
	}
	return tr
}

func at(addr netip.Addr, port uint16) string { return netip.AddrPortFrom(addr, port).String() }

// repeat exchanges one message after the other. A connection that broke is not tried again.
func (tr *traffic) repeat(ctx context.Context, name string, every time.Duration, conn net.Conn, once func(net.Conn, string) error) {
	tr.mu.Lock()
	tr.counts[name] = 0 // one that never gets an answer is to be seen
	tr.mu.Unlock()
	tr.flows.Go(func() {
		if conn != nil {
			defer conn.Close()
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			started := time.Now()
			err := once(conn, strconv.Itoa(i))
			if ctx.Err() != nil {
				return
			}
			tr.note(name, started, err)
			if err != nil && strings.HasPrefix(name, "one connection") {
				return
			}
			<-tick.C
		}
	})
}

func (tr *traffic) note(name string, started time.Time, err error) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.counts[name]++
	tr.worst[name] = max(tr.worst[name], time.Since(started))
	if err != nil {
		tr.lost = append(tr.lost, fmt.Sprintf("%s %s: %v", started.Format("15:04:05.000"), name, err))
	}
}

// end stops the traffic; what was lost is an error.
func (tr *traffic) end(t *testing.T) {
	t.Helper()
	tr.stop()
	tr.flows.Wait()
	for name, count := range tr.counts {
		if count < 5 {
			t.Errorf("%s: only %d exchanges, which shows nothing", name, count)
		}
		t.Logf("%s: %d exchanges, the longest took %v", name, count, tr.worst[name].Round(time.Millisecond))
	}
	if len(tr.lost) > 0 {
		t.Errorf("%d exchanges were lost:\n%s", len(tr.lost), strings.Join(tr.lost, "\n"))
	}
}

// echo sends a datagram and waits for the same back. Nothing is sent again.
func echo(conn net.Conn, message string) error {
	got, err := exchange(conn, "echo "+message)
	if err == nil && got != message {
		err = fmt.Errorf("the answer to %q is %q", message, got)
	}
	return err
}

// exchange sends a datagram and returns the answer.
func exchange(conn net.Conn, command string) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(answerLimit)); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte(command)); err != nil {
		return "", err
	}
	buffer := make([]byte, 100)
	n, err := conn.Read(buffer)
	return string(buffer[:n]), err
}

// askUDP sends one datagram from a new port and returns the answer.
func askUDP(ctx context.Context, from dialer, to, command string) (string, error) {
	conn, err := from.Dial(ctx, "udp", to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return exchange(conn, command)
}

// request asks for an echo over an open connection.
func request(conn net.Conn, reader *bufio.Reader, message string) error {
	body, err := get(conn, reader, "/echo?msg="+message)
	if err == nil && body != message {
		err = fmt.Errorf("the answer to %q is %q", message, body)
	}
	return err
}

// get asks an HTTP server over an open connection.
func get(conn net.Conn, reader *bufio.Reader, path string) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(answerLimit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: pod\r\n\r\n", path); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// dialer is a pod or a node.
type dialer interface {
	Dial(ctx context.Context, network, address string) (net.Conn, error)
	DialFrom(ctx context.Context, port uint16, network, address string) (net.Conn, error)
}

// ask connects, asks for one path, and returns the answer.
func ask(ctx context.Context, from dialer, to, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return get(conn, bufio.NewReader(conn), path)
}

func connectAnew(ctx context.Context, from dialer, to netip.Addr, message string) error {
	body, err := ask(ctx, from, at(to, cluster.HTTPPort), "/echo?msg="+message)
	if err == nil && body != message {
		err = fmt.Errorf("the answer to %q is %q", message, body)
	}
	return err
}

// nearAndWorld are targets that the other nodes have no part in.
func nearAndWorld(s *standing) map[string]netip.Addr {
	return map[string]netip.Addr{"the same node": s.near.Addr, "the world": cluster.WorldAddr}
}

// everywhere are targets of all kinds.
func everywhere(s *standing) map[string]netip.Addr {
	targets := nearAndWorld(s)
	targets["another node"] = s.far.Addr
	return targets
}

// undisturbed is undisturbedTo everywhere.
func undisturbed(t *testing.T, s *standing, f func()) {
	t.Helper()
	undisturbedTo(t, s, everywhere(s), f)
}

// undisturbedTo runs traffic from a pod to each target while f runs, and a second before and after. Nothing may be lost,
// and nothing dropped.
func undisturbedTo(t *testing.T, s *standing, targets map[string]netip.Addr, f func()) {
	t.Helper()
	before := unforeseenDrops(t, s)
	tr := startTraffic(t, s.client, targets)
	// What follows has to meet traffic at work, and to show what comes late.
	time.Sleep(time.Second)
	f()
	time.Sleep(time.Second)
	tr.end(t)
	if after := unforeseenDrops(t, s); !maps.Equal(before, after) {
		t.Errorf("dropped %v, before %v", after, before)
	}
}
