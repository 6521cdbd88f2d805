package netfilter

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

var outer = Outer{Address: netip.MustParseAddr("10.0.0.1"), Port: 4789, Mark: 0x00800000, Device: "ec-vxlan", Translated: true}

// listed is what nft shows of the table; empty: it is not there.
func listed() string {
	out, _ := exec.Command("nft", "list", "table", "ip", TableName).CombinedOutput()
	if strings.Contains(string(out), "No such file") {
		return ""
	}
	return string(out)
}

// TestTableIsKept changes the rules in every way, and others' rules.
func TestTableIsKept(t *testing.T) {
	priv.Isolate(t)
	var n Table
	ensure := func(want Outer, write bool) {
		t.Helper()
		if wrote, err := n.Ensure(time.Now(), want); wrote != write || err != nil {
			t.Errorf("wrote %v, error %v; want %v", wrote, err, write)
		}
	}
	run(t, "nft add table ip others")
	ensure(outer, true)
	good := listed()
	for _, rule := range []string{
		"ip daddr 10.0.0.1 udp dport 4789 notrack", "meta mark & 0x00800000 != 0x00000000 udp dport 4789 notrack",
		"type filter hook prerouting priority raw", "type filter hook output priority raw",
		"type filter hook input priority filter", "udp dport 4789 ct status dnat drop",
		"type filter hook postrouting priority 300", "iifname != \"ec-vxlan\" meta oiftype != ether ip saddr 10.0.0.1 udp dport 4789 drop",
	} {
		if !strings.Contains(good, rule) {
			t.Errorf("there is no %q in\n%s", rule, good)
		}
	}
	ensure(outer, false)
	run(t, "nft add chain ip others forward { type filter hook forward priority 0 ; }")
	ensure(outer, false)
	for _, change := range []string{
		"nft flush chain ip ebpf-cni output", "nft add rule ip ebpf-cni prerouting accept", "nft insert rule ip ebpf-cni prerouting drop",
		"nft delete table ip ebpf-cni", "nft add table ip ebpf-cni { flags dormant ; }",
		"nft chain ip ebpf-cni output { policy drop ; }", "nft flush ruleset", "nft flush chain ip ebpf-cni input",
	} {
		run(t, change)
		ensure(outer, true)
		if now := listed(); now != good {
			t.Errorf("after %q:\n%s\nwant\n%s", change, now, good)
		}
		ensure(outer, false)
	}
	moved := outer
	moved.Address, moved.Port = netip.MustParseAddr("10.0.0.2"), 8472
	ensure(moved, true)
	if now := listed(); !strings.Contains(now, "ip daddr 10.0.0.2 udp dport 8472") || strings.Contains(now, "4789") {
		t.Errorf("after a change of address and port:\n%s", now)
	}
	moved.Translated = false
	ensure(moved, true)
	if now := listed(); strings.Contains(now, "input") || strings.Contains(now, "ct ") {
		t.Errorf("where nothing translates:\n%s", now)
	}
	ensure(moved, false)
	if found, err := New().Look(time.Now(), Nothing); found > Nothing || err != nil {
		t.Errorf("the rules are taken for translation: %v, %v", found, err)
	}
	for range 2 {
		if err := RemoveTable(); err != nil || listed() != "" {
			t.Errorf("removed with error %v:\n%s", err, listed())
		}
	}
}

// TestRulesThatAreRefused has the kernel refuse rules. It is asked again after a minute, and until then says nothing else.
func TestRulesThatAreRefused(t *testing.T) {
	priv.Isolate(t)
	var n Table
	began := time.Now()
	for _, step := range []struct {
		after       time.Duration
		want        Outer
		wrote, fail bool
	}{
		{0, Outer{}, false, true}, // without an address to compare with
		{askAbsent - 1, outer, false, true},
		{askAbsent, outer, true, false},
		{askAbsent, outer, false, false},
	} {
		wrote, err := n.Ensure(began.Add(step.after), step.want)
		if wrote != step.wrote || (err != nil) != step.fail || errors.Is(err, ErrNoExpression) {
			t.Errorf("after %s: wrote %v, error %v; want %v, and a failure: %v", step.after, wrote, err, step.wrote, step.fail)
		}
	}
	if err := (layout{}).explain(unix.ENOENT, ErrNoExpression); !errors.Is(err, ErrNoExpression) || !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}

