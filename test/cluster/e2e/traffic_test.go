package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// traffic runs between a pod and others until it ends, and counts what is lost.
type traffic struct {
	stop  chan struct{}
	once  sync.Once
	flows sync.WaitGroup

	mu     sync.Mutex
	lost   []string
	counts map[string]int
	worst  map[string]time.Duration
}

// answerLimit is how long an answer may take. Two processors run a whole cluster: a second is not yet a loss.
const answerLimit = 10 * time.Second

// dense is how often datagrams are sent, sparse how often while the processors have other work.
const (
	dense  = 5 * time.Millisecond
	sparse = 20 * time.Millisecond
)

// path is how a client reaches a server.
type path struct {
	what string
	from dialer
	to   target
}

// pathTo is the path to a pod, or to the world, by its own address.
func pathTo(what string, from dialer, addr netip.Addr) path {
	return path{what, from, target{at(addr, cluster.HTTPPort), at(addr, cluster.UDPPort)}}
}

// startTraffic starts on each path: UDP datagrams in one flow, requests in one TCP connection, and new flows of both.
func startTraffic(t *testing.T, paths ...path) *traffic {
	t.Helper()
	return startTrafficAt(t, dense, paths...)
}

func startTrafficAt(t *testing.T, every time.Duration, paths ...path) *traffic {
	t.Helper()
	tr := newTraffic(t)
	for _, w := range paths {
		tr.moving(t, every, w)
		tr.connection(t, w)
	}
	return tr
}

// moving keeps busy what may go to another backend with each message: datagrams in one flow, and new flows.
func (tr *traffic) moving(t *testing.T, every time.Duration, w path) {
	t.Helper()
	datagrams, err := w.from.Dial(t.Context(), "udp", w.to.udp)
	if err != nil {
		t.Fatal(err)
	}
	tr.repeat("datagrams to "+w.what, every, datagrams, echo)
	tr.anew(t, w)
}

// anew keeps busy what begins with each message.
func (tr *traffic) anew(t *testing.T, w path) {
	t.Helper()
	tr.newConnections(t, 100*time.Millisecond, w)
	// A message that is under way when all ends is answered nonetheless.
	ctx := context.WithoutCancel(t.Context())
	tr.repeat("first datagrams to "+w.what, 100*time.Millisecond, nil, func(_ net.Conn, message string) error {
		err := sendAnew(ctx, w.from, w.to.udp, message)
		// A node's socket, to an endpoint that has just ceased to serve, is told so by what it does next: it reads, or writes.
		if errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.EDESTADDRREQ) {
			err = sendAnew(ctx, w.from, w.to.udp, message)
		}
		return err
	})
}

// newConnections opens one after the other; it returns by which name they are counted.
func (tr *traffic) newConnections(t *testing.T, every time.Duration, w path) (name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	name = "new connections to " + w.what
	tr.repeat(name, every, nil, func(_ net.Conn, message string) error {
		return connectAnew(ctx, w.from, w.to.tcp, message)
	})
	return name
}

func newTraffic(t *testing.T) *traffic {
	tr := &traffic{stop: make(chan struct{}), counts: map[string]int{}, worst: map[string]time.Duration{}}
	t.Cleanup(func() { tr.lostAtLast() })
	return tr
}

// connection keeps one connection busy.
func (tr *traffic) connection(t *testing.T, w path) {
	t.Helper()
	conn, err := w.from.Dial(within(t, answerLimit), "tcp", w.to.tcp)
	if err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(conn)
	tr.repeat("one connection to "+w.what, 20*time.Millisecond, conn, func(conn net.Conn, message string) error {
		return request(conn, reader, message)
	})
}

func at(addr netip.Addr, port uint16) string { return netip.AddrPortFrom(addr, port).String() }

