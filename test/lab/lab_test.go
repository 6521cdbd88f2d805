package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// These tests use the kernel's own routing only: no agent, no plugin.

// dual is both families, in either order.
var dual = map[string][]wire.Family{"IPv4, IPv6": {wire.IPv4, wire.IPv6}, "IPv6, IPv4": {wire.IPv6, wire.IPv4}}

func TestHostsReachEachOther(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts Options
		ttl  int // with which the outside host's replies arrive
	}{
		{"switched", Options{}, 64},
		{"routed", Options{Router: true}, 63},
		{"switched, IPv6", Options{Families: []wire.Family{wire.IPv6}}, 64},
		{"routed, both", Options{Router: true, Families: dual["IPv6, IPv4"]}, 63},
		{"two fabrics, both", Options{Links: 2, Families: dual["IPv4, IPv6"]}, 63},
		{"hosts of both, pods of one", Options{Families: []wire.Family{wire.IPv6}, Underlay: dual["IPv4, IPv6"]}, 64},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := ForTest(t, tc.opts)
			for _, family := range l.Options.Underlay {
				reachEachOther(t, l, family, tc.ttl)
			}
		})
	}
}

func reachEachOther(t *testing.T, l *Lab, family wire.Family, ttl int) {
	t.Helper()
	from := l.Nodes[0]
	for _, to := range []*Namespace{l.Nodes[1].Namespace, l.Outside} {
		server, err := to.Serve(0)
		if err != nil {
			t.Fatal(err)
		}
		addr, want := to.AddrOf(family), from.AddrOf(family)
		at := netip.AddrPortFrom(addr, server.Port)
		if reply, err := from.Ping(t.Context(), addr, PingOptions{}); err != nil || reply.From != addr {
			t.Errorf("ping to %s: answered by %s; error %v", addr, reply.From, err)
		}
		if seen, err := from.TCP(t.Context(), at); err != nil || seen.Addr() != want {
			t.Errorf("TCP to %s: server saw %v, want %v; error %v", to.Netns(), seen, want, err)
		}
		for _, size := range []int{64, 1472, 9000, 65507} {
			if seen, err := from.UDP(t.Context(), at, size); err != nil || seen.Addr() != want {
				t.Errorf("UDP of %d bytes to %s: server saw %v, want %v; error %v", size, to.Netns(), seen, want, err)
			}
		}
		if _, err := from.Transfer(t.Context(), at, 3<<20+1); err != nil {
			t.Error(err)
		}
	}
	reply, err := from.Ping(t.Context(), OutsideAddr[family], PingOptions{Size: 4000})
	if err != nil || reply.TTL != ttl || reply.From != OutsideAddr[family] {
		t.Errorf("ping to the outside host: %+v, want TTL %d; error %v", reply, ttl, err)
	}
}

func TestFixedLocalPorts(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1})
	server, err := l.Outside.Serve(0)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(OutsideAddr[wire.IPv4], server.Port)
	want := netip.AddrPortFrom(l.Nodes[0].Addr(), 50001)
	conn, err := l.Nodes[0].DialTCP(t.Context(), at, 50001)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if conn.Seen != want {
		t.Errorf("TCP server saw %v, want %v", conn.Seen, want)
	}
	if err := conn.Echo(t.Context(), 1<<20); err != nil {
		t.Error(err)
	}
	packets, err := l.Nodes[0].DialUDP(at, 50001)
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	if seen, err := packets.Echo(t.Context(), 100); err != nil || seen != want {
		t.Errorf("UDP server saw %v, want %v; error %v", seen, want, err)
	}
}

