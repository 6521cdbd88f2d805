package netfilter

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// kubeProxyIPVS is what the IPVS mode has in the nat table, which leads to chains by sets.
const kubeProxyIPVS = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
`

// kubeletNAT is what a kubelet has of its own, and older ones had.
const kubeletNAT = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`

// stands asks for what stands now.
func stands(t *testing.T, k *KubeProxy, when string, now time.Time, want Standing) {
	t.Helper()
	if got, err := k.Look(now); got != want || err != nil {
		t.Errorf("%s: %q, error %v, want %q", when, got, err, want)
	}
}

// Rules as each mode writes them, by each form of iptables, of one family; then a part of them, and those of a kubelet.
func TestWhereKubeProxyStands(t *testing.T) {
	for _, form := range []struct {
		command, place string
		six            bool
	}{
		{"iptables-nft", "nftables table ip nat, chain %s: -m comment -j KUBE-SERVICES", false},
		{"ip6tables-nft", "nftables table ip6 nat, chain %s: -m comment -j KUBE-SERVICES", true},
		{"iptables-legacy", "iptables table nat, chain %s: -m comment -j KUBE-SERVICES", false},
		{"ip6tables-legacy", "ip6tables table nat, chain %s: -m comment -j KUBE-SERVICES", true},
	} {
		in := func(chain string) Standing {
			if form.six {
				return Standing{IPv6: fmt.Sprintf(form.place, chain)}
			}
			return Standing{IPv4: fmt.Sprintf(form.place, chain)}
		}
		t.Run(form.command, func(t *testing.T) {
			priv.Isolate(t)
			run(t, "ipset create KUBE-CLUSTER-IP hash:ip,port"+map[bool]string{true: " family inet6"}[form.six])
			var k KubeProxy
			defer k.Close()
			now := time.Now()
			stands(t, &k, "nothing", now, Standing{})
			nat := func(args string) { run(t, form.command+" -t nat "+args) }
			for name, rules := range map[string]string{"iptables": of(kubeProxyLeft, "%BACKEND%", map[bool]string{false: "172.18.0.12:6443", true: "[fd00::12]:6443"}[form.six]), "IPVS": kubeProxyIPVS} {
				write(t, kubeletNAT, form.command+"-restore")
				stands(t, &k, "a kubelet", now, Standing{})
				write(t, rules, form.command+"-restore")
				stands(t, &k, name, now, in("PREROUTING"))
				nat("-F KUBE-SERVICES")
				stands(t, &k, name+", empty", now, Standing{})
				nat("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-MARK-MASQ")
				stands(t, &k, name+", which serves something", now, in("PREROUTING"))
				nat("-D PREROUTING 1")
				stands(t, &k, name+" for the node's own processes", now, in("OUTPUT"))
				nat("-F OUTPUT")
				stands(t, &k, name+", and nothing leads there", now, Standing{})
				nat("-N KUBE-HP-ABC")
				nat("-A KUBE-HP-ABC -j KUBE-SERVICES")
				nat("-A OUTPUT -j KUBE-HP-ABC")
				stands(t, &k, name+", and somebody else's chain leads there", now, Standing{})
				nat("-F")
				nat("-X")
			}
			write(t, kubeProxyLeft[:strings.Index(kubeProxyLeft, "*nat")], form.command+"-restore")
			stands(t, &k, "a filter", now, Standing{})
		})
	}
}

// The nftables mode has a table of its own for each family.
func TestWhereTablesOfKubeProxyStand(t *testing.T) {
	priv.Isolate(t)
	const four, six = "nftables table ip kube-proxy, chain nat-prerouting", "nftables table ip6 kube-proxy, chain by-another-name"
	var k KubeProxy
	defer k.Close()
	for _, step := range []struct {
		rules string
		want  Standing
	}{
		{"add table ip kube-proxy", Standing{}},
		{"add chain ip kube-proxy filter-input { type filter hook input priority 0 ; }", Standing{}},
		{"add chain ip kube-proxy nat-prerouting", Standing{}},
		{"add table inet kube-proxy\nadd chain inet kube-proxy nat-output { type nat hook output priority -100 ; }", Standing{}},
		{"delete table ip kube-proxy\n" + kubeProxyNft, Standing{IPv4: four}},
		{"add table ip6 kube-proxy\nadd chain ip6 kube-proxy by-another-name { type nat hook output priority -100 ; }", Standing{four, six}},
		{of(kubeProxyNft, "table ip kube-proxy", "table ip other"), Standing{four, six}},
		{"delete table ip kube-proxy", Standing{IPv6: six}},
		{"flush ruleset", Standing{}},
	} {
		write(t, step.rules, "nft", "-f", "-")
		stands(t, &k, step.rules, time.Now(), step.want)
	}
}

// When kube-proxy changes its mode, rules of both forms stand for a while.
func TestStandingInBothForms(t *testing.T) {
	priv.Isolate(t)
	var k KubeProxy
	defer k.Close()
	now := time.Now()
	const older = "iptables table nat, chain PREROUTING: -m comment -j KUBE-SERVICES"
	write(t, kubeProxyNAT, "iptables-legacy-restore")
	stands(t, &k, "one", now, Standing{IPv4: older})
	write(t, kubeProxyNft, "nft", "-f", "-")
	stands(t, &k, "both", now, Standing{IPv4: "nftables table ip kube-proxy, chain nat-prerouting"})
	run(t, "nft flush ruleset")
	stands(t, &k, "the first", now, Standing{IPv4: older})
	k.Close()
	stands(t, &k, "closed meanwhile", now, Standing{IPv4: older})
	// A rule as long takes its place, in a table that does not change its size, and so is not read at once.
	run(t, "iptables-legacy -t nat -N KUBE-OTHERS_")
	stands(t, &k, "a chain more", now, Standing{IPv4: older})
	run(t, "iptables-legacy -t nat -F OUTPUT")
	run(t, "iptables-legacy -t nat -R PREROUTING 1 -m comment --comment something -j KUBE-OTHERS_")
	stands(t, &k, "another rule", now.Add(time.Second), Standing{})
	run(t, "iptables-legacy -t nat -R PREROUTING 1 -m comment --comment something -j KUBE-SERVICES")
	stands(t, &k, "back, unseen", now.Add(2*time.Second), Standing{})
	stands(t, &k, "back", now.Add(time.Second+readLarge), Standing{IPv4: older})
}

