package netfilter

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// peer is a namespace beside the test's, which has an end of a veth pair.
type peer struct{ netns *os.File }

// newPeer joins a peer to the test's namespace by a link of its name, with addresses of both ends.
func newPeer(t *testing.T, name string, pairs ...[2]string) *peer {
	t.Helper()
	p := &peer{}
	priv.InNetNS(t, func() (err error) {
		p.netns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	t.Cleanup(func() { _ = p.netns.Close() })
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.netns.Fd())
	there := "nsenter --net=" + path + " ip "
	const noDAD = "sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0"
	run(t, noDAD) // for links' own addresses
	run(t, "nsenter --net="+path+" "+noDAD)
	run(t, "ip link add "+name+" type veth peer name eth0 netns "+path)
	run(t, "ip link set "+name+" up")
	run(t, there+"link set eth0 up")
	for _, pair := range pairs {
		gateway, _, _ := strings.Cut(pair[0], "/")
		nodad := map[bool]string{true: " nodad"}[strings.Contains(gateway, ":")]
		run(t, "ip addr add "+pair[0]+" dev "+name+nodad)
		run(t, there+"addr add "+pair[1]+" dev eth0"+nodad)
		run(t, there+"route add default via "+gateway)
	}
	return p
}

// do calls f in the namespace; sockets that it opens stay there.
func (p *peer) do(t *testing.T, f func() error) {
	t.Helper()
	priv.InNetNS(t, func() error {
		if err := unix.Setns(int(p.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// serve answers with what it is sent to an address, by TCP and UDP.
func (p *peer) serve(t *testing.T, at string) {
	t.Helper()
	p.do(t, func() error {
		listener, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		packets, err := net.ListenPacket("udp", at)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _, _ = listener.Close(), packets.Close() })
		go func() {
			for {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c) }()
			}
		}()
		go func() {
			buffer := make([]byte, 64)
			for {
				n, from, err := packets.ReadFrom(buffer)
				if err != nil {
					return
				}
				_, _ = packets.WriteTo(buffer[:n], from)
			}
		}()
		return nil
	})
}

// dial opens a connection from there, or says that it does not open.
func (p *peer) dial(t *testing.T, network, to string, timeout time.Duration) (c net.Conn, err error) {
	t.Helper()
	p.do(t, func() error {
		dialer := net.Dialer{Timeout: timeout}
		c, err = dialer.Dial(network, to)
		return nil
	})
	if c != nil {
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// echo sends something and waits for it to come back.
func echo(c net.Conn, timeout time.Duration) error {
	_ = c.SetDeadline(time.Now().Add(timeout))
	if _, err := c.Write([]byte("there and back")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len("there and back")))
	return err
}

// translation are rules for what goes to two addresses, of which what goes to the second is masqueraded as well.
type translation struct{ name, add, remove string }

// translations has them in each form. Nothing of the form itself stays that could translate, but the older iptables' empty table.
func translations(six bool) []translation {
	tool, family, backend, a, b := "iptables", "ip", "10.1.2.2:80", "10.96.0.1", "10.96.0.2"
	if six {
		tool, family, backend, a, b = "ip6tables", "ip6", "[fd00:2::2]:80", "fd00:96::1", "fd00:96::2"
	}
	byIptables := fmt.Sprintf("*nat\n-A PREROUTING -d %s -p tcp -j DNAT --to-destination %[3]s\n-A PREROUTING -d %[1]s -p udp -j DNAT --to-destination %[3]s\n"+
		"-A PREROUTING -d %[2]s -p tcp -j DNAT --to-destination %[3]s\n-A PREROUTING -d %[2]s -p udp -j DNAT --to-destination %[3]s\n"+
		"-A POSTROUTING -m conntrack --ctorigdst %[2]s -j MASQUERADE\nCOMMIT\n", a, b, backend)
	nft := fmt.Sprintf("table %s others {\nchain in { type nat hook prerouting priority -100 ;\n%[1]s daddr { %s, %s } meta l4proto { tcp, udp } dnat to %s\n}\n"+
		"chain out { type nat hook postrouting priority 100 ;\nct original %[1]s daddr %[3]s masquerade\n}\n}\n", family, a, b, backend)
	return []translation{
		{"nft", "nft -f - <<'E'\n" + nft + "E", "nft delete table " + family + " others"},
		{tool + "-nft", tool + "-nft-restore <<'E'\n" + byIptables + "E", "nft delete table " + family + " nat"},
		{tool + "-legacy", tool + "-legacy-restore <<'E'\n" + byIptables + "E", tool + "-legacy -t nat -F"},
	}
}

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// TestBridge has connections translated, removes the rules, and at last the bridge: up to then they go on, both ways.
func TestBridge(t *testing.T) {
	for _, six := range []bool{false, true} {
		for _, rules := range translations(six) {
			t.Run(fmt.Sprintf("IPv6 %v, %s", six, rules.name), func(t *testing.T) {
				priv.Isolate(t)
				shell(t, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
				client := newPeer(t, "client", [2]string{"10.1.1.1/24", "10.1.1.2/24"}, [2]string{"fd00:1::1/64", "fd00:1::2/64"})
				server := newPeer(t, "server", [2]string{"10.1.2.1/24", "10.1.2.2/24"}, [2]string{"fd00:2::1/64", "fd00:2::2/64"})
				at, to := "10.1.2.2:80", []string{"10.96.0.1:80", "10.96.0.2:80"}
				if six {
					at, to = "[fd00:2::2]:80", []string{"[fd00:96::1]:80", "[fd00:96::2]:80"}
				}
				server.serve(t, at)
				testBridge(t, client, rules, to)
			})
		}
	}
}

func testBridge(t *testing.T, client *peer, rules translation, to []string) {
	goesOn, soon := priv.Patience(5*time.Second), 150*time.Millisecond
	shell(t, rules.add)
	open := map[string]net.Conn{}
	for _, network := range []string{"tcp", "udp"} {
		for _, at := range to {
			c, err := client.dial(t, network, at, goesOn)
			if err != nil {
				t.Fatal(err)
			}
			open[network+" "+at] = c
		}
	}
	each := func(when string, timeout time.Duration, want bool) {
		t.Helper()
		for name, c := range open {
			if err := echo(c, timeout); (err == nil) != want {
				t.Errorf("%s: %s: %v, want it to go on: %v", when, name, err, want)
			}
		}
	}
	each("rules", goesOn, true)
	var b Bridge
	defer b.Close()
	ensure := func(wrote bool) {
		t.Helper()
		if got, err := b.Ensure(time.Now()); got != wrote || err != nil {
			t.Errorf("wrote %v, error %v", got, err)
		}
	}
	ensure(true)
	each("rules and the bridge", goesOn, true)
	shell(t, rules.remove)
	each("the bridge", goesOn, true)
	run(t, "nft add rule inet "+BridgeName+" input accept")
	ensure(true)
	ensure(false)
	each("the bridge, written anew", goesOn, true)
	if c, err := client.dial(t, "tcp", to[0], soon); err == nil {
		t.Errorf("without rules a new connection opens: %v", c.RemoteAddr())
	}
	shell(t, rules.add)
	shell(t, rules.remove)
	each("rules that came and went", goesOn, true)
	for range 2 {
		if err := RemoveBridge(); err != nil {
			t.Error(err)
		}
	}
	each("nothing", soon, false)
}

// Nothing is translated by the bridge, as it is to be seen by those who look for translation; and it is kept as it is.
func TestBridgeIsNoTranslation(t *testing.T) {
	priv.Isolate(t)
	var b Bridge
	defer b.Close()
	if wrote, err := b.Ensure(time.Now()); !wrote || err != nil {
		t.Fatalf("wrote %v, error %v", wrote, err)
	}
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !strings.Contains(string(out), "table inet ebpf-cni-flows {") {
		t.Error(err)
	}
	expect(t, around, Nothing, "")
	w := New()
	defer w.Close()
	if level, err := w.Begin(time.Now()); level != Nothing || err != nil {
		t.Errorf("level %d, error %v", level, err)
	}
	var k KubeProxy
	defer k.Close()
	stands(t, &k, "the bridge", time.Now(), Standing{})
	for _, change := range []string{"flush ruleset", "flush table inet ebpf-cni-flows", "add table inet ebpf-cni-flows { flags dormant ; }"} {
		run(t, "nft "+change)
		if wrote, err := b.Ensure(time.Now()); !wrote || err != nil {
			t.Errorf("after %s: wrote %v, error %v", change, wrote, err)
		}
	}
	for _, step := range []struct {
		change string
		stands bool
	}{{"add table ip some", true}, {"flush chain inet ebpf-cni-flows input", false}, {"delete table inet ebpf-cni-flows", false}} {
		run(t, "nft "+step.change)
		other := new(Bridge)
		if other.Stands() != step.stands {
			t.Errorf("after %s it stands: %v", step.change, !step.stands)
		}
		other.Close()
	}
	if wrote, err := b.Ensure(time.Now()); !wrote || err != nil {
		t.Errorf("after it was removed: wrote %v, error %v", wrote, err)
	}
	run(t, "nft add table ip others")
	if wrote, err := b.Ensure(time.Now()); wrote || err != nil {
		t.Errorf("after something else: wrote %v, error %v", wrote, err)
	}
}

// A kernel that can't have the table says why, for a minute.
func TestNoBridge(t *testing.T) {
	err := (layout{name: BridgeName}).explain(unix.ENOENT, ErrNoBridge)
	if !errors.Is(err, ErrNoBridge) || errors.Is(err, ErrNoExpression) || !strings.Contains(err.Error(), BridgeName) {
		t.Error(err)
	}
	now := time.Now()
	b := Bridge{kept{absent: now, refused: err}}
	if wrote, again := b.Ensure(now.Add(askAbsent - 1)); wrote || !errors.Is(again, ErrNoBridge) {
		t.Errorf("wrote %v, error %v", wrote, again)
	}
}
