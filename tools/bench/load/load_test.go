package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == WorkerCommand {
		os.Exit(Worker())
	}
	if target := os.Getenv(parentOfSample); target != "" {
		os.Exit(longSample(target))
	}
	os.Exit(m.Run())
}

// parentOfSample is the variable that makes the test's executable take a sample, and do nothing else.
const parentOfSample = "LOAD_TEST_PARENT_OF_SAMPLE"

func longSample(text string) int {
	var target Target
	if err := json.Unmarshal([]byte(text), &target); err != nil {
		return 2
	}
	if _, err := Stream(context.Background(), target, 1); err != nil {
		return 1
	}
	return 0
}

// again takes a sample that the machine's other work may spoil up to five times. That this work took CPU time changes the
// figures, and nothing that is tested here.
func again[T any](t *testing.T, take func() (T, error)) T {
	t.Helper()
	var result T
	var err error
	for range 5 {
		if result, err = take(); !errors.Is(err, ErrNotMeasured) {
			break
		}
		t.Log(err)
		if errors.Is(err, ErrStarved) {
			return result
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// timely is the error of a sample, or that its window is not as long as was asked for. How long an end waited for its CPU inside the window is
// known, and may be missing; how long it did so before it could open it is not, and another sample has a better chance.
func timely(target Target, u Usage, err error) error {
	if err != nil && !errors.Is(err, ErrStarved) {
		return err
	}
	allowed := target.Duration/10 + u.Client.Delayed + u.Server.Delayed + tick
	for _, cpu := range []int{target.ClientCPU, target.ServerCPU} {
		if cpu < len(u.CPUs) {
			allowed += u.CPUs[cpu].Steal
		}
	}
	if off := (u.Window - target.Duration).Abs(); off > allowed {
		return unmeasured("window of %s, want %s within %s", u.Window, target.Duration, allowed)
	}
	return err
}

func checkBusy(t *testing.T, u Usage) {
	t.Helper()
	if len(u.CPUs) != runtime.NumCPU() {
		t.Errorf("times of %d CPUs, want %d", len(u.CPUs), runtime.NumCPU())
	}
	for name, p := range map[string]Process{"client": u.Client, "server": u.Server} {
		if busy := p.Busy(); busy <= 0 || busy > u.Window+50*time.Millisecond {
			t.Errorf("the %s was busy for %s of %s", name, busy, u.Window)
		}
	}
}

func TestUDP(t *testing.T) {
	target := pair(t)
	for _, size := range []int{64, 1400} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			var before, after uint64
			r := again(t, func() (UDPResult, error) {
				before = received(t, target.Server)
				r, err := UDP(t.Context(), target, size)
				after = received(t, target.Server)
				return r, timely(target, r.Usage, err)
			})
			t.Logf("%+v", r)
			checkBusy(t, r.Usage)
			if r.Lost != 0 || r.Sent != r.Received {
				t.Errorf("%d sent, %d received, %d lost; a veth pair loses nothing", r.Sent, r.Received, r.Lost)
			}
			// The interface also saw a hello, and some of ARP and IPv6.
			if after-before < r.Sent || after-before > r.Sent+50 {
				t.Errorf("the interface received %d packets, and %d were sent", after-before, r.Sent)
			}
			if want := float64(r.Packets) / r.Usage.Window.Seconds(); r.Rate != want || r.Packets > r.Received {
				t.Errorf("rate %.0f of %d packets in %s, want %.0f", r.Rate, r.Packets, r.Usage.Window, want)
			}
		})
	}
}

func TestStream(t *testing.T) {
	target := pair(t)
	for _, connections := range []int{1, 4} {
		r := again(t, func() (StreamResult, error) {
			r, err := Stream(t.Context(), target, connections)
			return r, timely(target, r.Usage, err)
		})
		t.Logf("%+v", r)
		checkBusy(t, r.Usage)
		var sum uint64
		for _, n := range r.PerConnection {
			sum += n
		}
		if sum != r.Bytes || r.Bytes == 0 || r.Bytes > r.Sent {
			t.Errorf("%d bytes in the window, %d by connection, %d in all", r.Bytes, sum, r.Sent)
		}
	}
}

// requestResponse takes samples that are longer and longer, until one has the thousand transactions that it wants, slow as they may be.
func requestResponse(t *testing.T, target Target) LatencyResult {
	t.Helper()
	target.Duration /= 2
	return again(t, func() (LatencyResult, error) {
		target.Duration *= 2
		r, err := RequestResponse(t.Context(), target)
		return r, timely(target, r.Usage, err)
	})
}

