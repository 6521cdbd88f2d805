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
	for mode, want := range map[KubeProxyMode]bool{KubeProxyOn: true, KubeProxyOff: false, KubeProxyAuto: true} {
		log := slog.New(slog.DiscardHandler)
		c := newMode(&node{cfg: Config{KubeProxy: mode}, log: log, complaints: newComplaints(log)})
		if c.begin(time.Now()); c.beside != want {
			t.Errorf("%s: begins beside netfilter: %v", mode, c.beside)
		}
		if c.follow(time.Now()); c.changing {
			t.Errorf("%s: the programs are replaced", mode)
		}
	}
}

// follow looks and, when the mode has to change, does that too, which it reports.
func (l *loop) follow(t *testing.T, now time.Time) bool {
	t.Helper()
	l.mode.follow(now)
	select {
	case beside := <-l.mode.wanted:
		l.mode.replace(t.Context(), beside)
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
	expect := func(when string, after time.Duration, changed, beside bool) {
		t.Helper()
		before := l.dp.Program(attach.FromPod.Program())
		if got := l.follow(t, now.Add(after)); got != changed {
			t.Errorf("%s: changed: %v", when, got)
		}
		if replaced := l.dp.Program(attach.FromPod.Program()) != before; replaced != changed {
			t.Errorf("%s: programs replaced: %v", when, replaced)
		}
		if l.mode.beside != beside || (l.mode.where() != "") != beside {
			t.Errorf("%s: beside netfilter: %v, %q", when, l.mode.beside, l.mode.where())
		}
	}
	expect("no rules", 0, false, false)
	run(t, "iptables-nft -t nat -A OUTPUT -d 172.18.0.99 -p udp -j DNAT --to-destination 172.18.0.11:9")
	expect("rules", time.Second, true, true)
	expect("the same rules", 2*time.Second, false, true)
	socket, err := net.Dial("udp", "172.18.0.99:9")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := socket.Write([]byte("translated")); err != nil {
		t.Fatal(err)
	}
	run(t, "iptables-nft -t nat -F OUTPUT")
	expect("rules just gone", 3*time.Second, false, true)
	expect("rules gone, a flow is there", 3*time.Second+netfilter.Linger, false, true)
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	expect("flow just gone", 4*time.Second+netfilter.Linger, false, true)
	expect("all gone", 5*time.Second+2*netfilter.Linger, true, false)
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
	if l.follow(t, now) || l.mode.beside || l.dp.Program(attach.FromPod.Program()) != before {
		t.Error("the mode has changed without the lock")
	}
	if err := errors.Join(os.Remove(lock), os.Rename(aside, lock)); err != nil {
		t.Fatal(err)
	}
	if l.follow(t, now.Add(time.Second)) {
		t.Error("tried again at once: the verifier's work is not free")
	}
	if !l.follow(t, now.Add(retryMode)) || !l.mode.beside {
		t.Error("not tried again")
	}
}

func TestModeThatDoesNotLoadIsExplained(t *testing.T) {
	kernel := errors.New("load programs: program ec_from_pod: load program: unknown kfunc")
	if err := explainMode(kernel, true); !errors.Is(err, kernel) || !strings.Contains(err.Error(), "nf_conntrack") || !strings.Contains(err.Error(), "--kube-proxy=off") {
		t.Errorf("%v", err)
	}
	for err, beside := range map[error]bool{kernel: false, errors.New("other"): true} {
		if got := explainMode(err, beside); !errors.Is(err, got) {
			t.Errorf("beside %v: %v became %v", beside, err, got)
		}
	}
	if err := explainMode(nil, true); err != nil {
		t.Error(err)
	}
}

// A mode that is not to be had stays known until one is.
func TestFailureOfAModeIsTold(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	for _, err := range []error{errors.New("somebody holds the lock"), nil} {
		l.mode.changed(t.Context(), outcome{beside: true, err: err}, time.Now())
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
		case beside := <-c.wanted:
			if !wanted || !beside {
				t.Errorf("%s: wanted: beside netfilter %v", when, beside)
			}
		default:
			if wanted {
				t.Errorf("%s: nothing is wanted", when)
			}
		}
	}
	expect("at first", 0, true)
	expect("while it is under way", time.Second, false)
	c.changed(t.Context(), outcome{true, errors.New("refused")}, now)
	if c.beside || len(c.complaints.degraded()) == 0 || c.where() != "" {
		t.Errorf("after a failure: beside netfilter %v, failure %v, %q", c.beside, c.complaints.degraded(), c.where())
	}
	expect("just failed", retryMode-1, false)
	expect("after the pause", retryMode, true)
	c.changed(t.Context(), outcome{true, nil}, now)
	if !c.status.read().beside || len(c.complaints.degraded()) != 0 || c.where() != "--kube-proxy=on" {
		t.Errorf("after it came about: %+v, failure %v, %q", c.status.read(), c.complaints.degraded(), c.where())
	}
	expect("as it should be", time.Hour, false)
}
