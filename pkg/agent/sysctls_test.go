package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestPorts(t *testing.T) {
	for _, tt := range []struct{ have, want string }{
		{"", ""}, {"8080", "8080"}, {"8080,9148", "8080,9148"}, {"1-3,4,5-6", "1-6"}, {"65535", "65535"},
		{"0-65535", "0-65535"}, {"7,5,6", "5-7"}, {"9-9\n", "9"},
	} {
		p, err := parsePorts(tt.have)
		if err != nil || p.String() != tt.want {
			t.Errorf("%q is %q, error %v, want %q", tt.have, p, err, tt.want)
		}
	}
	for _, bad := range []string{"x", "1-2-x,y", "70000", "-5"} {
		if p, err := parsePorts(bad); err == nil {
			t.Errorf("%q is %q", bad, p)
		}
	}
}

func FuzzPorts(f *testing.F) {
	for _, s := range []string{"", "1", "1-2", "1,3-5,65535", "0-65535", "a", "1-", "-1", ",,", "5-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePorts(s)
		if err != nil {
			return
		}
		again, err := parsePorts(p.String())
		if err != nil || again != p {
			t.Errorf("%q is %q, which is read as %q, error %v", s, p, again, err)
		}
	})
}

// node is a made-up /proc/sys.
type sysctlDir struct {
	t   *testing.T
	dir string
	*sysctls
}

