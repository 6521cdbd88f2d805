package netfilter

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// forwarding is about the pods of the client that TestForward has.
func forwarding(accept bool) Forwarding {
	return Forwarding{Pods: []netip.Prefix{netip.MustParsePrefix("10.1.1.0/24"), netip.MustParsePrefix("fd00:1::/64")},
		Inner: []string{"pod*"}, Outer: []string{"server", "tunnel"}, Accept: accept}
}

// dropped are forward chains whose policy is to drop, in each form: what makes one, what lists it, and what makes it accept.
func dropping() map[string][3]string {
	forms := map[string][3]string{
		"nft": {"nft -f - <<'E'\ntable inet others {\nchain forward { type filter hook forward priority 0 ; policy drop ;\nct state established,related counter accept\n}\n}\nE",
			"nft list chain inet others forward", "nft add chain inet others forward '{ policy accept ; }'"},
		"nft by family": {"for f in ip ip6; do nft -f - <<E\ntable $f others {\nchain forward { type filter hook forward priority 0 ; policy drop ;\nct state established,related counter accept\n}\n}\nE\ndone",
			"nft list table ip others && nft list table ip6 others", "for f in ip ip6; do nft add chain $f others forward '{ policy accept ; }'; done"},
	}
	for _, variant := range []string{"nft", "legacy"} {
		each := func(command string) string {
			return fmt.Sprintf("for i in iptables-%s ip6tables-%[1]s; do $i %s; done", variant, command)
		}
		forms["iptables-"+variant] = [3]string{
			each("-P FORWARD DROP") + "\n" + each("-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT") + "\n" + each("-N OTHERS") + "\n" + each("-A FORWARD -p udp -j OTHERS"),
			each("-S"), each("-P FORWARD ACCEPT"),
		}
	}
	return forms
}

