package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// again takes a sample that the machine's other work may spoil up to five times. That this work took CPU time changes the
// figures, and nothing that is tested here.
func again(t *testing.T, take func() (Result, error)) (r Result) {
	t.Helper()
	var err error
	for range 5 {
		if r, err = take(); !errors.Is(err, ErrNotMeasured) {
			break
		}
		t.Log(err)
		if errors.Is(err, ErrStarved) {
			return r
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// timely is the error of a sample, or that its window is not as long as was asked for. How long an end waited for its CPU inside the window is
// known, and may be missing; how long it did so before it could open it is not, and another sample has a better chance.
func timely(target Target, u Usage, err error) error {
	if err != nil && !errors.Is(err, ErrStarved) {
		return err
	}
	allowed := target.Duration/10 + u.Client.Delayed + u.Server.Delayed + tick
	for _, stolen := range u.Stolen {
		allowed += stolen
	}
	if off := (u.Window - target.Duration).Abs(); off > allowed {
		return unmeasured("window of %s, want %s within %s", u.Window, target.Duration, allowed)
	}
	return err
}

func checkBusy(t *testing.T, u Usage) {
	t.Helper()
	for name, p := range map[string]Process{"client": u.Client, "server": u.Server} {
		if p.Busy <= 0 || p.Busy > u.Window+50*time.Millisecond {
			t.Errorf("the %s was busy for %s of %s", name, p.Busy, u.Window)
		}
	}
}

func TestUDP(t *testing.T) { inEachFamily(t, sendsDatagrams) }

func sendsDatagrams(t *testing.T, target Target) {
	t.Helper()
	for _, size := range []int{64, 1400} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			var before, after uint64
			r := again(t, func() (Result, error) {
				before = received(t, target.Server)
				r, err := UDP(t.Context(), target, size)
				after = received(t, target.Server)
				return r, timely(target, r.Usage, err)
			})
			t.Logf("%+v", r)
			checkBusy(t, r.Usage)
			if r.Lost != 0 {
				t.Errorf("%d sent, %d lost; a veth pair loses nothing", r.Sent, r.Lost)
			}
			// The interface also saw a hello, and some of ARP and IPv6.
			if after-before < r.Sent || after-before > r.Sent+50 {
				t.Errorf("the interface received %d packets, and %d were sent", after-before, r.Sent)
			}
			if want := float64(r.Counted) / r.Usage.Window.Seconds(); r.Rate != want || r.Counted > r.Sent {
				t.Errorf("rate %.0f of %d packets in %s, want %.0f", r.Rate, r.Counted, r.Usage.Window, want)
			}
		})
	}
}

// A server listens at the ports that it is given, and a client sends where it is told to: here to these ports, or past them.
func TestVia(t *testing.T) {
	target := pair(t)
	target.FirstPort, target.Ports = 8080, 2
	target.Via = netip.AddrPortFrom(target.Server.Addr(), 8080)
	again(t, func() (Result, error) { return UDP(t.Context(), target, 64) })
	again(t, func() (Result, error) { return Connect(t.Context(), target) })
	target.Via = netip.AddrPortFrom(target.Server.Addr(), 8081)
	if _, err := UDP(t.Context(), target, 64); err == nil || !strings.Contains(err.Error(), "did not answer a first datagram") {
		t.Errorf("datagrams past the server's only port: %v", err)
	}
	if _, err := Connect(t.Context(), target); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("connections past the second of two ports: %v", err)
	}
}

func TestStream(t *testing.T) { inEachFamily(t, streams) }

func streams(t *testing.T, target Target) {
	t.Helper()
	r := again(t, func() (Result, error) {
		r, err := Stream(t.Context(), target)
		return r, timely(target, r.Usage, err)
	})
	t.Logf("%+v", r)
	checkBusy(t, r.Usage)
	if r.Counted == 0 || r.Counted > r.Sent {
		t.Errorf("%d bytes in the window, %d in all", r.Counted, r.Sent)
	}
}

// requestResponse takes samples that are longer and longer, until one has the thousand transactions that it wants, slow as they may be.
func requestResponse(t *testing.T, target Target) Result {
	t.Helper()
	target.Duration /= 2
	return again(t, func() (Result, error) {
		target.Duration *= 2
		r, err := RequestResponse(t.Context(), target)
		return r, timely(target, r.Usage, err)
	})
}

func TestRequestResponse(t *testing.T) { inEachFamily(t, asks) }

func asks(t *testing.T, target Target) {
	t.Helper()
	r := requestResponse(t, target)
	checkBusy(t, r.Usage)
	slices.Sort(r.Latencies)
	if uint64(len(r.Latencies)) != r.Counted || r.Sent < r.Counted {
		t.Fatalf("%d transactions, %d of them in the window, %d latencies", r.Sent, r.Counted, len(r.Latencies))
	}
	half, mean := r.Latencies[len(r.Latencies)/2], time.Duration(float64(time.Second)/r.Rate)
	t.Logf("%d transactions, %.0f/s, median %s, %+v", r.Counted, r.Rate, half, r.Usage)
	if r.Latencies[0] <= 0 || half > 2*mean {
		t.Errorf("half of the transactions took %s or more, but one took %s on average", half, mean)
	}
}

func TestConnect(t *testing.T) { inEachFamily(t, connects) }

