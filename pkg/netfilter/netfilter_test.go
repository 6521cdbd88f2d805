package netfilter

import (
	"errors"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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

// What is found, and what becomes of it. No rule and no flow is asked for in vain.
func TestWhenTranslationBeginsLingersAndEnds(t *testing.T) {
	var (
		where             string
		flow              bool
		rulesErr, flowErr error
		asked             int
	)
	w := &Watch{
		rules:   func(time.Time) (string, error) { return where, rulesErr },
		flows:   func() (bool, error) { asked++; return flow, flowErr },
		tracked: func() bool { return true },
	}
	began, before := time.Now(), false
	unreadable := errors.New("unreadable")
	for _, step := range []struct {
		when              string
		after             time.Duration
		where             string
		flow              bool
		rulesErr, flowErr error
		want              bool
		asked             int // for flows, so far
	}{
		{"nothing", 0, "", true, nil, nil, false, 0},
		{"unreadable rules", 0, "", true, unreadable, nil, false, 0},
		{"a rule", time.Second, "here", false, nil, nil, true, 0},
		{"unreadable again", time.Hour, "", false, unreadable, nil, true, 0},
		{"a rule elsewhere", time.Hour, "there", false, nil, nil, true, 0},
		{"gone", time.Hour + time.Second, "", false, nil, nil, true, 0},
		{"gone, nearly long", time.Hour + Linger - 1, "", false, nil, nil, true, 0},
		{"gone for long, a flow goes on", time.Hour + Linger, "", true, nil, nil, true, 1},
		{"it was asked for just now", time.Hour + Linger + time.Second, "", false, nil, nil, true, 1},
		{"flows can't be listed", time.Hour + 2*Linger, "", false, nil, unreadable, true, 2},
		{"none is left", time.Hour + 3*Linger, "", false, nil, nil, false, 3},
		{"still none", 9 * time.Hour, "", true, nil, nil, false, 3},
	} {
		where, flow, rulesErr, flowErr = step.where, step.flow, step.rulesErr, step.flowErr
		got, err := w.Look(began.Add(step.after), before)
		if got != step.want || asked != step.asked || (err != nil) != (step.rulesErr != nil || step.flowErr != nil) {
			t.Errorf("%s: translates %v, want %v; error %v; flows asked for %d times, want %d", step.when, got, step.want, err, asked, step.asked)
		}
		before = got
	}
}

// In doubt an agent that starts keeps packets in netfilter's sight, unless there is nothing to translate with.
func TestBeginInDoubt(t *testing.T) {
	unreadable := errors.New("unreadable")
	for _, tt := range []struct {
		name           string
		rules, flows   error
		tracked, begin bool
	}{
		{"nothing there", nil, nil, true, false},
		{"unreadable rules", unreadable, nil, true, true},
		{"unreadable flows", nil, unreadable, true, true},
		{"unreadable rules, no connection table", unreadable, nil, false, false},
	} {
		now := time.Now()
		w := &Watch{
			rules:   func(time.Time) (string, error) { return "", tt.rules },
			flows:   func() (bool, error) { return false, tt.flows },
			tracked: func() bool { return tt.tracked },
		}
		got, err := w.Begin(now)
		if failed := tt.rules != nil || tt.flows != nil; got != tt.begin || (err != nil) != failed {
			t.Errorf("%s: translates %v, error %v", tt.name, got, err)
		}
		w.rules = func(time.Time) (string, error) { return "", nil }
		if again, err := w.Look(now.Add(time.Second), got); again != got || err != nil {
			t.Errorf("%s, a second later: translates %v, error %v", tt.name, again, err)
		}
	}
}

// TestRulesAreFound changes rules, as different programs do, under one that looks for those that translate.
func TestRulesAreFound(t *testing.T) {
	priv.Isolate(t)
	w := New()
	defer w.Close()
	for _, step := range []struct{ command, found string }{
		{"true", ""},
		{"iptables-nft -t filter -A FORWARD -j DROP", ""},
		{"iptables-nft -t nat -L", ""},
		{"iptables-nft -t nat -N KUBE-KUBELET-CANARY", ""},
		{"iptables-nft -t nat -A KUBE-KUBELET-CANARY -j RETURN", ""}, // nobody jumps there
		{"iptables-nft -t nat -A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE", "nftables table ip nat, chain POSTROUTING"},
		{"iptables-nft -t nat -A PREROUTING -j KUBE-KUBELET-CANARY", "nftables table ip nat, chain POSTROUTING"},
		{"iptables-nft -t nat -F POSTROUTING", "nftables table ip nat, chain PREROUTING"},
		{"iptables-nft -t nat -F", ""},
		{"ip6tables-nft -t nat -A POSTROUTING -j MASQUERADE", ""},
		{"nft add table ip kube-proxy", ""},
		{"nft add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }", ""},
		{"nft add chain ip kube-proxy filter-forward { type filter hook forward priority 0 ; }", ""},
		{"nft add rule ip kube-proxy filter-forward ct state invalid drop", ""},
		{"nft add rule ip kube-proxy nat-prerouting tcp dport 80 dnat to 10.0.0.1", "nftables table ip kube-proxy, chain nat-prerouting"},
		{"nft delete table ip kube-proxy", ""},
		{"nft add table inet own", ""},
		{"nft add chain inet own out { type nat hook postrouting priority 100 ; }", ""},
		{"nft add rule inet own out masquerade", "nftables table inet own, chain out"},
		{"nft flush ruleset", ""},
		{"iptables-legacy -t filter -A FORWARD -j DROP", ""},
		{"iptables-legacy -t nat -L", ""},
		{"iptables-legacy -t nat -N KUBE-KUBELET-CANARY", ""},
		{"iptables-legacy -t nat -A KUBE-KUBELET-CANARY -j RETURN", ""},
		{"iptables-legacy -t nat -A OUTPUT -j KUBE-KUBELET-CANARY", "iptables table nat"},
		{"iptables-legacy -t nat -F OUTPUT", ""},
	} {
		run(t, step.command)
		w.where = ""
		translates, err := w.Look(time.Now(), false)
		if err != nil || w.where != step.found || translates != (step.found != "") {
			t.Errorf("after %s: found %q, translates %v, error %v, want %q", step.command, w.where, translates, err, step.found)
		}
	}
}

// Rules of IPv6 count once that is looked at, and no longer than it is.
func TestRulesOfIPv6AreFound(t *testing.T) {
	priv.Isolate(t)
	w := New()
	defer w.Close()
	both := []int{unix.AF_INET, unix.AF_INET6}
	for _, step := range []struct {
		command string
		of      []int
		found   string
	}{
		{"ip6tables-nft -t nat -A POSTROUTING -j MASQUERADE", both[:1], ""},
		{"true", both, "nftables table ip6 nat, chain POSTROUTING"},
		{"true", both[1:], "nftables table ip6 nat, chain POSTROUTING"},
		{"true", both[:1], ""},
		{"iptables-nft -t nat -A POSTROUTING -j MASQUERADE", both[1:], "nftables table ip6 nat, chain POSTROUTING"},
		{"nft flush ruleset", both, ""},
		{"ip6tables-legacy -t nat -A OUTPUT -j RETURN", both[:1], ""},
		{"true", both, "ip6tables table nat"},
		{"ip6tables-legacy -t nat -F OUTPUT", both, ""},
	} {
		run(t, step.command)
		w.where = ""
		w.Of(step.of)
		translates, err := w.Look(time.Now(), false)
		if err != nil || w.where != step.found || translates != (step.found != "") {
			t.Errorf("after %s, families %v: found %q, translates %v, error %v, want %q", step.command, step.of, w.where, translates, err, step.found)
		}
	}
}

// TestBeginWithoutRules starts when the rules are gone, and what they have translated is not.
func TestBeginWithoutRules(t *testing.T) {
	priv.Isolate(t)
	begin := func(when string, want bool) {
		t.Helper()
		w := New()
		defer w.Close()
		if translates, err := w.Begin(time.Now()); err != nil || translates != want {
			t.Errorf("%s: translates %v, error %v", when, translates, err)
		}
		if want && w.Where() != olderFlows {
			t.Errorf("%s: %q", when, w.Where())
		}
	}
	begin("nothing", false)
	run(t, "ip link set lo up")
	run(t, "iptables-nft -t nat -A OUTPUT -d 127.0.0.99 -p udp -j DNAT --to-destination 127.0.0.1:9")
	socket, err := net.Dial("udp", "127.0.0.99:9")
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	if _, err := socket.Write([]byte("translated")); err != nil {
		t.Fatal(err)
	}
	run(t, "iptables-nft -t nat -F OUTPUT")
	begin("a flow is left", true)
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	begin("all gone", false)
}

func TestNATChainInRubbish(t *testing.T) {
	for _, m := range [][]byte{nil, {1}, make([]byte, 4), append(make([]byte, 4), 0xff, 0xff, 1, 0), append(make([]byte, 4), 3, 0, 3, 0)} {
		if c := readNATChain(m); c != (natChain{}) {
			t.Errorf("%v: %v", m, c)
		}
	}
}

// BenchmarkLook is what an agent does all the time.
func BenchmarkLook(b *testing.B) {
	priv.Isolate(b)
	w := New()
	defer w.Close()
	for b.Loop() {
		if _, err := w.Look(time.Now(), false); err != nil {
			b.Fatal(err)
		}
	}
}