func TestRequestResponse(t *testing.T) {
	target := pair(t)
	r := requestResponse(t, target)
	t.Logf("%d transactions, %.0f/s, p50 %s p99 %s p99.9 %s max %s %+v", r.Transactions, r.Rate, r.P50, r.P99, r.P999, r.Max, r.Usage)
	checkBusy(t, r.Usage)
	if r.Histogram.Total() != r.Transactions || r.Total < r.Transactions {
		t.Errorf("%d transactions, %d of them in the window, %d in the histogram", r.Total, r.Transactions, r.Histogram.Total())
	}
	if r.P50 <= 0 || r.P50 > r.P99 || r.P99 > r.P999 || r.P999 > r.Max {
		t.Errorf("p50 %s p99 %s p99.9 %s max %s are not in order", r.P50, r.P99, r.P999, r.Max)
	}
	if mean := time.Duration(float64(time.Second) / r.Rate); r.P50 > 2*mean {
		t.Errorf("half of the transactions took %s or more, but one took %s on average", r.P50, mean)
	}
}

func TestConnect(t *testing.T) {
	target := pair(t)
	r := again(t, func() (ConnectResult, error) {
		r, err := Connect(t.Context(), target)
		return r, timely(target, r.Usage, err)
	})
	t.Logf("%+v", r)
	if r.Resent != 0 {
		t.Errorf("%d segments were sent again; a veth pair loses nothing", r.Resent)
	}
	checkBusy(t, r.Usage)
	if r.Total < r.Connections {
		t.Errorf("%d connections, %d of them in the window", r.Total, r.Connections)
	}
	for name, path := range map[string]string{"client": target.Client, "server": target.Server} {
		if left := sockets(t, path); left != 0 {
			t.Errorf("%d sockets of the %s are left", left, name)
		}
	}
}

// A sample ends before its connections fill a table that remembers them.
func TestConnectIsBounded(t *testing.T) {
	target := pair(t)
	target.Duration = time.Minute // more than a slow machine takes for them
	r := again(t, func() (ConnectResult, error) { return Connect(t.Context(), target) })
	if r.Connections < ConnectionsPerSample || r.Connections > ConnectionsPerSample+connectAtOnce*10 {
		t.Errorf("%d connections in %s, want %d", r.Connections, r.Usage.Window, ConnectionsPerSample)
	}
	checkBusy(t, r.Usage)
}

func TestNewFlows(t *testing.T) {
	target := pair(t)
	listener := tap(t, target.Server)
	var seen map[[4]byte]int
	for range 2 { // the second sample's flows are others than the first one's
		before := received(t, target.Client)
		r := again(t, func() (FlowResult, error) { return NewFlows(t.Context(), target) })
		t.Logf("%+v", r)
		answers := received(t, target.Client) - before
		if r.Flows == 0 || r.Flows > FlowsPerSample || r.Total > FlowsPerSample+flowsBefore || answers < r.Total-r.Lost {
			t.Errorf("%d flows in the window, %d in all, %d answers; want at most %d", r.Flows, r.Total, answers, FlowsPerSample)
		}
		if r.Lost != 0 {
			t.Errorf("%d of %d were lost; a veth pair loses nothing", r.Lost, r.Total)
		}
		old := seen
		if seen = tuples(t, listener, requestSize); uint64(len(seen)) < r.Total {
			t.Errorf("%d flows were opened, and %d different ones arrived", r.Total, len(seen))
		}
		for tuple, n := range seen {
			if n != 1 || old[tuple] != 0 {
				t.Fatalf("flow % x had %d datagrams, and %d in the sample before", tuple, n, old[tuple])
			}
		}
	}
}

// A path that loses one packet in fifty is not fast, however many of the others get through.
func TestLossIsRefused(t *testing.T) {
	target := pair(t)
	lossy(t, target.Server)
	var u UDPResult
	var err error
	for range 5 { // where the receiver waits for its CPU, its socket has no room, and that is said first
		if u, err = UDP(t.Context(), target, 64); u.Overflow*lossLimit <= u.Sent {
			break
		}
	}
	if !errors.Is(err, ErrNotMeasured) || errors.Is(err, ErrStarved) || !strings.Contains(err.Error(), "were lost") || u.Lost == 0 {
		t.Errorf("%d of %d datagrams were lost: %v", u.Lost, u.Sent, err)
	}
	f, err := NewFlows(t.Context(), target)
	if !errors.Is(err, ErrNotMeasured) || errors.Is(err, ErrStarved) || !strings.Contains(err.Error(), "were not answered") || f.Lost == 0 {
		t.Errorf("%d of %d flows were lost: %v", f.Lost, f.Total, err)
	}
	target.Duration = time.Second // nothing is sent again before 200 ms have passed, and a client may be late
	c, err := Connect(t.Context(), target)
	if !errors.Is(err, ErrNotMeasured) || errors.Is(err, ErrStarved) || c.Connections > 0 && c.Resent == 0 {
		t.Errorf("%d segments of %d connections were sent again: %v", c.Resent, c.Total, err)
	}
}

