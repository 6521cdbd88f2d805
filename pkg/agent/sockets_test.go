package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/backends"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/sockets"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// connectedTo makes a socket that waits for a backend, and notes it as the programs do.
func connectedTo(t *testing.T, l *loop, peer string, v sockets.Value) *net.UDPConn {
	t.Helper()
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(peer)))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	raw, err := conn.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) {
		cookie, err := unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
		must(t, err)
		must(t, l.dp.Maps.Sockets.Put(sockets.Key{Cookie: cookie}, v))
	}))
	return conn
}

// isEnded reports whether a socket's owner has been freed.
func isEnded(t *testing.T, conn *net.UDPConn) bool {
	t.Helper()
	must(t, conn.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	_, err := conn.Read(make([]byte, 1))
	return errors.Is(err, unix.ECONNABORTED)
}

// TestSocketsAreEnded whose backend answers no more, and no others.
func TestSocketsAreEnded(t *testing.T) {
	l := testServices(t)
	put := func(number uint32, b backends.Value) {
		t.Helper()
		must(t, l.dp.Maps.Backends.Put(backends.Key{Backend: number}, b))
	}
	put(7, backends.Value{Set: 5, Generation: 2, Flags: backends.Serving})
	put(8, backends.Value{Set: 5, Generation: 2})
	put(10, backends.Value{Set: 5, Generation: 2, Flags: backends.Answers})
	put(9, backends.Value{Set: 6, Generation: 2, Flags: backends.Serving})
	value := func(peer string, backend, generation uint32, connected uint8) sockets.Value {
		at := netip.MustParseAddrPort(peer)
		return sockets.Value{
			FrontendAddress: wire.AddrFrom(netip.MustParseAddr("10.96.0.1")), FrontendPort: wire.PortFrom(53), Proto: wire.UDP, Connected: connected,
			BackendAddress: wire.AddrFrom(at.Addr()), BackendPort: wire.PortFrom(at.Port()), Set: 5, Backend: backend, Generation: generation,
		}
	}
	must(t, l.dp.Maps.Endpoints.Put(endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr("127.0.0.3"))}, endpoints.Value{Ifindex: 42}))
	hostPort := func(peer string, ifindex uint32) sockets.Value {
		v := value(peer, 0, ifindex, 1)
		v.Set = services.HostPort
		return v
	}
	for name, c := range map[string]struct {
		peer  string
		value sockets.Value
		ends  bool
	}{
		"it is a pod with a host port":      {"127.0.0.3:5009", hostPort("127.0.0.3:5009", 42), false},
		"another pod has its address":       {"127.0.0.3:5010", hostPort("127.0.0.3:5010", 41), true},
		"no pod has its address":            {"127.0.0.4:5011", hostPort("127.0.0.4:5011", 42), true},
		"it serves":                         {"127.0.0.1:5001", value("127.0.0.1:5001", 7, 2, 1), false},
		"it is not ready":                   {"127.0.0.1:5002", value("127.0.0.1:5002", 8, 2, 1), true},
		"it terminates, others are nearer":  {"127.0.0.1:5008", value("127.0.0.1:5008", 10, 2, 1), false},
		"its number has another generation": {"127.0.0.1:5003", value("127.0.0.1:5003", 7, 1, 1), true},
		"its number is another set's":       {"[::1]:5004", value("[::1]:5004", 9, 2, 1), true},
		"it was asked by a datagram":        {"127.0.0.1:5005", value("127.0.0.1:5005", 8, 2, 0), false},
		"its socket has another address":    {"127.0.0.1:5006", value("127.0.0.2:5006", 8, 2, 1), false},
		"its socket has another port":       {"127.0.0.1:5007", value("127.0.0.1:5006", 8, 2, 1), false},
	} {
		// Not in a test of its own, which would be in another network namespace.
		conn := connectedTo(t, l, c.peer, c.value)
		plain, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.peer)))
		must(t, err)
		must(t, l.services.endSocketsNow())
		if isEnded(t, conn) != c.ends {
			t.Errorf("%s: ended: %v, want %v", name, !c.ends, c.ends)
		}
		if isEnded(t, plain) {
			t.Errorf("%s: ended is a socket that no program has connected", name)
		}
		must(t, plain.Close())
	}
}

// A change that takes a backend of UDP away has sockets looked at; others have not.
func TestRetiredBackendsWakeTheEndOfSockets(t *testing.T) {
	l := testServices(t)
	woken := func() bool {
		select {
		case <-l.services.ceased:
			return true
		default:
			return false
		}
	}
	of := func(proto wire.Protocol, all ...[]string) service.Update {
		u := complete(all...)
		for i := range u.Services {
			u.Services[i].Ports[0].Protocol, u.Slices[i].Ports[0].Protocol = proto, proto
		}
		return u
	}
	l.services.place(here())
	for proto, wakes := range map[wire.Protocol]bool{wire.TCP: false, wire.UDP: true} {
		l.services.accept(of(proto, []string{"10.244.2.7"}, []string{"10.244.2.8"}))
		woken() // by those of the other protocol, which have gone
		l.services.accept(of(proto, []string{"10.244.2.7", "10.244.2.9"}, []string{"10.244.2.8"}))
		if woken() {
			t.Errorf("%v: by a backend that has come", proto)
		}
		l.services.accept(of(proto, []string{}, []string{"10.244.2.8"}))
		if woken() != wakes {
			t.Errorf("%v: by one that has gone: %v, want %v", proto, !wakes, wakes)
		}
	}
}

// However often backends cease, there is a second between two looks.
func TestSocketsAreLookedAtNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		poked := make(chan struct{}, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for want, prepare := range map[time.Duration]func(){
			time.Second:     func() { poke(poked) },
			3 * time.Second: func() { time.AfterFunc(3*time.Second, func() { poke(poked) }) },
			resync:          func() {},
		} {
			prepare()
			began := time.Now()
			must(t, awaitPoke(ctx, poked))
			if took := time.Since(began); took != want {
				t.Errorf("looked after %v, want %v", took, want)
			}
		}
		cancel()
		if awaitPoke(ctx, poked) == nil {
			t.Error("goes on")
		}
	})
}

// Sockets that can't be ended are shown as long as that is so, and make no noise.
func TestSocketsThatCannotBeEnded(t *testing.T) {
	log := &syncedBuffer{}
	text := slog.New(slog.NewTextHandler(log, nil))
	c := &serviceController{node: &node{log: text, complaints: newComplaints(text)}}
	for range 2 {
		c.noteSockets(fmt.Errorf("list UDP sockets: %w", device.ErrNoSocketDiag))
		if is := c.complaints.degraded(); len(is) != 1 {
			t.Errorf("degraded by %v", is)
		}
	}
	if said := log.String(); strings.Count(said, "level=WARN") != 1 || strings.Contains(said, "level=ERROR") {
		t.Errorf("logged %s", said)
	}
	c.noteSockets(nil)
	if is := c.complaints.degraded(); len(is) > 0 {
		t.Errorf("still degraded by %v", is)
	}
}
