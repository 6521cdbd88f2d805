package netfilter

import (
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What a firewall, wg-quick and Tailscale write, and a router with two providers.
const (
	mangle        = "*mangle\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n%\nCOMMIT\n"
	saveSockets   = "-A POSTROUTING -p udp -m mark --mark 0xca6c -j CONNMARK --save-mark"
	restore       = "-A PREROUTING -p udp -j CONNMARK --restore-mark"
	premangle     = "chain premangle { type filter hook prerouting priority -150; meta l4proto udp meta mark set ct mark; }\n"
	postmangle    = "chain postmangle { type filter hook postrouting priority -150; meta l4proto udp mark 0xca6c ct mark set mark; }\n"
	markForwarded = "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i tailscale0 -j MARK --set-xmark 0x40000/0xff0000\nCOMMIT\n"
)

func TestMarksOfPods(t *testing.T) {
	mangled := func(rules ...string) string { return of(mangle, "%", strings.Join(rules, "\n")) }
	nft := func(chains string) string { return "table ip own {\n" + chains + "}\n" }
	for _, tt := range []struct {
		name, rules string
		bits        uint32
		where       string // a part of it; empty: no pod's packet is marked
	}{
		{"none", mangled(), ^uint32(0), ""},
		{"pods' packets", mangled("-A PREROUTING -p tcp --dport 7 -j MARK --set-mark 0x10"), 0xf0, "chain PREROUTING: -p tcp"},
		{"with other bits", mangled("-A PREROUTING -j MARK --set-xmark 0x10/0x10"), 0xf00, ""},
		{"others' packets", mangled("-A PREROUTING -s 192.168.7.0/24 -j MARK --set-mark 0x10"), 0xf0, ""},
		{"what is for the node", mangled("-A PREROUTING -m addrtype --dst-type LOCAL -j MARK --set-mark 0x10"), 0xf0, ""},
		{"the node's own packets", mangled("-A OUTPUT -j MARK --set-mark 0x10"), 0xf0, ""},
		{"once they have been routed", markForwarded, 0xff0000, ""},
		{"wg-quick by iptables", mangled(saveSockets, restore), ^uint32(0), ""},
		{"wg-quick by nft", nft(premangle + postmangle), ^uint32(0), ""},
		{"two providers", mangled("-A PREROUTING -i eth1 -j CONNMARK --set-mark 1", restore), ^uint32(0), "--restore-mark"},
		{"marks of others, restored", mangled("-A OUTPUT -j MARK --set-mark 1", saveSockets, restore), ^uint32(0), "--restore-mark"},
		{"other bits are restored", mangled("-A PREROUTING -i eth1 -j CONNMARK --set-mark 1", restore+" --nfmask 0xff00 --ctmask 0xff00"), 0xff, ""},
		{"two providers by nft", nft(premangle + of(postmangle, "ct mark set mark", "ct mark set 1")), ^uint32(0), "ct mark"},
		{"pods' packets by nft", nft(of(premangle, "ct mark", "0x10")), 0xf0, "meta mark set 0x10"},
		{"by a map", nft(of(premangle, "set ct mark", "set ip daddr map { 192.0.2.1 : 0x10 }")), 0xf0, "chain premangle"},
	} {
		variants := [][]string{{"iptables-nft-restore", "-n"}, {"iptables-legacy-restore", "-n"}}
		if strings.HasPrefix(tt.rules, "table") {
			variants = [][]string{{"nft", "-f", "-"}}
		}
		for _, with := range variants {
			t.Run(tt.name+" by "+with[0], func(t *testing.T) {
				priv.Isolate(t)
				write(t, tt.rules, with...)
				var m Marks
				defer m.Close()
				got, err := m.Look(time.Now(), tt.bits, around)
				if err != nil || (got == "") != (tt.where == "") || !strings.Contains(got, tt.where) {
					t.Errorf("%q, want %q; error %v", got, tt.where, err)
				}
			})
		}
	}
}

// A change of rules, of what is asked for, and of what is known of pods is followed, and to look again costs little meanwhile.
func TestMarksAreFollowed(t *testing.T) {
	priv.Isolate(t)
	var m Marks
	defer m.Close()
	now := time.Now()
	is := func(when string, bits uint32, among Surroundings, want bool) {
		t.Helper()
		if got, err := m.Look(now, bits, among); err != nil || (got != "") != want {
			t.Errorf("%s: %q, error %v", when, got, err)
		}
	}
	is("no rule", 0xff, around, false)
	write(t, of(mangle, "%", "-A PREROUTING -s 192.168.7.0/24 -j MARK --set-mark 0x10"), "iptables-nft-restore", "-n")
	now = now.Add(time.Second)
	is("of others", 0xff, around, false)
	is("no pod is known", 0xff, Surroundings{Families: around.Families}, true)
	is("no pod is known, other bits", 0xf, Surroundings{Families: around.Families}, false)
	run(t, "iptables-nft -t mangle -A PREROUTING -j MARK --set-mark 0x20")
	now = now.Add(time.Second)
	is("of all", 0xff, around, true)
	run(t, "iptables-nft -t mangle -F PREROUTING")
	m.took = time.Second
	is("looks are dear", 0xff, around, true)
	now = now.Add(lookShare * time.Second)
	is("gone", 0xff, around, false)
	run(t, "iptables-legacy -t mangle -A PREROUTING -j MARK --set-mark 0x20")
	now = now.Add(readLarge)
	is("the older iptables", 0xff, around, true)
}
