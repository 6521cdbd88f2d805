package netfilter

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
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
		found             Found
		flow              Level
		rulesErr, flowErr error
		asked             int
	)
	w := &Watch{
		rules:   func(time.Time) (Found, error) { return found, rulesErr },
		flows:   func() (Level, error) { asked++; return flow, flowErr },
		tracked: func() bool { return true },
	}
	began, before := time.Now(), Nothing
	unreadable := errors.New("unreadable")
	const hour = time.Hour
	for _, step := range []struct {
		when              string
		after             time.Duration
		found, flow       Level
		rulesErr, flowErr error
		want              Level
		asked             int // for flows, so far
	}{
		{"nothing", 0, Nothing, Translates, nil, nil, Nothing, 0},
		{"unreadable rules", 0, Nothing, Translates, unreadable, nil, Nothing, 0},
		{"a rule", time.Second, Translates, Nothing, nil, nil, Translates, 0},
		{"unreadable again", hour, Nothing, Nothing, unreadable, nil, Translates, 0},
		{"a rule elsewhere", hour, Translates, Nothing, nil, nil, Translates, 0},
		{"gone", hour + time.Second, Nothing, Nothing, nil, nil, Translates, 0},
		{"gone, nearly long", hour + Linger - 1, Nothing, Nothing, nil, nil, Translates, 0},
		{"gone for long, a flow goes on", hour + Linger, Nothing, Translates, nil, nil, Translates, 1},
		{"it was asked for just now", hour + Linger + time.Second, Nothing, Nothing, nil, nil, Translates, 1},
		{"flows can't be listed", hour + 2*Linger, Nothing, Nothing, nil, unreadable, Translates, 2},
		{"none is left", hour + 3*Linger, Nothing, Nothing, nil, nil, Nothing, 3},
		{"still none", 9 * hour, Nothing, Translates, nil, nil, Nothing, 3},
		{"others' packets", 10 * hour, Masquerades, Nothing, nil, nil, Masquerades, 3},
		{"pods' as well", 11 * hour, Translates, Nothing, nil, nil, Translates, 3},
		{"others' alone", 11*hour + time.Second, Masquerades, Nothing, nil, nil, Translates, 3},
		{"for long, a pod's flow goes on", 11*hour + Linger, Masquerades, Translates, nil, nil, Translates, 4},
		{"for longer, none of a pod's does", 11*hour + 2*Linger, Masquerades, Masquerades, nil, nil, Masquerades, 5},
		{"no rule", 11*hour + 2*Linger + time.Second, Nothing, Masquerades, nil, nil, Masquerades, 5},
		{"for long, others' flow goes on", 12 * hour, Nothing, Masquerades, nil, nil, Masquerades, 6},
		{"none is left of any", 13 * hour, Nothing, Nothing, nil, nil, Nothing, 7},
		{"pods' again", 14 * hour, Translates, Nothing, nil, nil, Translates, 7},
		{"no rule, and others' flow goes on", 15 * hour, Nothing, Masquerades, nil, nil, Masquerades, 8},
		{"which lingers", 15*hour + time.Second, Nothing, Nothing, nil, nil, Masquerades, 8},
	} {
		found, flow, rulesErr, flowErr = Found{step.found, "here"}, step.flow, step.rulesErr, step.flowErr
		got, err := w.Look(began.Add(step.after), before)
		if got != step.want || asked != step.asked || (err != nil) != (step.rulesErr != nil || step.flowErr != nil) {
			t.Errorf("%s: level %d, want %d; error %v; flows asked for %d times, want %d", step.when, got, step.want, err, asked, step.asked)
		}
		if got != Nothing && w.Where(got) == "" {
			t.Errorf("%s: nothing says why", step.when)
		}
		before = got
	}
}

// In doubt an agent that starts keeps packets in netfilter's sight, unless there is nothing to translate with.
func TestBeginInDoubt(t *testing.T) {
	unreadable := errors.New("unreadable")
	for _, tt := range []struct {
		name         string
		found        Level
		rules, flows error
		tracked      bool
		begin        Level
	}{
		{"nothing there", Nothing, nil, nil, true, Nothing},
		{"unreadable rules", Nothing, unreadable, nil, true, Translates},
		{"some of the rules unreadable", Masquerades, unreadable, nil, true, Translates},
		{"unreadable flows", Nothing, nil, unreadable, true, Translates},
		{"others' packets", Masquerades, nil, nil, true, Masquerades},
		{"unreadable rules, no connection table", Nothing, unreadable, nil, false, Nothing},
	} {
		now := time.Now()
		w := &Watch{
			rules:   func(time.Time) (Found, error) { return Found{tt.found, "here"}, tt.rules },
			flows:   func() (Level, error) { return Nothing, tt.flows },
			tracked: func() bool { return tt.tracked },
		}
		got, err := w.Begin(now)
		if failed := tt.rules != nil || tt.flows != nil; got != tt.begin || (err != nil) != failed {
			t.Errorf("%s: level %d, error %v", tt.name, got, err)
		}
		w.rules = func(time.Time) (Found, error) { return Found{Level: tt.found}, nil }
		if again, err := w.Look(now.Add(time.Second), got); again != got || err != nil {
			t.Errorf("%s, a second later: level %d, error %v", tt.name, again, err)
		}
	}
}