func output(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// TestForward has pods open connections past a policy of DROP, in both directions and families, by each form of rules.
func TestForward(t *testing.T) {
	for name, form := range dropping() {
		t.Run(name, func(t *testing.T) {
			priv.Isolate(t)
			shell(t, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
			client := newPeer(t, "pod1", [2]string{"10.1.1.1/24", "10.1.1.2/24"}, [2]string{"fd00:1::1/64", "fd00:1::2/64"})
			server := newPeer(t, "server", [2]string{"10.1.2.1/24", "10.1.2.2/24"}, [2]string{"fd00:2::1/64", "fd00:2::2/64"})
			for _, at := range []string{"10.1.1.2:80", "[fd00:1::2]:80"} {
				client.serve(t, at)
			}
			for _, at := range []string{"10.1.2.2:80", "[fd00:2::2]:80"} {
				server.serve(t, at)
			}
			opens := func(when string, want bool) {
				t.Helper()
				timeout := map[bool]time.Duration{true: priv.Patience(5 * time.Second), false: 100 * time.Millisecond}[want]
				for at, from := range map[string]*peer{"10.1.2.2:80": client, "[fd00:2::2]:80": client, "10.1.1.2:80": server, "[fd00:1::2]:80": server} {
					if _, err := from.dial(t, "tcp", at, timeout); (err == nil) != want {
						t.Errorf("%s: to %s: %v, want it to open: %v", when, at, err, want)
					}
				}
			}
			testForward(t, form, opens)
		})
	}
}

func testForward(t *testing.T, form [3]string, opens func(string, bool)) {
	f := Forward{Lock: filepath.Join(t.TempDir(), "lock")}
	defer f.Close()
	now := time.Now()
	look := func(when string, want Forwarding, drops int, wrote bool) {
		t.Helper()
		now = now.Add(time.Minute)
		found, accepted, err := f.Look(now, want)
		if err != nil || len(found) != drops || (len(accepted) > 0) != wrote {
			t.Errorf("%s: drops %+v, accepted %q, error %v; want %d, %v", when, found, accepted, err, drops, wrote)
		}
	}
	accept := forwarding(true)
	look("nothing", accept, 0, false)
	shell(t, form[0])
	opens("policy", false)
	chains := 2
	if strings.Contains(form[0], "inet") {
		chains = 1
	}
	before := output(t, form[1])
	look("off", forwarding(false), chains, false)
	look("auto", accept, 0, true)
	opens("auto", true)
	with := output(t, form[1])
	t.Log(with)
	if n := strings.Count(with, ForwardComment); n != 4 {
		t.Errorf("%d rules, want one of each podCIDR and direction:\n%s", n, with)
	}
	look("again", accept, 0, false)
	if again := output(t, form[1]); withoutCounters(again) != withoutCounters(with) {
		t.Errorf("changed by a second look:\n%s", again)
	}
	moved := accept
	moved.Pods = []netip.Prefix{netip.MustParsePrefix("10.1.7.0/24"), accept.Pods[1]}
	look("another podCIDR", moved, 0, true)
	if s := output(t, form[1]); !strings.Contains(s, "10.1.7.0/24") || strings.Contains(s, "10.1.1.0/24") {
		t.Errorf("rules of another podCIDR:\n%s", s)
	}
	look("the first podCIDR", accept, 0, true)
	shell(t, form[2])
	look("policy accept", accept, 0, false)
	if s := output(t, form[1]); strings.Contains(s, ForwardComment) {
		t.Errorf("left when the policy accepts:\n%s", s)
	}
	opens("policy accept", true)
	shell(t, strings.NewReplacer("-P FORWARD ACCEPT", "-P FORWARD DROP", "policy accept", "policy drop").Replace(form[2]))
	look("drop once more", accept, 0, true)
	if err := RemoveForward(); err != nil {
		t.Error(err)
	}
	if after := output(t, form[1]); withoutCounters(after) != withoutCounters(before) {
		t.Errorf("left after removal:\n%s\nbefore:\n%s", after, before)
	}
	opens("removed", false)
}

func withoutCounters(s string) string {
	words := strings.Fields(s)
	for i, w := range words {
		if i > 0 && (words[i-1] == "packets" || words[i-1] == "bytes") && w != "" {
			words[i] = "N"
		}
	}
	return strings.Join(words, " ")
}

// Accepts that somebody removes are put back, with counters kept in tables of the older iptables.
func TestForwardIsPutBack(t *testing.T) {
	for _, variant := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			write(t, "*filter\n:FORWARD DROP [7:420]\n:OTHERS - [0:0]\n[5:300] -A FORWARD -i x -j OTHERS\n[6:360] -A OTHERS -p tcp\n[3:180] -A OTHERS -j RETURN\nCOMMIT\n", variant+"-restore", "-c")
			f := Forward{Lock: filepath.Join(t.TempDir(), "lock")}
			defer f.Close()
			now := time.Now()
			for _, disturb := range []string{"true", variant + " -D FORWARD 1", variant + " -D FORWARD -s 10.1.1.0/24 -m comment --comment '" + ForwardComment + "' -j ACCEPT", variant + " -D FORWARD 2 && " + variant + " -D FORWARD 1"} {
				shell(t, disturb)
				now = now.Add(time.Minute)
				if _, accepted, err := f.Look(now, forwarding(true)); err != nil || len(accepted) != 1 {
					t.Errorf("after %s: accepted %q, error %v", disturb, accepted, err)
				}
				rules := output(t, variant+"-save -c -t filter")
				for _, line := range []string{
					":FORWARD DROP [", "-s 10.1.1.0/24 -m comment --comment \"" + ForwardComment + "\" -j ACCEPT\n", "-d 10.1.1.0/24 -m comment --comment \"" + ForwardComment + "\" -j ACCEPT\n",
					"[5:300] -A FORWARD -i x -j OTHERS\n[6:360] -A OTHERS -p tcp\n[3:180] -A OTHERS -j RETURN\n",
				} {
					if strings.Count(rules, line) != 1 {
						t.Errorf("after %s no, or several %s in\n%s", disturb, line, rules)
					}
				}
				// What is listed can be written again.
				write(t, rules, variant+"-restore", "-c")
				now = now.Add(time.Minute)
				if _, accepted, err := f.Look(now, forwarding(true)); err != nil || len(accepted) != 0 {
					t.Errorf("after %s, written anew by iptables: accepted %q, error %v", disturb, accepted, err)
				}
			}
		})
	}
}