// TestManyServices has rules change among those of ten thousand Services. What a look reads is what it allocates memory for.
func TestManyServices(t *testing.T) {
	const services, most = 10_000, 256 << 10
	var rules strings.Builder
	rules.WriteString(strings.TrimSuffix(kubeProxyNAT, "COMMIT\n"))
	for i := range services {
		fmt.Fprintf(&rules, ":KUBE-SVC-%016d - [0:0]\n:KUBE-SEP-%016d - [0:0]\n", i, i)
	}
	for i := range services {
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d 10.97.%d.%d/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-%016d\n-A KUBE-SVC-%016d -j KUBE-SEP-%016d\n", i>>8, i&255, i, i, i)
		fmt.Fprintf(&rules, "-A KUBE-SEP-%016d -p tcp -m tcp -j DNAT --to-destination 10.244.%d.%d:80\n", i, i>>8, i&255)
	}
	rules.WriteString("COMMIT\n")
	for _, form := range []struct{ name, change string }{
		{"nft", "nft add rule ip nat KUBE-SVC-0000000000000000 counter"},
		{"legacy", "iptables-legacy -t nat -A KUBE-SVC-0000000000000000 -j RETURN"},
	} {
		t.Run(form.name, func(t *testing.T) {
			priv.Isolate(t)
			write(t, rules.String(), "iptables-"+form.name+"-restore")
			var k KubeProxy
			defer k.Close()
			now := time.Now()
			look := func(when string, after time.Duration, most uint64) {
				t.Helper()
				var before, since runtime.MemStats
				runtime.ReadMemStats(&before)
				began := time.Now()
				got, err := k.Look(now.Add(after))
				took := time.Since(began)
				runtime.ReadMemStats(&since)
				if read := since.TotalAlloc - before.TotalAlloc; got.IPv4 == "" || err != nil || read > most {
					t.Errorf("%s: %q, error %v, %d bytes", when, got, err, read)
				} else {
					t.Logf("%s: %d bytes, %v", when, read, took)
				}
			}
			look("first", 0, 1<<30)
			for i := range 5 {
				run(t, form.change)
				look("a change", time.Duration(i)*time.Second, most)
			}
			look("at rest", 5*time.Second, most/8)
			run(t, "iptables-"+form.name+" -t nat -F PREROUTING")
			run(t, "iptables-"+form.name+" -t nat -F OUTPUT")
			stands(t, &k, "all are there, and nothing leads to them", now.Add(6*time.Second), Standing{})
		})
	}
}

// TestRulesComeAndGoMeanwhile looks while somebody writes and removes rules all the time. No look fails.
func TestRulesComeAndGoMeanwhile(t *testing.T) {
	priv.Isolate(t)
	netns, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(netns)
	own := layout{unix.NFPROTO_IPV4, kubeProxyTable, []chain{{"nat-prerouting", natChain, unix.NF_INET_PRE_ROUTING, rawPriority + 200, translated()}}}
	jump := layout{unix.NFPROTO_IPV6, natTable, []chain{{"PREROUTING", natChain, unix.NF_INET_PRE_ROUTING, rawPriority + 200, translated()}}}
	ended := make(chan error)
	stop := make(chan struct{})
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Setns(netns, unix.CLONE_NEWNET)
		for err == nil {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			err = errors.Join(own.write(), jump.write(), jump.addServices(), removeOwn(kubeProxyTable, unix.NFPROTO_IPV4), removeOwn(natTable, unix.NFPROTO_IPV6))
		}
		ended <- err
	}()
	var k KubeProxy
	defer k.Close()
	seen := map[Standing]int{}
	for end := time.Now().Add(priv.Patience(20 * time.Second)); len(seen) < 3 && time.Now().Before(end) || len(seen) == 0; {
		got, err := k.Look(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		seen[got]++
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if len(seen) < 3 {
		t.Errorf("seen %v", seen)
	}
	stands(t, &k, "in the end", time.Now(), Standing{})
}

// addServices adds kube-proxy's chain, and a rule of the first chain that leads there.
func (l layout) addServices() error {
	const jump = -3 // NFT_JUMP
	services, rule := chain{name: servicesChain}, nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
	data := nl.NewRtAttr(unix.NFTA_IMMEDIATE_DATA|unix.NLA_F_NESTED, nil)
	verdict := data.AddRtAttr(unix.NFTA_DATA_VERDICT|unix.NLA_F_NESTED, nil)
	verdict.AddRtAttr(unix.NFTA_VERDICT_CODE, nl.BEUint32Attr(1<<32+jump))
	verdict.AddChild(services.attr(unix.NFTA_VERDICT_CHAIN))
	rule.AddChild(expression("immediate", number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), data))
	var b nftBatch
	b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, l.family, l.attr(), services.attr(unix.NFTA_CHAIN_NAME))
	b.add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, l.family, l.attr(), l.chains[0].attr(unix.NFTA_RULE_CHAIN), rule)
	return b.commit()
}