// repeat exchanges one message after the other, and notes each that has begun. A connection that broke is not tried again.
func (tr *traffic) repeat(name string, every time.Duration, conn net.Conn, once func(net.Conn, string) error) {
	tr.mu.Lock()
	tr.counts[name] = 0 // one that never gets an answer is to be seen
	tr.mu.Unlock()
	tr.flows.Go(func() {
		if conn != nil {
			defer conn.Close()
		}
		tick := time.NewTicker(every)
		defer tick.Stop()
		for i := 0; ; i++ {
			started := time.Now()
			err := once(conn, strconv.Itoa(i))
			tr.note(name, started, err)
			if err != nil && strings.HasPrefix(name, "one connection") {
				return
			}
			<-tick.C
			select {
			case <-tr.stop:
				return
			default:
			}
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
	lost := tr.lostAtLast()
	for name, count := range tr.counts {
		if count < 5 {
			t.Errorf("%s: only %d exchanges, which shows nothing", name, count)
		}
		t.Logf("%s: %d exchanges, the longest took %v", name, count, tr.worst[name].Round(time.Millisecond))
	}
	if len(lost) > 0 {
		t.Errorf("%d exchanges were lost:\n%s", len(lost), strings.Join(lost, "\n"))
	}
}

// lostAtLast stops the traffic, waits for the answers that are due, and tells what was lost.
func (tr *traffic) lostAtLast() []string {
	tr.once.Do(func() { close(tr.stop) })
	tr.flows.Wait()
	return tr.lost
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
	return exchangeBy(time.Now().Add(answerLimit), conn, command)
}

func exchangeBy(end time.Time, conn net.Conn, command string) (string, error) {
	if err := conn.SetDeadline(end); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte(command)); err != nil {
		return "", err
	}
	buffer := make([]byte, 100)
	n, err := conn.Read(buffer)
	return string(buffer[:n]), err
}

// askUDP sends one datagram from a new port and returns the answer, if there is one before the context ends.
func askUDP(ctx context.Context, from dialer, to, command string) (string, error) {
	conn, err := from.Dial(ctx, "udp", to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return exchangeBy(ending(ctx), conn, command)
}

// request asks for an echo over an open connection.
func request(conn net.Conn, reader *bufio.Reader, message string) error {
	body, err := get(conn, reader, "/echo?msg="+message)
	if err == nil && body != message {
		err = fmt.Errorf("the answer to %q is %q", message, body)
	}
	return err
}

// ending is when a context ends; one without end is given the time that an answer may take.
func ending(ctx context.Context) time.Time {
	if end, bounded := ctx.Deadline(); bounded {
		return end
	}
	return time.Now().Add(answerLimit)
}

// get asks an HTTP server over an open connection.
func get(conn net.Conn, reader *bufio.Reader, path string) (string, error) {
	return getBy(time.Now().Add(answerLimit), conn, reader, path)
}

func getBy(end time.Time, conn net.Conn, reader *bufio.Reader, path string) (string, error) {
	if err := conn.SetDeadline(end); err != nil {
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
	return askFor(ctx, answerLimit, from, to, path)
}

// askFor gives the connection and the answer some time each.
func askFor(ctx context.Context, limit time.Duration, from dialer, to, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return getBy(time.Now().Add(limit), conn, bufio.NewReader(conn), path)
}

func connectAnew(ctx context.Context, from dialer, to, message string) error {
	body, err := ask(ctx, from, to, "/echo?msg="+message)
	if err == nil && body != message {
		err = fmt.Errorf("the answer to %q is %q", message, body)
	}
	return err
}

func sendAnew(ctx context.Context, from dialer, to, message string) error {
	conn, err := from.Dial(ctx, "udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	return echo(conn, message)
}

// nearAndWorld are paths that the other nodes have no part in.
func nearAndWorld(s *standing) []path {
	return []path{pathTo("the same node", s.client, s.near.Addr), pathTo("the world", s.client, s.World())}
}

// direct are paths of all kinds, but that nothing on them is a Service's.
func direct(s *standing) []path {
	return append(nearAndWorld(s), pathTo("another node", s.client, s.far.Addr), pathTo("the world from another node", s.far, s.World()))
}

// everywhere are paths of all kinds. Those by a Service lead to a pod that nobody speaks to otherwise: to the same pod from the
// same port, by chance, would be another story.
func everywhere(s *standing) []path {
	return append(direct(s), path{"a Service", s.client, s.behind.byAddr}, path{"a Service of another node", s.far, s.behind.byAddr},
		path{"a Service from the world", s.Fabric, s.behind.byPorts})
}

// undisturbed is undisturbedOn everywhere, in each family.
func undisturbed(t *testing.T, s *standing, f func()) {
	t.Helper()
	undisturbedOn(t, s, slices.Concat(everywhere(s), overOthers(t, s)), f)
}

// undisturbedOn is undisturbedAt with dense traffic.
func undisturbedOn(t *testing.T, s *standing, paths []path, f func()) {
	t.Helper()
	undisturbedAt(t, s, dense, paths, f)
}

// undisturbedAt runs traffic on each path while f runs, and a second before and after. Nothing may be lost, and nothing
// dropped.
func undisturbedAt(t *testing.T, s *standing, every time.Duration, paths []path, f func()) {
	t.Helper()
	before := unforeseenDrops(t, s)
	tr := startTrafficAt(t, every, paths...)
	// What follows has to meet traffic at work, and to show what comes late.
	time.Sleep(time.Second)
	f()
	time.Sleep(time.Second)
	tr.lostAtLast()
	after := unforeseenDrops(t, s)
	tr.excuse(t, before, after)
	tr.end(t)
	if !maps.Equal(before, after) {
		t.Errorf("dropped %v, before %v", after, before)
	}
}

// excuse takes a first datagram off what was lost for each that the programs have dropped on its way to a tunnel's port, and adds it to the
// drops before. kube-proxy masquerades to any port (--random-fully), rarely the tunnel's: the answer looks like an outer packet, and
// a node's kernel would take it for one.
func (tr *traffic) excuse(t *testing.T, before, after map[string]float64) {
	t.Helper()
	for what, packets := range after {
		for strings.HasSuffix(what, " TUNNEL_PORT") && before[what] < packets {
			i := slices.IndexFunc(tr.lost, isFirstDatagram)
			if i < 0 {
				return
			}
			t.Logf("kube-proxy has masqueraded to the tunnel's port: %s", tr.lost[i])
			tr.lost = slices.Delete(tr.lost, i, i+1)
			before[what]++
		}
	}
}

func isFirstDatagram(line string) bool { return strings.Contains(line, " first datagrams to ") }

// What proves that nothing is lost must see a loss, however late it comes.
func TestLossesAreSeen(t *testing.T) {
	s := running(t)
	tr := startTraffic(t, pathTo("another node", s.client, s.far.Addr))
	time.Sleep(time.Second)
	rule := []string{"INPUT", "-p", "udp", "--dport", strconv.Itoa(cluster.UDPPort), "-j", "DROP"}
	if _, err := s.far.Run(t.Context(), append([]string{"iptables", "-A"}, rule...)...); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	lost := tr.lostAtLast()
	if _, err := s.far.Run(t.Context(), append([]string{"iptables", "-D"}, rule...)...); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"datagrams to", "first datagrams to"} {
		if !slices.ContainsFunc(lost, func(line string) bool { return strings.Contains(line, " "+name) }) {
			t.Errorf("%s: no loss was seen: %q", name, lost)
		}
	}
	seen := len(lost)
	tr.excuse(t, map[string]float64{"n TUNNEL_PORT": 2}, map[string]float64{"n TUNNEL_PORT": 3, "n INVALID": 9})
	if excused := seen - len(tr.lost); excused != 1 {
		t.Errorf("%d losses are excused by one datagram to the tunnel's port", excused)
	}
}