func connects(t *testing.T, target Target) {
	t.Helper()
	r := again(t, func() (Result, error) {
		r, err := Connect(t.Context(), target)
		return r, timely(target, r.Usage, err)
	})
	t.Logf("%+v", r)
	checkBusy(t, r.Usage)
	if r.Lost != 0 || r.Sent < r.Counted {
		t.Errorf("%d connections, %d of them in the window, %d segments were sent again; a veth pair loses nothing", r.Sent, r.Counted, r.Lost)
	}
	for name, host := range map[string]*lab.Namespace{"client": target.Client, "server": target.Server} {
		if left := sockets(t, host); left != 0 {
			t.Errorf("%d sockets of the %s are left", left, name)
		}
	}
}

// A sample ends before its connections fill a table that remembers them.
func TestConnectIsBounded(t *testing.T) {
	target := pair(t)
	target.Duration = time.Minute // more than a slow machine takes for them
	r := again(t, func() (Result, error) { return Connect(t.Context(), target) })
	if r.Counted < ConnectionsPerSample || r.Counted > ConnectionsPerSample+connectAtOnce*10 {
		t.Errorf("%d connections in %s, want %d", r.Counted, r.Usage.Window, ConnectionsPerSample)
	}
}

func TestNewFlows(t *testing.T) { inEachFamily(t, opensFlows) }

func opensFlows(t *testing.T, target Target) {
	t.Helper()
	listener := tap(t, target.Server)
	var seen map[[4]byte]int
	for range 2 { // the second sample's flows are others than the first one's
		before := received(t, target.Client)
		r := again(t, func() (Result, error) {
			tuples(t, listener, requestSize)
			return NewFlows(t.Context(), target)
		})
		t.Logf("%+v", r)
		answers := received(t, target.Client) - before
		if r.Counted == 0 || r.Counted > FlowsPerSample || r.Sent > FlowsPerSample+flowsBefore || answers < r.Sent-r.Lost {
			t.Errorf("%d flows in the window, %d in all, %d answers; want at most %d", r.Counted, r.Sent, answers, FlowsPerSample)
		}
		if r.Lost != 0 {
			t.Errorf("%d of %d were lost; a veth pair loses nothing", r.Lost, r.Sent)
		}
		old := seen
		if seen = tuples(t, listener, requestSize); uint64(len(seen)) < r.Sent {
			t.Errorf("%d flows were opened, and %d different ones arrived", r.Sent, len(seen))
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
	target.Duration = 400 * time.Millisecond // nothing is sent again before 200 ms have passed, and a client may be late
	for name, take := range map[string]func() (Result, error){
		"udp":             func() (Result, error) { return UDP(t.Context(), target, 64) },
		"new flows":       func() (Result, error) { return NewFlows(t.Context(), target) },
		"tcp connections": func() (Result, error) { return Connect(t.Context(), target) },
	} {
		var r Result
		var err error
		for range 5 { // where the counter waits for its CPU, it sees nothing, and that is said first
			if r, err = take(); err == nil || !strings.Contains(err.Error(), "was counted") {
				break
			}
		}
		if !errors.Is(err, ErrNotMeasured) || errors.Is(err, ErrStarved) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "were lost") || r.Lost == 0 {
			t.Errorf("%d of %d were lost: %v, want %q", r.Lost, r.Sent, err, name)
		}
	}
}

func TestOneCPU(t *testing.T) {
	target := pair(t)
	target.ServerCPU = target.ClientCPU
	if u := again(t, func() (Result, error) { return UDP(t.Context(), target, 64) }); u.Lost != 0 || u.Counted == 0 {
		t.Errorf("%d datagrams, %d lost; a veth pair loses nothing", u.Counted, u.Lost)
	}
	again(t, func() (Result, error) { return Stream(t.Context(), target) })
	requestResponse(t, target)
	again(t, func() (Result, error) { return Connect(t.Context(), target) })
	again(t, func() (Result, error) { return NewFlows(t.Context(), target) })
}

func TestNothingAnswers(t *testing.T) {
	target := pair(t)
	link, err := target.Server.Netlink().LinkByName(lab.Uplink)
	if err == nil {
		err = target.Server.Netlink().LinkSetDown(link)
	}
	if err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	_, err = UDP(t.Context(), target, 64)
	if err == nil || !strings.Contains(err.Error(), "did not answer") {
		t.Errorf("got %v, want the server's silence", err)
	}
	if took := time.Since(started); took > 6*time.Second {
		t.Errorf("it took %s to find out", took)
	}
}

// Whatever an end waits for, it ends with the context.
func TestCancel(t *testing.T) {
	target := pair(t)
	target.Duration = time.Minute
	for name, take := range map[string]func(context.Context) (Result, error){
		"udp":    func(ctx context.Context) (Result, error) { return UDP(ctx, target, 64) },
		"stream": func(ctx context.Context) (Result, error) { return Stream(ctx, target) },
		"rr":     func(ctx context.Context) (Result, error) { return RequestResponse(ctx, target) },
		"crr":    func(ctx context.Context) (Result, error) { return Connect(ctx, target) },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, cancel)
		started := time.Now()
		if _, err := take(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: got %v, want that the context was cancelled", name, err)
		}
		if took := time.Since(started); took > 2*time.Second {
			t.Errorf("%s: it took %s to end", name, took)
		}
	}
}