func TestErrorsComeBack(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1, OutsideMTU: 1300, Families: dual["IPv4, IPv6"]})
	node := l.Nodes[0]
	nobody := addresses("203.0.113.99", "2001:db8:203:113::99")
	for _, family := range l.Options.Families {
		outside := OutsideAddr[family]
		var complaint *ICMPError
		_, err := node.Ping(t.Context(), outside, PingOptions{Size: 1400, DontFragment: true})
		if !errors.As(err, &complaint) || complaint.ICMPKind != TooBig[family] || complaint.MTU != 1300 || complaint.InnerSource != node.AddrOf(family) {
			t.Errorf("ping of 1400 bytes through a link of 1300: %v, want that it is too big, with MTU 1300", err)
		}
		_, err = node.Ping(t.Context(), outside, PingOptions{TTL: 1})
		if !errors.As(err, &complaint) || complaint.ICMPKind != TimeExceeded[family] || complaint.From != GatewayAddr[family] || complaint.InnerDestination != outside {
			t.Errorf("ping with TTL 1: %v, want time exceeded from the router", err)
		}
		if _, err = node.UDP(t.Context(), netip.AddrPortFrom(outside, 9), 64); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("UDP to a closed port: %v, want connection refused", err)
		}
		if _, err = node.TCP(t.Context(), netip.AddrPortFrom(outside, 9)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to a closed port: %v, want connection refused", err)
		}
		soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err = node.Ping(soon, nobody[family], PingOptions{})
		cancel()
		if err == nil {
			t.Error("ping to an address that nobody has: no error")
		}
	}
}

func TestNothingTouchesTheMachine(t *testing.T) {
	priv.Require(t)
	machine := func() string {
		var state strings.Builder
		for _, file := range []string{"/proc/net/dev", "/proc/net/route", "/proc/sys/net/ipv4/ip_forward"} {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(raw)) {
				fields := strings.Fields(line)
				if file == "/proc/net/dev" && len(fields) > 1 {
					fields = fields[:1] // names; the counters go on counting
				}
				fmt.Fprintln(&state, fields)
			}
		}
		return state.String()
	}
	before := machine()
	l := ForTest(t, Options{Nodes: 2, Router: true})
	if during := machine(); during != before {
		t.Errorf("the machine's links, routes or forwarding changed from\n%s\nto\n%s", before, during)
	}
	links, err := l.Nodes[0].Links()
	if err != nil || !slices.Equal(links, []string{"lo", Uplink}) {
		t.Errorf("a node has the links %q, want its own only; error %v", links, err)
	}
}

func TestLabsAtTheSameTime(t *testing.T) {
	priv.Require(t)
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			l, err := New(t.Context(), Options{Nodes: 2})
			if err != nil {
				t.Error(err)
				return
			}
			defer func() {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
				assertNothingRemains(t, l.ID)
			}()
			server, err := l.Nodes[1].Serve(8080)
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := l.Nodes[0].TCP(t.Context(), netip.AddrPortFrom(l.Nodes[1].Addr(), server.Port)); err != nil {
				t.Errorf("lab %d: %v", i, err)
			}
		})
	}
	all.Wait()
}

func TestProgramsAndSysctlsAreTheNodes(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1})
	node := l.Nodes[0]
	if err := node.WriteSysctl("net/ipv4/ip_local_reserved_ports", "49152-65535"); err != nil {
		t.Fatal(err)
	}
	// A child process sees the sysctls of the namespace that it was started in: the agent and the plugin rely on it.
	out, err := node.Exec(t.Context(), "/bin/cat", "/proc/sys/net/ipv4/ip_local_reserved_ports")
	if err != nil || strings.TrimSpace(string(out)) != "49152-65535" {
		t.Errorf("a process on the node reads %q, want the node's own setting; error %v", out, err)
	}
	if own, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_reserved_ports"); err != nil || strings.Contains(string(own), "49152-65535") {
		t.Errorf("the machine's setting is %q; error %v", own, err)
	}
	_, err = node.Exec(t.Context(), "/bin/cat", "/nowhere")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("a program that fails: %v, want its exit status and what it said", err)
	}
}

func TestDoReportsAFunctionThatLeaves(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1})
	if err := l.Outside.Do(func() error { runtime.Goexit(); return nil }); err == nil || !strings.Contains(err.Error(), "without returning") {
		t.Errorf("got %v", err)
	}
}

// ownerRole makes this test binary the owner of a lab that a test kills: see TestMain.
const ownerRole = "EBPF_CNI_LAB_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerRole) == "" {
		os.Exit(m.Run())
	}
	l, err := New(context.Background(), Options{Nodes: 2})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	// A process of the lab's that survives its owner, as an agent does.
	child := exec.Command("/bin/sleep", "1000")
	if err := l.Nodes[0].Do(child.Start); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(ownerRole) == "keep" {
		if err := l.Keep(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(l.ID)
		return
	}
	fmt.Println(l.ID)
	time.Sleep(time.Hour) // until killed; the runtime takes select for a deadlock
}