func someSysctls(t *testing.T, values map[string]string) *sysctlDir {
	t.Helper()
	d := &sysctlDir{t: t, dir: t.TempDir()}
	for name, value := range values {
		path := filepath.Join(d.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := readRecord(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d.sysctls = newSysctls(&node{cfg: Config{Directories: Directories{ProcSys: d.dir}}, log: log, status: newStatus(log), complaints: newComplaints(log)}, r)
	return d
}

// write is somebody else's.
func (d *sysctlDir) write(name, value string) {
	d.t.Helper()
	if err := os.WriteFile(filepath.Join(d.dir, name), []byte(value), 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d *sysctlDir) expect(when string, values map[string]string) {
	d.t.Helper()
	for name, want := range values {
		raw, err := os.ReadFile(filepath.Join(d.dir, name))
		// A file keeps what a shorter write leaves; the kernel does not.
		have, _, _ := strings.Cut(string(raw), "\n")
		if err != nil || have != want {
			d.t.Errorf("%s: %s is %q, error %v, want %q", when, name, have, err, want)
		}
	}
}

func (d *sysctlDir) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// found is a state in which links that are uplinks have such forwarding, and all links the one of "all".
func found(forwarding map[string]int) *state {
	v := &view{settings: map[int]device.Settings{device.AllLinks: {Index: device.AllLinks, Forwarding: forwarding["all"]}}}
	for name, value := range forwarding {
		if name != "all" {
			index := 10 + len(v.uplinks)
			v.uplinks = append(v.uplinks, plan.Link{Index: uint32(index), Name: name})
			v.settings[index] = device.Settings{Index: index, Forwarding: value}
		}
	}
	return &state{view: v}
}

func TestForwardingIsHeldAndPutBack(t *testing.T) {
	d := someSysctls(t, map[string]string{ipForward: "1", forwardingOf("eth0"): "0", forwardingOf("eth1"): "0"})
	d.must(d.forward(found(map[string]int{"all": 1, "eth0": 0, "eth1": 0, "gone": 0})))
	d.expect("held", map[string]string{ipForward: "1", forwardingOf("eth0"): "1", forwardingOf("eth1"): "1"})
	d.write(forwardingOf("eth0"), "0\n")
	d.must(d.forward(found(map[string]int{"all": 1, "eth0": 0})))
	d.expect("held again", map[string]string{forwardingOf("eth0"): "1"})
	d.write(forwardingOf("eth1"), "2\n") // no longer our value
	d.must(d.restore())
	d.expect("put back", map[string]string{ipForward: "1", forwardingOf("eth0"): "0", forwardingOf("eth1"): "2"})
}

// What the kernel turns on with ip_forward needs no write of ours, and stays.
func TestForwardingStaysWhereIPForwardTurnedItOn(t *testing.T) {
	l := testLoop(t)
	files := device.Sysctl{Dir: l.cfg.ProcSys}
	set := func(name, value string) {
		t.Helper()
		_, err := files.Set(name, value)
		must(t, err)
	}
	set(ipForward, "0")
	ready(t, l)
	recorded := l.sysctls.record.Sysctls
	if _, written := recorded[forwardingOf("uplink")]; written || recorded[ipForward] != (setting{"0", "1"}) {
		t.Errorf("recorded %v", recorded)
	}
	set(forwardingOf("uplink"), "0")
	l.passOver(t.Context(), false)
	must(t, l.sysctls.restore())
	for _, name := range []string{ipForward, forwardingOf("uplink")} {
		if have, err := files.Get(name); have != "1" || err != nil {
			t.Errorf("put back: %s is %q, error %v", name, have, err)
		}
	}
}

// At rest no file is read for what the kernel tells of. What it can't tell of is seen at each inspection.
func TestSysctlsAtRest(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	l.inspect(t.Context())
	l.sysctls.Dir = t.TempDir() // where there is nothing to read
	for range 3 {
		if l.inspect(t.Context()) || len(l.complaints.current) > 0 {
			t.Fatalf("a file was looked up: %v", l.complaints.current)
		}
	}
	l.sysctls.Dir = l.cfg.ProcSys
	files := device.Sysctl{Dir: l.cfg.ProcSys}
	reserved, err := files.Get(reservedPorts)
	must(t, err)
	for _, others := range []string{"\n", "20000-20010\n", "20000-20010," + reserved} {
		_, err := files.Set(reservedPorts, others)
		must(t, err)
		l.inspect(t.Context())
		have, err := files.Get(reservedPorts)
		must(t, err)
		if want := strings.TrimSpace(strings.TrimSuffix(others, reserved)); !strings.Contains(have, reserved) || !strings.HasPrefix(have, strings.TrimSuffix(want, ",")) {
			t.Errorf("after %q: %q", others, have)
		}
	}
}

// watched has the loop hear of its namespace until the test ends.
func watched(t *testing.T, l *loop) {
	t.Helper()
	namespace, err := os.Open("/proc/thread-self/ns/net")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	stands, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Error(err)
		}
		var once sync.Once
		err := device.Watch(ctx, func(e device.Event) {
			l.alarm.hear(e)
			once.Do(func() { close(stands) })
		})
		if ctx.Err() == nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-ended; _ = namespace.Close() })
	select {
	case <-stands:
	case <-time.After(priv.Patience(10 * time.Second)):
		t.Fatal("the network is not watched")
	}
}

// Forwarding that is turned off rings, and is on again after the pass that follows. That it is on again rings for nobody.
func TestForwardingThatIsTurnedOffIsHeard(t *testing.T) {
	l, e := withPod(t)
	watched(t, l)
	files := device.Sysctl{Dir: l.cfg.ProcSys}
	called := func(patience time.Duration) trigger {
		for end := time.Now().Add(priv.Patience(patience)); l.alarm.called() == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		return l.alarm.called()
	}
	const quiet = 200 * time.Millisecond
	for called(quiet) != 0 { // the watch begins
		l.pass(t.Context())
	}
	for _, name := range []string{ipForward, forwardingOf("uplink"), forwardingOf(e.HostName)} {
		_, err := files.Set(name, "0")
		must(t, err)
		if r := called(5 * time.Second); r&urgent == 0 {
			t.Errorf("%s: called for %b", name, r)
		}
		time.Sleep(priv.Patience(quiet)) // one event for each link
		l.passOver(t.Context(), false)
		for _, each := range []string{ipForward, forwardingOf("uplink"), forwardingOf(e.HostName)} {
			if have, err := files.Get(each); have != "1" || err != nil {
				t.Errorf("after %s was turned off: %s is %s, error %v", name, each, have, err)
			}
		}
		if r := called(quiet); r != 0 {
			t.Errorf("%s: turning it on calls for %b", name, r)
		}
	}
}

// Somebody who changes a sysctl again and again is one warning. The node is degraded until he has left it alone for a minute, which
// is told with how often he did. Pods' links, of which the kernel turns off forwarding as well, are not each repaired.
func TestFightOverASysctl(t *testing.T) {
	l, _ := withPod(t)
	l.inspect(t.Context())
	log := &bytes.Buffer{}
	l.log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	l.complaints.log = l.log
	now := time.Now()
	l.complaints.now = func() time.Time { return now }
	files := device.Sysctl{Dir: l.cfg.ProcSys}
	const rounds, every = 20, 10 * time.Second
	ofPods := l.repairs(t, "sysctl")
	for i := range rounds {
		_, err := files.Set(ipForward, "0")
		must(t, err)
		l.passOver(t.Context(), false)
		l.inspect(t.Context())
		l.judge()
		l.assertReady(t)
		degraded := l.readTold(t).Degraded
		if i == 0 { // once is no fight
			if len(degraded) != 0 || !strings.Contains(log.String(), "level=INFO msg=\"sysctl set\"") {
				t.Errorf("after the first time degraded by %v, logged:\n%s", degraded, log)
			}
			log.Reset()
		} else if len(degraded) != 1 || degraded[0].About != "sysctls/"+ipForward || !l.status.read().degraded["sysctls"] {
			t.Fatalf("round %d: degraded by %v", i, degraded)
		}
		now = now.Add(every)
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "level=WARN") || !strings.Contains(text, ipForward) {
		t.Errorf("logged:\n%s", text)
	}
	if n := l.repairs(t, repairedSysctl); n != rounds {
		t.Errorf("%v repairs are counted, want %d", n, rounds)
	}
	if n := l.repairs(t, "sysctl"); n != ofPods {
		t.Errorf("%v repairs of pods are counted, want %v as before", n, ofPods)
	}
	for _, left := range []time.Duration{settledAfter - every - time.Second, 2 * time.Second} {
		now = now.Add(left)
		log.Reset()
		l.inspect(t.Context())
		l.judge()
		if over := left < settledAfter-every-time.Second; over != (len(l.readTold(t).Degraded) == 0) {
			t.Errorf("left alone for %v: degraded by %v", left, l.readTold(t).Degraded)
		}
	}
	if want := fmt.Sprintf("no longer the case\" about=sysctls/%s lasted=%s times=%d\n", ipForward, (rounds-2)*every+settledAfter+time.Second, rounds-1); !strings.HasSuffix(log.String(), want) {
		t.Errorf("at its end logged:\n%swant %s", log, want)
	}
}

// between are the ports of a range, and some others.
func between(low, high uint16, others ...uint16) ports {
	p := portsOf(others)
	p.add(low, high)
	return *p
}

func TestReservedPorts(t *testing.T) {
	d := someSysctls(t, map[string]string{reservedPorts: "8080,50000-50010"})
	d.must(d.reserve(between(49152, 65535)))
	d.expect("reserved", map[string]string{reservedPorts: "8080,49152-65535"})
	// Another range at the next start: what others reserved within stays.
	d.must(d.reserve(between(60000, 60999)))
	d.expect("another range", map[string]string{reservedPorts: "8080,50000-50010,60000-60999"})
	d.must(d.reserve(between(60000, 60999, 30090)))
	d.expect("and another port", map[string]string{reservedPorts: "8080,30090,50000-50010,60000-60999"})
	d.must(d.reserve(between(60000, 60999, 30080, 30081, 8080)))
	d.expect("and others", map[string]string{reservedPorts: "8080,30080-30081,50000-50010,60000-60999"})
	d.write(reservedPorts, "8080,9090,30080-30081,50000-50010,60000-60999\n")
	d.must(d.restore())
	d.expect("put back", map[string]string{reservedPorts: "8080,9090,50000-50010"})
}

// Without room for the record nothing is changed; with room again, all that is not to be ours is put back.
func TestReservedPortsThatCannotBeNoted(t *testing.T) {
	d := someSysctls(t, map[string]string{reservedPorts: "8080"})
	d.must(d.reserve(between(100, 200)))
	path := d.record.path
	d.record.path = filepath.Join(path, "no directory")
	for range 2 {
		if err := d.reserve(between(150, 300)); err == nil {
			t.Error("a change was made that the record can't have")
		}
	}
	d.expect("not noted", map[string]string{reservedPorts: "100-200,8080"})
	d.record.path = path
	d.must(d.reserve(between(150, 300)))
	d.expect("noted", map[string]string{reservedPorts: "150-300,8080"})
	d.must(d.restore())
	d.expect("put back", map[string]string{reservedPorts: "8080"})
}

func TestReservedPortsThatSomebodyTookOut(t *testing.T) {
	d := someSysctls(t, map[string]string{reservedPorts: ""})
	d.must(d.reserve(between(100, 200)))
	d.write(reservedPorts, "150-200\n")
	d.must(d.restore())
	d.expect("not our value", map[string]string{reservedPorts: "150-200"})
}

func TestReservedPortsOfNothing(t *testing.T) {
	d := someSysctls(t, map[string]string{reservedPorts: ""})
	d.must(d.reserve(between(100, 200)))
	d.must(d.restore())
	d.expect("put back", map[string]string{reservedPorts: ""})
}

func TestRecordOutlivesTheAgent(t *testing.T) {
	d := Directories{State: filepath.Join(t.TempDir(), "a", "state"), Conf: filepath.Join(t.TempDir(), "conf")}
	made, err := makeAll(d.State)
	if err != nil || len(made) != 2 {
		t.Fatalf("made %v, error %v", made, err)
	}
	r, err := openRecord(d, made)
	if err != nil {
		t.Fatal(err)
	}
	r.Sysctls["x"] = setting{"1", "2"}
	if err := r.write(); err != nil {
		t.Fatal(err)
	}
	again, err := openRecord(d, nil)
	if err != nil || len(again.Made) != 3 || again.Sysctls["x"] != (setting{"1", "2"}) {
		t.Errorf("read again: %+v, error %v", again, err)
	}
	if info, err := os.Stat(d.State); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("state directory %v, error %v", info.Mode(), err)
	}
	if err := os.WriteFile(r.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openRecord(d, nil); err == nil || !strings.Contains(err.Error(), r.path) {
		t.Errorf("a broken record: %v", err)
	}
}
