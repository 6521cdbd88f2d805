package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// flags are this node's, and what status is told.
func (l *loop) flags(t *testing.T) (config.Flags, string) {
	t.Helper()
	v, err := l.dp.Maps.Config.Get(config.Key{})
	if err != nil {
		t.Fatal(err)
	}
	told, err := os.ReadFile(filepath.Join(l.cfg.State, observe.ClusterFile))
	if err != nil {
		t.Fatal(err)
	}
	return v.Flags, string(told)
}

func TestRulesAreFollowed(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	l.followMode(time.Now()) // which tells where pods are
	for _, step := range []struct {
		command string
		want    config.Flags
		told    string
	}{
		{"true", 0, `"routes":""`},
		{"ip rule add priority 99 from 10.0.0.0/8 lookup main", 0, `"routes":""`},
		{"ip rule add priority 100 fwmark 0x10/0xf0 lookup 77", 0, `"routes":""`}, // pods' packets have none
		{"ip rule add priority 101 not fwmark 0xca6c lookup 77", 0, `"routes":""`},
		{"iptables-nft -t mangle -A PREROUTING -d 192.0.2.0/24 -j MARK --set-mark 0x20", config.RoutesToStack, "rule 100 asks for a packet mark, and netfilter may set it in pods' packets: nftables table ip mangle, chain PREROUTING: "},
		{"iptables-nft -t mangle -F PREROUTING", 0, `"routes":""`},
		{"ip rule del priority 100", 0, `"routes":""`},
		{"ip rule del priority 101", 0, `"routes":""`},
		{"ip rule add priority 102 dsfield 0x10 lookup 77", config.RoutesToStack, "rule 102 asks for a TOS value"},
		{"ip rule del priority 102", 0, `"routes":""`},
		{"ip route add 192.0.2.0/24 dev uplink tos 0x10", config.RoutesToStack, "the route to 192.0.2.0/24 asks for a TOS value"},
		{"ip route del 192.0.2.0/24 dev uplink tos 0x10", 0, `"routes":""`},
	} {
		run(t, step.command)
		for deadline := time.Now().Add(priv.Patience(5 * time.Second)); ; time.Sleep(50 * time.Millisecond) { // looks at netfilter take their share
			l.pass(t.Context())
			if flags, told := l.flags(t); flags == step.want && strings.Contains(told, step.told) {
				break
			} else if time.Now().After(deadline) {
				t.Fatalf("after %s: flags %s, told %s", step.command, flags, told)
			}
		}
	}
}

func TestPoliciesAreFollowed(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	const entry = "10.244.2.64/26"
	run(t, "ip xfrm policy add src 10.244.1.0/24 dst "+entry+" dir out tmpl src 172.18.0.11 dst 172.18.0.12 proto esp mode tunnel")
	l.pass(t.Context())
	v, ok := l.destination(t, entry)
	if whole, _ := l.destination(t, "10.244.2.0/24"); !ok || v.Kind != destinations.PodCIDR || v.Flags != destinations.ToStack|destinations.Part || whole.Flags != 0 {
		t.Errorf("under the policy: %+v, %v; the whole %+v", v, ok, whole)
	}
	if flags, told := l.flags(t); flags != config.Policies || !strings.Contains(told, "what policies reach") {
		t.Errorf("flags %s, told %s", flags, told)
	}
	standing, err := readStanding(l.dp.Maps)
	if err != nil || len(standing.Claims) != 1 {
		t.Errorf("an agent that starts takes for claims %v, error %v", standing.Claims, err)
	}
	run(t, "ip xfrm policy flush")
	l.pass(t.Context())
	if _, ok := l.destination(t, entry); ok {
		t.Error("the part outlives the policy")
	}
	if flags, told := l.flags(t); flags != 0 || !strings.Contains(told, `"ipsec":""`) {
		t.Errorf("flags %s, told %s", flags, told)
	}
}

// That policies come and go, as with every tunnel of an IPsec daemon's, is told once.
func TestPoliciesAreToldOnce(t *testing.T) {
	l := testLoop(t)
	log := logged(l)
	ready(t, l)
	path := filepath.Join(l.cfg.State, observe.ClusterFile)
	var written []os.FileInfo
	for i := range 3 {
		run(t, fmt.Sprintf("ip xfrm policy add src 10.244.1.0/24 dst 192.0.2.%d dir out action block", i))
		l.pass(t.Context())
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		written = append(written, info)
	}
	if n := strings.Count(log.String(), "about=IPsec"); n != 1 {
		t.Errorf("told %d times, want once:\n%s", n, log)
	}
	if !os.SameFile(written[0], written[2]) {
		t.Error("the file for ebpfctl is written with each policy")
	}
	run(t, "ip xfrm policy flush")
	l.pass(t.Context())
	if !strings.Contains(log.String(), `"packets take the short way again" about=IPsec`) {
		t.Errorf("their end is not told:\n%s", log)
	}
}
