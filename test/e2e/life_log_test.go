package e2e

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What repeats itself, and what there is very much of, does not fill the log; at rest there is none.
func TestLifeLogIsShort(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	needIPv4(t, l)
	node := l.Nodes[0]
	lines := func(of func()) (n int, text string) {
		size := len(node.LogTail(1 << 20))
		of()
		text = node.LogTail(1 << 20)[size:]
		return strings.Count(text, "\n"), text
	}
	assertAtMost := func(what string, most int, happen func()) {
		t.Helper()
		n, text := lines(happen)
		t.Logf("%s: %d lines", what, n)
		if n > most {
			t.Errorf("%s: %d lines, want at most %d:\n%s", what, n, most, text)
		}
	}
	const while = 5 * time.Second
	repeatedly := func(do func(i int)) func() {
		return func() {
			for i, end := 0, time.Now().Add(while); time.Now().Before(end); i++ {
				do(i)
				time.Sleep(50 * time.Millisecond)
			}
		}
	}
	assertAtMost("at rest", 0, func() { time.Sleep(while) })

	uplink, err := node.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: netlink.NewIPNet(net.IP(node.Addr().AsSlice()))}
	address.Mask = net.CIDRMask(24, 32)
	assertAtMost("an address comes and goes", 60, repeatedly(func(i int) {
		change := node.Netlink().AddrDel
		if i%2 == 1 {
			change = node.Netlink().AddrAdd
		}
		_ = change(uplink, address) // the default route goes with it, and is not put back
	}))
	_ = node.Netlink().AddrReplace(uplink, address)
	if err := node.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("172.18.0.1"), "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}

	assertStatus(t, node, readyLimit, "No problems.") // the last lines about the address are in the log

	pod := addPod(t, node, "a")
	files, err := filepath.Glob(filepath.Join(node.StateDir(), "endpoints", "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("state files %q, %v", files, err)
	}
	state, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	assertAtMost("a state file is corrupt", 1, func() {
		if err := os.WriteFile(files[0], []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * while)
	})
	assertStatus(t, node, changeLimit, "degraded, endpoints/state files", "agent      running, ready, degraded: endpoints\n")
	assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
	if err := os.WriteFile(files[0], state, 0o600); err != nil {
		t.Fatal(err)
	}
	assertStatus(t, node, readyLimit, "No problems.") // nobody is told of a file that is mended; the next pass looks

	// Last, since what is fought over is said for a minute after the fight.
	assertAtMost("somebody fights over a sysctl", 2, repeatedly(func(int) {
		if err := node.WriteSysctl("net/ipv4/ip_forward", "0"); err != nil {
			t.Fatal(err)
		}
	}))
	assertStatus(t, node, changeLimit, "degraded, sysctls/net/ipv4/ip_forward: somebody else", "agent      running, ready, degraded: sysctls\n")
	assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
}