// everything takes one sample of each kind.
func everything(t *testing.T, target Target) {
	t.Helper()
	target.Duration, target.Warmup = 100*time.Millisecond, 20*time.Millisecond
	u := again(t, func() (UDPResult, error) { return UDP(t.Context(), target, 64) })
	if u.Lost != 0 || u.Packets == 0 {
		t.Errorf("%d datagrams, %d lost; a veth pair loses nothing", u.Packets, u.Lost)
	}
	again(t, func() (StreamResult, error) { return Stream(t.Context(), target, 2) })
	requestResponse(t, target)
	again(t, func() (ConnectResult, error) { return Connect(t.Context(), target) })
	again(t, func() (FlowResult, error) { return NewFlows(t.Context(), target) })
}

func TestOneCPU(t *testing.T) {
	target := pair(t)
	target.ServerCPU = target.ClientCPU
	everything(t, target)
}

func TestIPv6(t *testing.T) {
	target := pair(t)
	target.Address = netip.MustParseAddr("2001:db8::2")
	everything(t, target)
}

func TestHoldFlows(t *testing.T) {
	target := pair(t)
	for _, n := range []int{1, 1000, 50000} {
		before := received(t, target.Server)
		h, err := HoldFlows(t.Context(), target, n)
		if err != nil {
			t.Fatal(err)
		}
		opened := received(t, target.Server)
		if h.Live() != n || opened-before < uint64(n) {
			t.Errorf("%d flows are live, %d packets, want %d", h.Live(), opened-before, n)
		}
		if err := h.Refresh(t.Context()); err != nil {
			t.Error(err)
		}
		if again := received(t, target.Server); again-opened < uint64(n) {
			t.Errorf("%d packets refreshed %d flows", again-opened, n)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A host may have several addresses: the answer comes from the one that was asked.
func TestAnotherAddressOfTheServer(t *testing.T) {
	target := pair(t)
	target.Address = netip.MustParseAddr("192.0.2.3")
	again(t, func() (UDPResult, error) { return UDP(t.Context(), target, 64) })
}

func TestNothingAnswers(t *testing.T) {
	t.Parallel() // with the others that measure nothing
	target, elsewhere := pair(t), pair(t)
	target.Server = elsewhere.Server // whose address is that of a host without a server
	started := time.Now()
	_, err := UDP(t.Context(), target, 64)
	if err == nil || !strings.Contains(err.Error(), "did not answer") {
		t.Errorf("got %v, want the server's silence", err)
	}
	if took := time.Since(started); took > 4*time.Second {
		t.Errorf("it took %s to find out", took)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel() // with the others that measure nothing
	target := pair(t)
	target.Duration = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(300*time.Millisecond, cancel)
	started := time.Now()
	_, err := Stream(ctx, target, 2)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that the context was cancelled", err)
	}
	if took := time.Since(started); took > 2*time.Second {
		t.Errorf("it took %s to end", took)
	}
}

func TestKilledParent(t *testing.T) {
	t.Parallel() // with the others that measure nothing
	target := pair(t)
	target.Duration = time.Minute
	text, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentOfSample+"="+string(text))
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var ends []int
	for deadline := time.Now().Add(5 * time.Second); len(ends) < 2 && time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		ends = children(t, parent.Process.Pid)
	}
	before, deadline := received(t, target.Server), time.Now().Add(5*time.Second)
	for received(t, target.Server) < before+1000 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond) // until they are at work
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed
	if len(ends) != 2 {
		t.Fatalf("the sample had %d processes, want 2", len(ends))
	}
	for _, pid := range ends {
		deadline := time.Now().Add(2 * time.Second)
		for running(pid) && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
		}
		if running(pid) {
			t.Errorf("process %d lives on after its parent was killed", pid)
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}
