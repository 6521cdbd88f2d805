package agent

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

// hasBridge says whether the table is there by which translated connections live on.
func hasBridge(t *testing.T) bool {
	t.Helper()
	out, err := exec.Command("nft", "list", "tables").CombinedOutput()
	if err != nil {
		t.Fatalf("list tables: %v: %s", err, out)
	}
	return strings.Contains(string(out), "table inet "+netfilter.BridgeName+"\n")
}

// The table stands from the first rule of somebody who translates on, until neither rules nor their connections are left.
func TestBridgeStandsWhileNetfilterTranslates(t *testing.T) {
	l := testAuto(t)
	said := logged(l)
	now := time.Now()
	expect := func(when string, after time.Duration, want bool) {
		t.Helper()
		l.follow(t, now.Add(after))
		l.inspect(t.Context())
		if got := hasBridge(t); got != want {
			t.Errorf("%s: it stands: %v", when, got)
		}
	}
	expect("no rules", 0, false)
	nat(t, "iptables-nft", kubeProxysRules)
	expect("rules", time.Second, true)
	nat(t, "iptables-nft", kubeProxysEnd)
	run(t, "nft delete table ip nat")
	expect("no rules any more", 10*time.Second, true)
	run(t, "nft flush ruleset")
	expect("removed by somebody", 11*time.Second, true)
	expect("for long", 11*time.Second+2*netfilter.Linger, false)
	for _, line := range []string{"outlive its rules restored", `msg="connections that netfilter translates outlive its rules"`, `table removed"=ebpf-cni-flows`} {
		if n := strings.Count(said.String(), line); n != 1 {
			t.Errorf("said %d times: %s\n%s", n, line, said)
		}
	}
}

// Where the programs serve no Services there is none, and what an earlier agent has left goes when nothing is translated.
func TestNoBridgeWithoutServices(t *testing.T) {
	l := testAuto(t)
	nat(t, "iptables-nft", kubeProxysRules)
	l.cfg.Services = ServicesOff
	l.follow(t, time.Now())
	l.inspect(t.Context())
	if l.mode.level != netfilter.Translates || hasBridge(t) {
		t.Errorf("it stands, at level %d", l.mode.level)
	}
	var earlier netfilter.Bridge
	defer earlier.Close()
	if _, err := earlier.Ensure(time.Now()); err != nil {
		t.Fatal(err)
	}
	nat(t, "iptables-nft", kubeProxysEnd)
	l.bridge = &bridgeController{node: l.node, mode: newMode(l.node)}
	for range 2 {
		must(t, l.bridge.follow(&l.state))
		if hasBridge(t) {
			t.Error("what an earlier agent has left stands")
		}
	}
}

// A kernel that refuses the table degrades the node, which is logged once.
func TestBridgeThatIsRefused(t *testing.T) {
	l := testAuto(t)
	said := logged(l)
	l.mode.found = netfilter.Translates
	refused := false
	withoutNetAdmin(t, func() {
		for range 3 {
			refused = l.bridge.follow(&l.state) != nil
			l.doSteps(t.Context(), onTick)
		}
	})
	const about = "mode/pass"
	if text := l.complaints.degraded()[about]; !refused || !strings.HasPrefix(text, "connections that netfilter translates would end with the last of its rules: ") {
		t.Errorf("degraded by %q", text)
	}
	if n := strings.Count(said.String(), about); n != 1 {
		t.Errorf("said %d times:\n%s", n, said)
	}
	l.doSteps(t.Context(), onTick)
	if text := l.complaints.degraded()[about]; text != "" || !hasBridge(t) {
		t.Errorf("still degraded by %q", text)
	}
}

// withoutNetAdmin calls f on a thread that may not change the network, which stands for a kernel that does not let it.
func withoutNetAdmin(t *testing.T, f func()) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has, less [2]unix.CapUserData
	must(t, unix.Capget(&header, &has[0]))
	less = has
	less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	must(t, unix.Capset(&header, &less[0]))
	defer func() { must(t, unix.Capset(&header, &has[0])) }()
	f()
}

// A node that the agent leaves for good keeps nothing of it.
func TestCleanupRemovesTheBridge(t *testing.T) {
	l := testAuto(t)
	l.mode.found = netfilter.Translates
	l.inspect(t.Context())
	if !hasBridge(t) {
		t.Error("there is none to remove")
	}
	must(t, Cleanup(t.Context(), l.cfg.Directories, l.log))
	if hasBridge(t) {
		t.Error("it is left")
	}
}