func TestTableOfIPv6(t *testing.T) {
	priv.Isolate(t)
	var n Table
	six := outer
	six.Address = netip.MustParseAddr("fd00::1")
	if wrote, err := n.Ensure(time.Now(), six); !wrote || err != nil {
		t.Fatalf("wrote %v, error %v", wrote, err)
	}
	out, err := exec.Command("nft", "list", "table", "ip6", TableName).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ip6 daddr fd00::1 udp dport 4789 notrack") {
		t.Errorf("%v:\n%s", err, out)
	}
	if wrote, err := n.Ensure(time.Now(), six); wrote || err != nil {
		t.Errorf("wrote %v once more, error %v", wrote, err)
	}
	if err := RemoveTable(); err != nil {
		t.Error(err)
	}
}

// TestWhatIsNotTracked sends to the port what is the tunnel's and what is not.
func TestWhatIsNotTracked(t *testing.T) {
	priv.Isolate(t)
	for _, command := range []string{
		"ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "ip addr add 10.0.0.2/32 dev lo",
		"nft add table ip others", "nft add chain ip others in { type filter hook input priority 0 ; }", "nft add rule ip others in ct state new accept",
	} {
		run(t, command)
	}
	var n Table
	if _, err := n.Ensure(time.Now(), outer); err != nil {
		t.Fatal(err)
	}
	for _, packet := range []struct {
		to      string
		mark    int
		tracked bool
	}{
		{"10.0.0.2:4789", 0, true}, // a Service's port, or a pod's
		{"10.0.0.2:4789", 0x00800000, false},
		{"10.0.0.2:4789", 0x01800001, false},
		{"10.0.0.2:4788", 0x00800000, true},
	} {
		run(t, "conntrack -F")
		dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, packet.mark) })
			return err
		}}
		c, err := dialer.Dial("udp4", packet.to)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("outer")); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		out, err := exec.Command("conntrack", "-L", "-p", "udp").CombinedOutput()
		if err != nil {
			t.Fatalf("conntrack -L: %v\n%s", err, out)
		}
		if tracked := strings.Contains(string(out), "dst=10.0.0.2"); tracked != packet.tracked {
			t.Errorf("to %s with mark %#x: tracked %v\n%s", packet.to, packet.mark, tracked, out)
		}
	}
}

// TestWhatIsTranslatedToThePort comes to a socket on the port only if it was sent there.
func TestWhatIsTranslatedToThePort(t *testing.T) {
	priv.Isolate(t)
	for _, command := range []string{
		"ip link set lo up", "ip addr add 10.0.0.1/32 dev lo", "ip route add 10.0.0.7/32 dev lo", "nft add table ip others",
		"nft add chain ip others out { type nat hook output priority -100 ; }", "nft add rule ip others out udp dport 30000 dnat to 10.0.0.1:4789",
		"nft add rule ip others out ip daddr 10.0.0.7 udp dport 4789 dnat to 10.0.0.1", "nft add rule ip others out udp dport 30001 dnat to 10.0.0.1:4790",
	} {
		run(t, command)
	}
	var n Table
	if _, err := n.Ensure(time.Now(), outer); err != nil {
		t.Fatal(err)
	}
	for _, packet := range []struct {
		to, at  string
		arrives bool
	}{
		{"10.0.0.1:4789", "10.0.0.1:4789", true},
		{"10.0.0.1:30000", "10.0.0.1:4789", false},
		{"10.0.0.7:4789", "10.0.0.1:4789", false},
		{"10.0.0.1:30001", "10.0.0.1:4790", true},
	} {
		socket, err := net.ListenPacket("udp4", packet.at)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("udp4", packet.to)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("outer")); err != nil {
			t.Fatal(err)
		}
		// What loopback delivers is there when Write returns.
		if err := socket.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, _, err = socket.ReadFrom(make([]byte, 9)); (err == nil) != packet.arrives {
			t.Errorf("to %s: %v, want it to arrive: %v", packet.to, err, packet.arrives)
		}
		_, _ = c.Close(), socket.Close()
	}
}
