package agent

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// run runs a command in the test's namespaces.
func run(t *testing.T, command string) {
	t.Helper()
	words := strings.Fields(command)
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

func TestModeThatIsGivenIsNotLookedFor(t *testing.T) {
	priv.Isolate(t)
	run(t, "iptables-nft -t nat -A POSTROUTING -j MASQUERADE")
	for mode, want := range map[KubeProxyMode]netfilter.Level{KubeProxyOn: netfilter.Translates, KubeProxyOff: netfilter.Nothing, KubeProxyAuto: netfilter.Translates} {
		log := slog.New(slog.DiscardHandler)
		c := newMode(&node{cfg: Config{KubeProxy: mode}, log: log, complaints: newComplaints(log)})
		if c.begin(time.Now()); c.level != want {
			t.Errorf("%s: begins at level %d", mode, c.level)
		}
		if c.follow(time.Now()); c.changing {
			t.Errorf("%s: the programs are replaced", mode)
		}
	}
}

// follow looks and, when the mode has to change, does that too, which it reports.
func (l *loop) follow(t *testing.T, now time.Time) bool {
	t.Helper()
	l.followMode(now)
	select {
	case level := <-l.mode.wanted:
		l.mode.replace(t.Context(), level)
		o := <-l.mode.outcomes
		l.mode.changed(t.Context(), o, now)
		return o.err == nil
	default:
		return false
	}
}

// TestFollowTranslation has the programs of a node replaced as rules come and go, and flows that they have translated.
func TestFollowTranslation(t *testing.T) {
	l := testLoop(t)
	l.cfg.KubeProxy = KubeProxyAuto
	now := time.Now()
	expect := func(when string, after time.Duration, changed bool, level netfilter.Level) {
		t.Helper()
		before := l.dp.Program(attach.FromPod.Program())
		if got := l.follow(t, now.Add(after)); got != changed {
			t.Errorf("%s: changed: %v", when, got)
		}
		if replaced := l.dp.Program(attach.FromPod.Program()) != before; replaced != changed {
			t.Errorf("%s: programs replaced: %v", when, replaced)
		}
		if l.mode.level != level || (l.mode.where() != "") != (level > netfilter.Nothing) {
			t.Errorf("%s: level %d, %q", when, l.mode.level, l.mode.where())
		}
	}
	ready(t, l)
	const nothing, masquerades, translates = netfilter.Nothing, netfilter.Masquerades, netfilter.Translates
	expect("no rules", 0, false, nothing)
	run(t, "iptables-nft -t nat -A POSTROUTING -s 192.168.7.0/24 -j MASQUERADE")
	expect("somebody else's rule", time.Second, true, masquerades)
	run(t, "iptables-nft -t nat -A PREROUTING -d 172.18.0.99 -p udp -j DNAT --to-destination 172.18.0.11:9")
	run(t, "iptables-nft -t nat -A OUTPUT -d 172.18.0.99 -p udp -j DNAT --to-destination 172.18.0.11:9")
	expect("rules", time.Second, true, translates)
	expect("the same rules", 2*time.Second, false, translates)
	socket, err := net.Dial("udp", "172.18.0.99:9")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := socket.Write([]byte("translated")); err != nil {
		t.Fatal(err)
	}
	run(t, "iptables-nft -t nat -F PREROUTING")
	run(t, "iptables-nft -t nat -F OUTPUT")
	const gone = 2*time.Second + 10*time.Second
	expect("rules just gone", gone, false, translates)
	expect("rules gone, others' flow is there", gone+netfilter.Linger, true, masquerades)
	run(t, "iptables-nft -t nat -F POSTROUTING")
	expect("no rule left", gone+netfilter.Linger+time.Second, false, masquerades)
	expect("a flow is there", gone+2*netfilter.Linger+time.Second, false, masquerades)
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	expect("flow just gone", gone+2*netfilter.Linger+2*time.Second, false, masquerades)
	expect("all gone", gone+4*netfilter.Linger, true, nothing)
}

// Where an earlier agent has worked, its successor knows at once whose packets rules are about. What was in doubt before
// anybody knew of pods does not linger.
func TestModeBeginsWhereItWas(t *testing.T) {
	l := testLoop(t)
	l.cfg.KubeProxy = KubeProxyAuto
	run(t, "iptables-nft -t nat -A POSTROUTING -s 192.168.7.0/24 -j MASQUERADE")
	begin := func(when string, want netfilter.Level) *modeController {
		t.Helper()
		c := newMode(l.node)
		t.Cleanup(c.watch.Close)
		if c.begin(time.Now()); c.level != want || c.where() == "" {
			t.Errorf("%s: begins at level %d, %q, want level %d", when, c.level, c.where(), want)
		}
		return c
	}
	l.mode = begin("on a new node", netfilter.Translates)
	ready(t, l)
	if !l.follow(t, time.Now()) || l.mode.level != netfilter.Masquerades {
		t.Errorf("once pods are known: level %d, %q", l.mode.level, l.mode.where())
	}
	begin("after an agent", netfilter.Masquerades)
	run(t, "iptables-nft -t nat -A POSTROUTING -s 10.244.2.0/24 -j MASQUERADE")
	begin("another node's pods", netfilter.Translates)
}

// TestTranslationIsFollowedAgain has the change fail at first.
func TestTranslationIsFollowedAgain(t *testing.T) {
	l := testLoop(t)
	l.cfg.KubeProxy = KubeProxyAuto
	run(t, "iptables-nft -t nat -A POSTROUTING -j MASQUERADE")
	lock := filepath.Join(l.cfg.State, "lock")
	aside := filepath.Join(l.cfg.State, "aside")
	if err := os.Rename(lock, aside); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(lock, 0o700); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	before := l.dp.Program(attach.FromPod.Program())
	if l.follow(t, now) || l.mode.level != netfilter.Nothing || l.dp.Program(attach.FromPod.Program()) != before {
		t.Error("the mode has changed without the lock")
	}
	if err := errors.Join(os.Remove(lock), os.Rename(aside, lock)); err != nil {
		t.Fatal(err)
	}
	if l.follow(t, now.Add(time.Second)) {
		t.Error("tried again at once: the verifier's work is not free")
	}
	if !l.follow(t, now.Add(retryMode)) || l.mode.level != netfilter.Translates {
		t.Error("not tried again")
	}
}

func TestModeThatDoesNotLoadIsExplained(t *testing.T) {
	kernel := errors.New("load programs: program ec_from_pod: load program: unknown kfunc")
	if err := explainMode(kernel, netfilter.Translates); !errors.Is(err, kernel) || !strings.Contains(err.Error(), "nf_conntrack") || !strings.Contains(err.Error(), "--kube-proxy=off") {
		t.Errorf("%v", err)
	}
	for err, level := range map[error]netfilter.Level{kernel: netfilter.Nothing, errors.New("other"): netfilter.Masquerades} {
		if got := explainMode(err, level); !errors.Is(err, got) {
			t.Errorf("level %d: %v became %v", level, err, got)
		}
	}
	if err := explainMode(nil, netfilter.Translates); err != nil {
		t.Error(err)
	}
}

// A mode that is not to be had stays known until one is.
func TestFailureOfAModeIsTold(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	for _, err := range []error{errors.New("somebody holds the lock"), nil} {
		l.mode.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, err}, time.Now())
		l.judge()
		told := l.readTold(t).Degraded
		if want := err != nil; len(told) == 1 != want || want && !strings.HasSuffix(told[0].Text, "may not work: "+err.Error()) {
			t.Errorf("after %v: %v", err, told)
		}
	}
}

