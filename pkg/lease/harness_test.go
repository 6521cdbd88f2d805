package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const (
	prefix    = "/test/network"
	configKey = prefix + "/config"
	vxlan     = `{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`
)

func subnetKey(text string) string { return prefix + "/subnets/" + text }

// recordOf is what flanneld writes of a node.
func recordOf(public string) string {
	return fmt.Sprintf(`{"PublicIP":%q,"PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}}`, public)
}

// agent is a Run that the test looks at.
type agent struct {
	t    *testing.T
	log  *lockedBuffer
	stop func()

	mu      sync.Mutex
	nodes   []plan.Node
	errs    []error
	failing bool
	told    []string // every list, in short
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// option changes what an agent is started with.
type option func(*Options, *Self)

// start starts an agent named n1 at 192.0.2.1.
func start(t *testing.T, url string, change ...option) *agent {
	t.Helper()
	o := Options{Endpoints: []string{url}, Prefix: prefix, SubnetFile: t.TempDir() + "/subnet.env", TTL: time.Minute}
	o.Public[wire.IPv4] = netip.MustParseAddr("192.0.2.1")
	self := Self{Node: "n1", MachineID: "m1", MAC: wire.MAC{2, 0, 0, 0, 0, 9}}
	for _, c := range change {
		c(&o, &self)
	}
	a := &agent{t: t, log: &lockedBuffer{}}
	r, err := Open(o, slog.New(slog.NewTextHandler(a.log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		network, err := r.Network(ctx, t.TempDir(), func(err error) { a.take(source.Update{Err: err}) })
		if err == nil {
			err = r.Run(ctx, network, self, a.take)
		}
		ended <- err
	}()
	a.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
		r.Close()
	})
	t.Cleanup(func() {
		a.stop()
		if t.Failed() {
			t.Logf("%.3000s\n%.2000s\n%v", a.log.String(), strings.Join(a.told, "\n"), a.errs)
		}
	})
	return a
}

func (a *agent) take(u source.Update) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failing = u.Err != nil; a.failing {
		a.errs = append(a.errs, u.Err)
		return
	}
	a.nodes, a.told = u.Nodes, append(a.told, short(u.Nodes))
}

// lists is how often everything has been listed.
func (a *agent) lists() int { return strings.Count(a.log.String(), "leases listed") }

// short are nodes as name=podCIDRs, this node first.
func short(nodes []plan.Node) string {
	var all []string
	for _, n := range nodes {
		all = append(all, n.Name+"="+strings.Join(n.PodCIDRs, ","))
	}
	if len(all) > 1 {
		slices.Sort(all[1:])
	}
	return strings.Join(all, " ")
}

func (a *agent) now() (nodes string, errs []error, failing bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return short(a.nodes), slices.Clone(a.errs), a.failing
}

// doubts are those that nodes have.
func (a *agent) doubts() (all []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.nodes {
		for _, text := range n.Doubts {
			all = append(all, n.Name+": "+text)
		}
	}
	return all
}

func (a *agent) expectDoubt(words string) {
	a.t.Helper()
	until(a.t, words, func() bool { return strings.Contains(strings.Join(a.doubts(), "\n"), words) })
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(priv.Patience(20 * time.Second)); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

func (a *agent) expect(want string) {
	a.t.Helper()
	until(a.t, want, func() bool { nodes, _, failing := a.now(); return nodes == want && !failing })
}

// expectError waits for an error with these words, of one line.
func (a *agent) expectError(words ...string) {
	a.t.Helper()
	until(a.t, fmt.Sprint(words), func() bool {
		_, errs, failing := a.now()
		if !failing {
			return false
		}
		text := errs[len(errs)-1].Error()
		return !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) && !strings.Contains(text, "\n")
	})
}

// stays fails if something else than this is told within a while.
func (a *agent) stays(want string, while time.Duration) {
	a.t.Helper()
	for end := time.Now().Add(while); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if nodes, _, _ := a.now(); nodes != want {
			a.t.Fatalf("it is %q, and should stay %q", nodes, want)
		}
	}
}

// always fails if a list has been told that lacks this.
func (a *agent) always(what string) {
	a.t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, told := range a.told {
		if !strings.Contains(told, what) {
			a.t.Errorf("told has been %q, without %s", told, what)
		}
	}
}

func expectKey(t *testing.T, s *etcd.Server, key, want string) {
	t.Helper()
	if got, _ := s.Get(key); got != want {
		t.Errorf("%s is %q, want %q", key, got, want)
	}
}

// narrow leaves one subnet to lease: 10.5.9.0/24.
const narrow = `{"Network": "10.5.0.0/16", "SubnetMin": "10.5.9.0", "SubnetMax": "10.5.9.0", "Backend": {"Type": "vxlan"}}`

// wall is between an agent and etcd, and can be closed.
type wall struct {
	address, behind string
	mu              sync.Mutex
	shut            bool
	through         []net.Conn
}

func newWall(t *testing.T, behind string, change ...func(net.Listener) net.Listener) *wall {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		l = c(l)
	}
	t.Cleanup(func() { l.Close() })
	w := &wall{address: l.Addr().String(), behind: behind}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.pass(c)
		}
	}()
	return w
}

func (w *wall) pass(c net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	to, err := net.Dial("tcp4", w.behind)
	if err != nil || w.shut {
		c.Close()
		return
	}
	w.through = append(w.through, c, to)
	for _, way := range [][2]net.Conn{{c, to}, {to, c}} {
		go func() {
			_, _ = io.Copy(way[0], way[1])
			way[0].Close()
		}()
	}
}

func (w *wall) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shut = true
	for _, c := range w.through {
		c.Close()
	}
}

func (w *wall) open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shut = false
}