// What Debian's firewalld 1.3 and ufw 0.36 write, as far as it is about forwarding.
const (
	firewalldForward = `table inet firewalld {
	chain filter_FWD_policy_ebpf-cni {
		accept
	}
	chain filter_FORWARD_POLICIES_pre {
%TO%
	}
	chain filter_FWD_trusted {
		jump filter_FORWARD_POLICIES_pre
		accept
	}
	chain filter_FWD_public {
		jump filter_FORWARD_POLICIES_pre
		reject with icmpx admin-prohibited
	}
	chain filter_FORWARD_ZONES {
%PODS%
		goto filter_FWD_public
	}
	chain filter_FORWARD {
		type filter hook forward priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		ip6 daddr { ::/96, ::ffff:0.0.0.0/96, 2002::/24, 2002:a00::/24 } reject with icmpv6 addr-unreachable
		jump filter_FORWARD_ZONES
		reject with icmpx admin-prohibited
	}
}
`
	ufwForward = `*filter
:FORWARD DROP [0:0]
:ufw-before-forward - [0:0]
:ufw-before-logging-forward - [0:0]
:ufw-reject-forward - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-logging-forward
-A FORWARD -j ufw-before-forward
-A FORWARD -j ufw-reject-forward
-A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-forward -p icmp -m icmp --icmp-type 3 -j ACCEPT
-A ufw-before-forward -j ufw-user-forward
%REJECT%%USER%COMMIT
`
	ufwReject = "-A ufw-reject-forward -j REJECT --reject-with icmp-port-unreachable\n"
)