// around is what the tests' rules are among: a node of IPv4 and IPv6 with one uplink, a tunnel, pods, and Docker's bridge.
var around = Surroundings{
	Families:      []int{unix.AF_INET},
	Pods:          prefixes("10.244.1.0/24", "10.244.2.0/24", "fd00:10:244:1::/64"),
	Own:           []netip.Addr{netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("172.17.0.1"), netip.MustParseAddr("fd00:172:18::11")},
	Unmasqueraded: prefixes("10.244.1.0/24", "10.244.2.0/24", "fd00:10:244:1::/64", "172.18.0.11/32", "172.18.0.12/32"),
	Links:         []string{"eth0", "ec-vxlan", "ec*"},
	Mark:          0x00800000,
}

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// found is what the rules of now come to.
func found(t *testing.T, among Surroundings) Found {
	t.Helper()
	r := newRules(&among)
	defer r.close()
	f, err := r.find(time.Now())
	if err != nil {
		t.Error(err)
	}
	return f
}

// TestRulesAreFound changes rules, as different programs do, under one that looks for those that translate.
func TestRulesAreFound(t *testing.T) {
	priv.Isolate(t)
	w := New()
	defer w.Close()
	w.Among(around)
	now := time.Now()
	for _, step := range []struct{ command, found string }{
		{"true", ""},
		{"iptables-nft -t filter -A FORWARD -j DROP", ""},
		{"iptables-nft -t nat -L", ""},
		{"iptables-nft -t nat -N KUBE-KUBELET-CANARY", ""},
		{"iptables-nft -t nat -A KUBE-KUBELET-CANARY -j MASQUERADE", ""}, // nobody jumps there
		{"iptables-nft -t nat -A POSTROUTING -s 10.0.0.0/8 -j MASQUERADE", "2 nftables table ip nat, chain POSTROUTING: -s 10.0.0.0/8 -j MASQUERADE"},
		{"iptables-nft -t nat -R POSTROUTING 1 -s 10.9.0.0/16 -j MASQUERADE", "1 nftables table ip nat, chain POSTROUTING: -s 10.9.0.0/16 -j MASQUERADE"},
		{"iptables-nft -t nat -A POSTROUTING -j KUBE-KUBELET-CANARY", "2 nftables table ip nat, chain KUBE-KUBELET-CANARY: -j MASQUERADE"},
		{"iptables-nft -t nat -F POSTROUTING", ""},
		{"iptables-nft -t nat -A POSTROUTING -m comment --comment nothing -j RETURN", ""},
		{"iptables-nft -t nat -F", ""},
		{"ip6tables-nft -t nat -A POSTROUTING -j MASQUERADE", ""},
		{"nft add table ip kube-proxy", ""},
		{"nft add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority -100 ; }", ""},
		{"nft add chain ip kube-proxy filter-forward { type filter hook forward priority 0 ; }", ""},
		{"nft add rule ip kube-proxy filter-forward ct state invalid drop", ""},
		{"nft add rule ip kube-proxy nat-prerouting tcp dport 80 dnat to 10.0.0.1", "2 nftables table ip kube-proxy, chain nat-prerouting: tcp dport 80 dnat to 10.0.0.1"},
		{"nft delete table ip kube-proxy", ""},
		{"nft add table inet own", ""},
		{"nft add chain inet own out { type nat hook postrouting priority 100 ; }", ""},
		{"nft add rule inet own out masquerade", "2 nftables table inet own, chain out: masquerade"},
		{"nft flush ruleset", ""},
		{"iptables-legacy -t filter -A FORWARD -j DROP", ""},
		{"iptables-legacy -t nat -L", ""},
		{"iptables-legacy -t nat -N KUBE-KUBELET-CANARY", ""},
		{"iptables-legacy -t nat -A KUBE-KUBELET-CANARY -j MASQUERADE", ""},
		{"iptables-legacy -t nat -A POSTROUTING -j KUBE-KUBELET-CANARY", "2 iptables table nat, chain KUBE-KUBELET-CANARY: -j MASQUERADE"},
		{"iptables-legacy -t nat -R KUBE-KUBELET-CANARY 1 ! -s 10.244.0.0/16 -o eth+ -j MASQUERADE", "1 iptables table nat, chain KUBE-KUBELET-CANARY: ! -s 10.244.0.0/16 -o eth+ -j MASQUERADE"},
		{"iptables-legacy -t nat -R KUBE-KUBELET-CANARY 1 ! -s 10.242.0.0/16 -o eth+ -j MASQUERADE", "2 iptables table nat, chain KUBE-KUBELET-CANARY: ! -s 10.242.0.0/16 -o eth+ -j MASQUERADE"},
		{"iptables-legacy -t nat -F POSTROUTING", ""},
	} {
		run(t, step.command)
		now = now.Add(lookAgain)
		found, err := w.rules(now)
		got := ""
		if found.Level > Nothing {
			got = fmt.Sprint(int(found.Level), " ", found.Where)
		}
		if err != nil || got != step.found {
			t.Errorf("after %s: found %q, error %v, want %q", step.command, got, err, step.found)
		}
	}
}