// One change of the programs is under way at a time, and after one that fails there is a pause: each costs the verifier's work.
func TestOneChangeOfTheModeAtATime(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	c := newMode(&node{cfg: Config{KubeProxy: KubeProxyOn}, log: log, complaints: newComplaints(log), status: newStatus(log)})
	now := time.Now()
	expect := func(when string, after time.Duration, wanted bool) {
		t.Helper()
		c.follow(now.Add(after))
		select {
		case mode := <-c.wanted:
			if !wanted || mode.level != netfilter.Translates {
				t.Errorf("%s: wanted: level %d", when, mode.level)
			}
		default:
			if wanted {
				t.Errorf("%s: nothing is wanted", when)
			}
		}
	}
	expect("at first", 0, true)
	expect("while it is under way", time.Second, false)
	c.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, errors.New("refused")}, now)
	if c.level != netfilter.Nothing || len(c.complaints.degraded()) == 0 || c.where() != "" {
		t.Errorf("after a failure: level %d, failure %v, %q", c.level, c.complaints.degraded(), c.where())
	}
	expect("just failed", retryMode-1, false)
	c.cfg.KubeProxy = KubeProxyOff
	if expect("no longer needed", retryMode, false); len(c.complaints.degraded()) != 0 {
		t.Errorf("of what is no longer needed: failure %v", c.complaints.degraded())
	}
	c.cfg.KubeProxy = KubeProxyOn
	expect("after the pause", retryMode, true)
	c.changed(t.Context(), outcome{programMode{level: netfilter.Translates}, nil}, now)
	if c.status.read().netfilter != netfilter.Translates || len(c.complaints.degraded()) != 0 || c.where() != "--kube-proxy=on" {
		t.Errorf("after it came about: %+v, failure %v, %q", c.status.read(), c.complaints.degraded(), c.where())
	}
	expect("as it should be", time.Hour, false)
}