// Rules that drop pods' packets are named, with what mends it; those that may be meant for others, or for some packets alone, are not.
func TestForwardDrops(t *testing.T) {
	filter := func(policy string, lines ...string) string {
		return "*filter\n:FORWARD " + policy + " [0:0]\n:OTHERS - [0:0]\n-A " + strings.Join(lines, "\n-A ") + "\nCOMMIT\n"
	}
	nft := func(rules ...string) string {
		return "table inet fw {\nchain more {\n" + rules[0] + "\n}\nchain forward { type filter hook forward priority 0 ;\n" + strings.Join(rules[1:], "\n") + "\n}\n}\n"
	}
	const mends = " -t filter -I FORWARD -s 10.1.1.0/24 -j ACCEPT && "
	for name, tt := range map[string]struct {
		rules, rule, remedy string
		accepts             bool
	}{
		"all":                         {filter("ACCEPT", "FORWARD -j REJECT"), "reject", mends, false},
		"all in the end":              {filter("ACCEPT", "FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT", "FORWARD -j LOG", "FORWARD -j DROP"), "drop", mends, false},
		"elsewhere":                   {filter("DROP", "FORWARD -j OTHERS", "OTHERS -j DROP"), "drop", "", false},
		"what pods send":              {filter("ACCEPT", "FORWARD -s 10.0.0.0/8 -j DROP"), "10.0.0.0/8", "", false},
		"what pods' links send":       {filter("ACCEPT", "FORWARD -i pod+ -j DROP"), "pod", "", false},
		"other links":                 {filter("ACCEPT", "FORWARD ! -i docker0 -j DROP"), "docker0", "", false},
		"one of the links out":        {filter("DROP", "FORWARD -o server -j DROP"), "", "", true},
		"what containers send":        {filter("DROP", "FORWARD -i docker0 ! -o docker0 -j DROP", "FORWARD -s 172.17.0.0/16 -j DROP"), "", "", true},
		"what a pod sends":            {filter("DROP", "FORWARD -s 10.1.1.7 -j DROP", "FORWARD -d 192.0.2.1 -j REJECT"), "", "", true},
		"a port, a state":             {filter("DROP", "FORWARD -p tcp --dport 25 -j DROP", "FORWARD -m conntrack --ctstate INVALID -j DROP"), "", "", true},
		"accepted":                    {filter("DROP", "FORWARD -s 10.1.0.0/16 -j ACCEPT", "FORWARD -d 10.1.0.0/16 -j OTHERS", "OTHERS -j ACCEPT"), "", "", false},
		"accepted one way":            {filter("ACCEPT", "FORWARD -s 10.1.0.0/16 -j ACCEPT", "FORWARD -j REJECT"), "reject", "", false},
		"returned":                    {filter("ACCEPT", "FORWARD -j OTHERS", "OTHERS -s 10.1.0.0/16 -j RETURN", "OTHERS -d 10.1.0.0/16 -j RETURN", "OTHERS -j DROP"), "", "", false},
		"gone to where it ends":       {filter("ACCEPT", "FORWARD -g OTHERS", "FORWARD -j DROP"), "", "", false},
		"a policy behind what is not": {filter("DROP", "FORWARD -g OTHERS", "FORWARD -j DROP"), "", "", true},
		"nft":                         {nft("", "ct state established,related accept", "counter reject with icmpx admin-prohibited"), "reject", "nft insert rule inet fw forward ip saddr 10.1.1.0/24 accept && nft insert rule inet fw forward ip daddr", false},
		"nft of IPv4":                 {nft("", "meta nfproto ipv4 drop"), "drop", "", false},
		"nft elsewhere":               {nft("drop", `iifname "lo" accept`, "goto more"), "drop", "nft insert rule inet fw more ip saddr", false},
		"nft by a map":                {nft("drop", "ct state vmap { invalid : drop, new : jump more }"), "", "", false},
		"nft of others":               {nft("drop", `iifname "docker0" jump more`, "ct state invalid drop", "limit rate over 10/second drop", "ip protocol gre drop", "meta nfproto ipv6 accept", "ip6 saddr ::/0 drop"), "", "", false},
		"firewalld":                   {of(firewalldForward, "%PODS%", "", "%TO%", ""), "reject", "firewall-cmd --permanent --zone=trusted --add-source=10.1.1.0/24; ", false},
		"firewalld with the remedy": {of(firewalldForward, "%PODS%", "ip saddr 10.1.1.0/24 goto filter_FWD_trusted\nip6 saddr fd00:1::/64 goto filter_FWD_trusted",
			"%TO%", "ip6 daddr fd00:1::/64 jump filter_FWD_policy_ebpf-cni\nip daddr 10.1.1.0/24 jump filter_FWD_policy_ebpf-cni"), "", "", false},
		"ufw":                           {of(ufwForward, "%REJECT%", "", "%USER%", ""), "", "", true},
		"ufw that rejects":              {of(ufwForward, "%REJECT%", ufwReject, "%USER%", ""), "reject", "ufw route allow from 10.1.1.0/24 && ufw route allow to 10.1.1.0/24", false},
		"ufw that rejects, with remedy": {of(ufwForward, "%REJECT%", ufwReject, "%USER%", "-A ufw-user-forward -s 10.1.1.0/24 -j ACCEPT\n-A ufw-user-forward -d 10.1.1.0/24 -j ACCEPT\n"), "", "", false},
	} {
		variants := [][]string{{"iptables-nft-restore"}, {"iptables-legacy-restore"}}
		if strings.HasPrefix(tt.rules, "table") {
			variants = [][]string{{"nft", "-f", "-"}}
		}
		for _, with := range variants {
			t.Run(name+" by "+with[0], func(t *testing.T) {
				priv.Isolate(t)
				write(t, tt.rules, with...)
				f := Forward{Lock: filepath.Join(t.TempDir(), "lock")}
				defer f.Close()
				found, accepted, err := f.Look(time.Now(), forwarding(true))
				if err != nil || (len(accepted) > 0) != tt.accepts || (len(found) > 0) != (tt.rule != "") {
					t.Fatalf("drops %+v, accepted %q, error %v; want accepts %v", found, accepted, err, tt.accepts)
				}
				if says := func(d ForwardDrop) bool {
					return strings.Contains(strings.ToLower(d.Rule), strings.ToLower(tt.rule)) && strings.Contains(d.Remedy, tt.remedy)
				}; tt.rule != "" && !slices.ContainsFunc(found, says) {
					t.Errorf("%+v", found)
				}
				if found == nil || strings.HasPrefix(name, "firewalld") || strings.HasPrefix(name, "ufw") {
					return
				}
				// What is said to mend it does so.
				shell(t, found[0].Remedy)
				if found, _, err := f.Look(time.Now().Add(time.Minute), forwarding(true)); len(found) > 0 || err != nil {
					t.Errorf("after %s: %+v, error %v", found[0].Remedy, found, err)
				}
			})
		}
	}
}