// Rules of IPv6 count once that is looked at, and no longer than it is.
func TestRulesOfIPv6AreFound(t *testing.T) {
	priv.Isolate(t)
	w := New()
	defer w.Close()
	both := []int{unix.AF_INET, unix.AF_INET6}
	now := time.Now()
	const newer, older = "nftables table ip6 nat, chain POSTROUTING: -j MASQUERADE", "ip6tables table nat, chain OUTPUT: -j DNAT --to-destination fd00:10:244:1::9:80"
	for _, step := range []struct {
		command string
		of      []int
		found   string
	}{
		{"ip6tables-nft -t nat -A POSTROUTING -j MASQUERADE", both[:1], ""},
		{"true", both, newer},
		{"true", both[1:], newer},
		{"true", both[:1], ""},
		{"iptables-nft -t nat -A POSTROUTING -j MASQUERADE", both[1:], newer},
		{"nft flush ruleset", both, ""},
		{"ip6tables-legacy -t nat -A OUTPUT -p tcp -j DNAT --to-destination [fd00:10:244:1::9]:80", both[:1], ""},
		{"true", both, strings.Replace(older, "-j", "-p tcp -j", 1)},
		{"ip6tables-legacy -t nat -F OUTPUT", both, ""},
	} {
		run(t, step.command)
		among := around
		among.Families = step.of
		w.Among(among)
		now = now.Add(lookAgain)
		found, err := w.rules(now)
		if err != nil || found.Where != step.found || (found.Level == Translates) != (step.found != "") {
			t.Errorf("after %s, families %v: found %+v, error %v, want %q", step.command, step.of, found, err, step.found)
		}
	}
}

// TestBeginWithoutRules starts when the rules are gone, and what they have translated is not.
func TestBeginWithoutRules(t *testing.T) {
	priv.Isolate(t)
	begin := func(when string, pods netip.Prefix, want Level) {
		t.Helper()
		w := New()
		defer w.Close()
		among := around
		among.Pods = []netip.Prefix{pods}
		w.Among(among)
		if level, err := w.Begin(time.Now()); err != nil || level != want {
			t.Errorf("%s: level %d, error %v", when, level, err)
		}
		if want > Nothing && w.Where(want) != olderFlows {
			t.Errorf("%s: %q", when, w.Where(want))
		}
	}
	pods := around.Pods[0]
	begin("nothing", pods, Nothing)
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
	begin("a flow is left", pods, Masquerades)
	begin("a pod's is left", netip.MustParsePrefix("127.0.0.0/24"), Translates)
	begin("a flow is left, and nobody knows where pods are", netip.MustParsePrefix("fd00::/64"), Translates)
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	begin("all gone", pods, Nothing)
}

func TestRubbish(t *testing.T) {
	for _, m := range [][]byte{nil, {1}, make([]byte, 4), append(make([]byte, 4), 0xff, 0xff, 1, 0), append(make([]byte, 4), 3, 0, 3, 0)} {
		if b, ok := readBase(m); ok {
			t.Errorf("%v: %v", m, b)
		}
		if len(m) > 0 {
			readRule(m)
		}
	}
}

// BenchmarkLook is what an agent does all the time.
func BenchmarkLook(b *testing.B) {
	priv.Isolate(b)
	w := New()
	defer w.Close()
	for b.Loop() {
		if _, err := w.Look(time.Now(), Nothing); err != nil {
			b.Fatal(err)
		}
	}
}