// startOwner runs another process that owns a lab, and returns the lab's id.
func startOwner(t *testing.T, role string) (owner *exec.Cmd, id string) {
	t.Helper()
	owner = exec.Command("/proc/self/exe")
	owner.Env = append(os.Environ(), ownerRole+"="+role)
	owner.Stderr = os.Stderr
	stdout, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the owner did not say which lab it has: %v", err)
	}
	return owner, strings.TrimSpace(line)
}

func TestSweepAfterKill(t *testing.T) {
	priv.Require(t)
	owner, id := startOwner(t, "die")
	kinds := func() (kinds []string) {
		found, err := Remains(id)
		if err != nil {
			t.Fatal(err)
		}
		for _, what := range found {
			kind, _, _ := strings.Cut(what, " ")
			kinds = append(kinds, kind)
		}
		return slices.Compact(kinds)
	}

	if ended, err := sweepOne(id); err != nil || ended {
		t.Errorf("with its owner alive the lab must be left alone: ended %v, error %v", ended, err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	if got, want := kinds(), []string{"namespace", "process", "mount", "cgroup", "directory"}; !slices.Equal(got, want) {
		t.Errorf("a killed owner leaves %q, want %q, else this test tests nothing", got, want)
	}
	// Another process that starts a lab at this moment may be quicker: what counts is that nothing is left.
	if _, err := Sweep(); err != nil {
		t.Error(err)
	}
	assertNothingRemains(t, id)
}

func TestKeptLabIsEndedByItsCheckoutOnly(t *testing.T) {
	priv.Require(t)
	// Neither is a real checkout: somebody may keep labs of those.
	mine, theirs := t.TempDir(), t.TempDir()
	t.Chdir(mine)
	id := keep(t)
	stays := func(by string, swept []string, err error) {
		t.Helper()
		if err != nil || slices.Contains(swept, id) {
			t.Errorf("%s ended %q, want the kept lab %s not among them; error %v", by, swept, id, err)
		}
		if found, err := Remains(id); err != nil || len(found) < 4 {
			t.Errorf("after %s there is only %q of the kept lab; error %v", by, found, err)
		}
	}
	swept, err := Sweep()
	stays("Sweep", swept, err)
	t.Chdir(theirs)
	swept, err = SweepKept()
	stays("SweepKept from elsewhere", swept, err)
	if kept, err := Kept(); err != nil || !slices.Contains(kept, KeptLab{ID: id, From: mine}) {
		t.Errorf("kept are %v, want %s of %s among them; error %v", kept, id, mine, err)
	}
	t.Chdir(mine)
	if swept, err := SweepKept(); err != nil || !slices.Equal(swept, []string{id}) {
		t.Errorf("SweepKept ended %q, want %s; error %v", swept, id, err)
	}
	assertNothingRemains(t, id)
}

func TestEndOfOneLab(t *testing.T) {
	priv.Require(t)
	t.Chdir(t.TempDir())
	id, other := keep(t), keep(t)
	if err := End(id); err != nil {
		t.Error(err)
	}
	assertNothingRemains(t, id)
	if found, err := Remains(other); err != nil || len(found) < 4 {
		t.Errorf("the end of lab %s left only %q of lab %s; error %v", id, found, other, err)
	}
	if err := End(other); err != nil {
		t.Error(err)
	}
	l := ForTest(t, Options{Nodes: 1})
	for id, want := range map[string]string{
		id: "there is none", "../x": "four hexadecimal digits", "": "four hexadecimal digits", l.ID: errOwned.Error(),
	} {
		if err := End(id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("End(%q): %v, want %q", id, err, want)
		}
	}
}

// keep leaves a lab that was kept from the working directory, and returns its id.
func keep(t *testing.T) string {
	t.Helper()
	owner, id := startOwner(t, "keep")
	t.Cleanup(func() {
		if _, err := sweepOne(id); err != nil && !errors.Is(err, fs.ErrNotExist) { // ended by the test
			t.Error(err)
		}
	})
	if err := owner.Wait(); err != nil {
		t.Fatal(err)
	}
	return id
}

func TestBinariesAreNamedWhenMissing(t *testing.T) {
	l := ForTest(t, Options{Nodes: 1, BinDir: filepath.Join(t.TempDir(), "empty")})
	err := l.Nodes[0].StartAgent()
	if err == nil || !strings.Contains(err.Error(), "ebpf-agent") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("starting an agent that was not built: %v, want what is missing and what to do", err)
	}
}
