package netfilter

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What programs write, as iptables-save and nft list it. %MASQ% and so on are places where tests put something else.
const (
	dockerNAT = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 172.20.0.0/16 ! -o br-5f3c8a1b2d4e -j MASQUERADE
-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER -i br-5f3c8a1b2d4e -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A DOCKER -d 127.0.0.1/32 ! -i docker0 -p udp -m udp --dport 5353 -j DNAT --to-destination 172.17.0.2:53
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
`
	dockerSwarm = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER-INGRESS - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER-INGRESS
-A OUTPUT -m addrtype --dst-type LOCAL -j DOCKER-INGRESS
-A POSTROUTING -o docker_gwbridge -m addrtype --src-type LOCAL -j MASQUERADE
-A POSTROUTING -s 172.19.0.0/16 ! -o docker_gwbridge -j MASQUERADE
-A DOCKER-INGRESS -p tcp -m tcp --dport 8081 -j DNAT --to-destination 172.19.0.2:8081
-A DOCKER-INGRESS -j RETURN
COMMIT
`
	libvirtNAT = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:LIBVIRT_PRT - [0:0]
-A POSTROUTING -j LIBVIRT_PRT
-A LIBVIRT_PRT -s 192.168.122.0/24 -d 224.0.0.0/24 -j RETURN
-A LIBVIRT_PRT -s 192.168.122.0/24 -d 255.255.255.255/32 -j RETURN
-A LIBVIRT_PRT -s 192.168.122.0/24 ! -d 192.168.122.0/24 -p tcp -j MASQUERADE --to-ports 1024-65535
-A LIBVIRT_PRT -s 192.168.122.0/24 ! -d 192.168.122.0/24 -p udp -j MASQUERADE --to-ports 1024-65535
-A LIBVIRT_PRT -s 192.168.122.0/24 ! -d 192.168.122.0/24 -j MASQUERADE
COMMIT
*mangle
:POSTROUTING ACCEPT [0:0]
:LIBVIRT_PRT - [0:0]
-A POSTROUTING -j LIBVIRT_PRT
-A LIBVIRT_PRT -o virbr0 -p udp -m udp --dport 68 -j CHECKSUM --checksum-fill
COMMIT
`
	libvirtNft = `table ip libvirt_network {
	chain forward {
		type filter hook forward priority filter; policy accept;
		counter jump guest_cross
	}
	chain guest_cross {
		iif "lo" oif "lo" counter accept
	}
	chain postroute_nat {
		type nat hook postrouting priority srcnat; policy accept;
		counter jump guest_nat
	}
	chain guest_nat {
		ip saddr 192.168.122.0/24 ip daddr 224.0.0.0/24 counter return
		ip saddr 192.168.122.0/24 ip daddr 255.255.255.255 counter return
		meta l4proto tcp ip saddr 192.168.122.0/24 ip daddr != 192.168.122.0/24 counter masquerade to :1024-65535
		meta l4proto udp ip saddr 192.168.122.0/24 ip daddr != 192.168.122.0/24 counter masquerade to :1024-65535
		ip saddr 192.168.122.0/24 ip daddr != 192.168.122.0/24 counter masquerade
	}
}
`
	podmanNAT = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:NETAVARK-1D8721804F16F - [0:0]
:NETAVARK-DN-1D8721804F16F - [0:0]
:NETAVARK-HOSTPORT-DNAT - [0:0]
:NETAVARK-HOSTPORT-MASQ - [0:0]
:NETAVARK-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j NETAVARK-HOSTPORT-DNAT
-A POSTROUTING -j NETAVARK-HOSTPORT-MASQ
-A POSTROUTING -s 10.88.0.0/16 -j NETAVARK-1D8721804F16F
-A NETAVARK-1D8721804F16F -d 10.88.0.0/16 -j ACCEPT
-A NETAVARK-1D8721804F16F ! -d 224.0.0.0/4 -j MASQUERADE
-A NETAVARK-DN-1D8721804F16F -s 10.88.0.0/16 -p tcp -m tcp --dport 8080 -j NETAVARK-HOSTPORT-SETMARK
-A NETAVARK-DN-1D8721804F16F -s 127.0.0.1/32 -p tcp -m tcp --dport 8080 -j NETAVARK-HOSTPORT-SETMARK
-A NETAVARK-DN-1D8721804F16F -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.88.0.2:80
-A NETAVARK-HOSTPORT-DNAT -p tcp -m tcp --dport 8080 -m comment --comment "dnat name: podman id: 53b1fd1a" -j NETAVARK-DN-1D8721804F16F
-A NETAVARK-HOSTPORT-MASQ -m comment --comment "netavark portfw masq mark" -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A NETAVARK-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000
COMMIT
`
	podmanNft = `table inet netavark {
	chain NETAVARK-HOSTPORT-SETMARK {
		meta mark set meta mark | 0x00002000
	}
	chain nv_2f259bab_10_88_0_0_nm16 {
		ip daddr 10.88.0.0/16 accept
		ip daddr != 224.0.0.0/4 masquerade
	}
	chain nv_2f259bab_10_88_0_0_nm16_dnat {
		ip saddr 10.88.0.0/16 tcp dport 8080 jump NETAVARK-HOSTPORT-SETMARK
		ip saddr 127.0.0.1 tcp dport 8080 jump NETAVARK-HOSTPORT-SETMARK
		tcp dport 8080 dnat ip to 10.88.0.2:80
	}
	chain NETAVARK-HOSTPORT-DNAT {
		tcp dport 8080 jump nv_2f259bab_10_88_0_0_nm16_dnat
	}
	chain FORWARD {
		type filter hook forward priority filter; policy accept;
		ct state invalid drop
		ip daddr 10.88.0.0/16 ct state established,related accept
	}
	chain POSTROUTING {
		type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x00002000 == 0x00002000 masquerade
		ip saddr 10.88.0.0/16 jump nv_2f259bab_10_88_0_0_nm16
	}
	chain PREROUTING {
		type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local jump NETAVARK-HOSTPORT-DNAT
	}
	chain OUTPUT {
		type nat hook output priority -100; policy accept;
		fib daddr type local jump NETAVARK-HOSTPORT-DNAT
	}
}
`
	portmapNAT = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:CNI-DN-bf3c0d6a1cbe4f8f3c6b1 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-DN-bf3c0d6a1cbe4f8f3c6b1 -s 10.244.1.0/24 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-bf3c0d6a1cbe4f8f3c6b1 -s 127.0.0.1/32 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-bf3c0d6a1cbe4f8f3c6b1 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.244.1.7:80
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j CNI-DN-bf3c0d6a1cbe4f8f3c6b1
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
`
	kubeProxyNAT = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-6E7XQMQ4RAYOWTTM - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-6E7XQMQ4RAYOWTTM -s 172.18.0.12/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-6E7XQMQ4RAYOWTTM -p tcp -m tcp -j DNAT --to-destination 172.18.0.12:6443
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y
-A KUBE-SVC-NPX46M4PTMTKRN6Y -j KUBE-SEP-6E7XQMQ4RAYOWTTM
COMMIT
`
	kubeProxyNft = `table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.1 . tcp . 443 : goto service-2QRHZV4L-default/kubernetes/tcp/https }
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
	}
	chain service-2QRHZV4L-default/kubernetes/tcp/https {
		numgen random mod 1 vmap { 0 : goto endpoint-5OJB2KTY-default/kubernetes/tcp/https__172.18.0.12/6443 }
	}
	chain endpoint-5OJB2KTY-default/kubernetes/tcp/https__172.18.0.12/6443 {
		meta l4proto tcp dnat to 172.18.0.12:6443
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		jump services
	}
}
`
)

// firewalldNft is what firewalld has without masquerading: chains that translate nothing.
const firewalldNft = `table inet firewalld {
	chain nat_PREROUTING {
		type nat hook prerouting priority dstnat + 10; policy accept;
		jump nat_PREROUTING_POLICIES
	}
	chain nat_PREROUTING_POLICIES {
		iifname "eth0" goto nat_PRE_public
		goto nat_PRE_public
	}
	chain nat_PRE_public {
	}
	chain nat_POSTROUTING {
		type nat hook postrouting priority srcnat + 10; policy accept;
	}
}
`

// write has the kernel take a ruleset, as a program writes it.
func write(t *testing.T, rules string, with ...string) {
	t.Helper()
	cmd := exec.Command(with[0], with[1:]...)
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", with, err, out)
	}
}

// of puts rules' words in place of others.
func of(rules string, oldnew ...string) string { return strings.NewReplacer(oldnew...).Replace(rules) }

// TestRulesetsOfPrograms has the kernel take rules in each form in which programs write them.
func TestRulesetsOfPrograms(t *testing.T) {
	for _, tt := range []struct {
		name, rules string
		level       Level
		where       string // a part of it
	}{
		{"Docker", dockerNAT, Masquerades, "chain POSTROUTING: "},
		{"Docker, and a swarm's ingress", dockerNAT + dockerSwarm, Masquerades, ""},
		{"a swarm's ingress", dockerSwarm, Masquerades, "-o docker_gwbridge"},
		{"libvirt", libvirtNAT, Masquerades, "-s 192.168.122.0/24 ! -d 192.168.122.0/24"},
		{"podman", podmanNAT, Masquerades, "chain NETAVARK-HOSTPORT-MASQ: -m comment -m mark --mark 0x2000 -j MASQUERADE"},
		{"portmap", portmapNAT, Translates, "--dport 8080 -j DNAT --to-destination 10.244.1.7:80"},
		{"kube-proxy", kubeProxyNAT, Translates, "chain KUBE-POSTROUTING: -m comment -j MASQUERADE"},
		{"kube-proxy's Services alone", of(kubeProxyNAT, "-j MASQUERADE --random-fully", "-j RETURN"), Translates,
			"-j DNAT --to-destination 172.18.0.12:6443"},
		{"Docker's network has pods", of(dockerNAT, "172.20.0.0/16", "10.244.0.0/16"), Translates, "-s 10.244.0.0/16"},
		{"a container has a pod's address", of(dockerNAT, "172.17.0.2:53", "10.244.2.2:53"), Translates, "--to-destination 10.244.2.2:53"},
		{"a port leads to another node", of(dockerNAT, "172.17.0.2:53", "172.18.0.12:53"), Translates, "--to-destination 172.18.0.12:53"},
		{"a port of any address", of(dockerNAT, "-A PREROUTING -m addrtype --dst-type LOCAL", "-A PREROUTING"), Translates, "chain DOCKER"},
		{"of any but the node's", of(dockerNAT, "-A PREROUTING -m addrtype --dst-type", "-A PREROUTING -m addrtype ! --dst-type"), Translates, "chain DOCKER"},
		{"any mark", of(podmanNAT, "-m mark --mark 0x2000/0x2000", "-m mark ! --mark 0x2000/0x2000"), Translates, "! -m mark"},
		{"pods' packets are marked", of(podmanNAT, "-A OUTPUT -m addrtype", "-A PREROUTING -p udp -j NETAVARK-HOSTPORT-SETMARK\n-A OUTPUT -m addrtype"), Translates, "MASQ"},
		{"another bit is marked", of(podmanNAT, "-A OUTPUT -m addrtype", "-A PREROUTING -p udp -j MARK --set-xmark 0x10/0x10\n-A OUTPUT -m addrtype"), Masquerades, ""},
		{"a bit is marked by another table", podmanNAT + "*mangle\n:FORWARD ACCEPT [0:0]\n-A FORWARD -j MARK --set-xmark 0x2000/0x2000\nCOMMIT\n", Translates, "MASQ"},
		{"marks are restored", podmanNAT + "*mangle\n:FORWARD ACCEPT [0:0]\n-A FORWARD -j CONNMARK --restore-mark\nCOMMIT\n", Translates, "MASQ"},
		{"marks are saved", podmanNAT + "*mangle\n:FORWARD ACCEPT [0:0]\n-A FORWARD -j CONNMARK --save-mark\nCOMMIT\n", Masquerades, ""},
		{"by our mark", of(podmanNAT, "0x2000", "0x800000"), Translates, "MASQ"},
	} {
		for _, variant := range []string{"nft", "legacy"} {
			t.Run(tt.name+" by "+variant, func(t *testing.T) {
				priv.Isolate(t)
				write(t, tt.rules, "iptables-"+variant+"-restore", "-n")
				expect(t, around, tt.level, tt.where)
			})
		}
	}
}

// expect says what the rules of now come to.
func expect(t *testing.T, among Surroundings, level Level, where string) {
	t.Helper()
	if f := found(t, among); f.Level != level || !strings.Contains(f.Where, where) {
		t.Errorf("level %d, want %d; %q, want it to contain %q", f.Level, level, f.Where, where)
	}
}

func TestRulesetsOfNft(t *testing.T) {
	const own = "table ip own {\nchain out { type nat hook postrouting priority srcnat;\n%OUT%\n}\nchain in { type nat hook prerouting priority dstnat;\n%IN%\n}\nchain local { type nat hook output priority -100;\n%LOCAL%\n}\n}\n"
	rule := func(place, rule string) string {
		return strings.NewReplacer(place, rule, "%OUT%", "", "%IN%", "", "%LOCAL%", "").Replace(own)
	}
	for _, tt := range []struct {
		name, rules string
		level       Level
		where       string
	}{
		{"libvirt", libvirtNft, Masquerades, "table ip libvirt_network, chain guest_nat: saddr 192.168.122.0/24 daddr != 192.168.122.0/24 masquerade"},
		{"podman", podmanNft, Masquerades, "table inet netavark, chain POSTROUTING: meta mark 0x2000 masquerade"},
		{"pods' packets are marked", of(podmanNft, "ct state invalid drop", "meta mark set meta mark | 0x00002000"), Translates, "chain POSTROUTING: meta mark"},
		{"pods' packets may be marked", of(podmanNft, "ct state invalid drop", "meta mark set ct mark"), Translates, "chain POSTROUTING: meta mark"},
		{"another bit is marked", of(podmanNft, "ct state invalid drop", "meta mark set meta mark | 0x00000010"), Masquerades, ""},
		{"kube-proxy's Services", kubeProxyNft, Translates, "/6443: dnat to 172.18.0.12:6443"},
		{"firewalld", firewalldNft, Nothing, ""},
		{"what leaves by a bridge", rule("%OUT%", `oifname "br-*" masquerade`), Masquerades, `oifname "br-*" masquerade`},
		{"what leaves by the uplink", rule("%OUT%", `oifname "eth0" masquerade`), Translates, `oifname "eth0" masquerade`},
		{"what leaves by some uplink", rule("%OUT%", `oifname "e*" masquerade`), Translates, `oifname "e*"`},
		{"what comes by a bridge", rule("%OUT%", `iifname "docker0" masquerade`), Masquerades, ""},
		{"what comes from pods' links", rule("%OUT%", `iifname "ec0123456789a" masquerade`), Translates, ""},
		{"others to an address of the node's", rule("%OUT%", "ip saddr 192.168.7.0/24 snat to 172.18.0.11"), Masquerades, "snat to 172.18.0.11"},
		{"others to a foreign address", rule("%OUT%", "ip saddr 192.168.7.0/24 snat to 172.18.0.99"), Translates, "snat to 172.18.0.99"},
		{"others to one of several addresses", rule("%OUT%", "ip saddr 192.168.7.0/24 snat to 172.18.0.11-172.18.0.12"), Translates, ""},
		{"a prefix that holds pods", rule("%OUT%", "ip saddr 10.244.0.0/21 masquerade"), Translates, "saddr 10.244.0.0/21"},
		{"a prefix beside pods", rule("%OUT%", "ip saddr 10.244.8.0/21 masquerade"), Masquerades, "saddr 10.244.8.0/21"},
		{"a set of sources", rule("%OUT%", "ip saddr { 192.168.7.0/24, 192.168.8.0/24 } masquerade"), Translates, ""},
		{"to an address of the node's", rule("%IN%", "ip daddr 172.18.0.11 tcp dport 80 dnat to 172.17.0.2"), Masquerades, "dport 80 dnat to 172.17.0.2"},
		{"to any address", rule("%IN%", "ip saddr 192.168.7.0/24 tcp dport 80 dnat to 172.17.0.2"), Translates, ""},
		{"to the proxy of the node", rule("%IN%", "fib daddr type local tcp dport 80 redirect to :8080"), Masquerades, ""},
		{"all to the proxy of the node", rule("%IN%", "tcp dport 80 redirect to :8080"), Translates, "redirect"},
		{"the node's own to a container", rule("%LOCAL%", "ip daddr 172.18.0.99 dnat to 172.17.0.2"), Masquerades, ""},
		{"the node's own to a pod", rule("%LOCAL%", "ip daddr 172.18.0.99 dnat to 10.244.1.2"), Translates, ""},
		{"by a map", rule("%IN%", "fib daddr type local dnat to tcp dport map { 80 : 172.17.0.2 }"), Translates, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			priv.Isolate(t)
			write(t, tt.rules, "nft", "-f", "-")
			expect(t, around, tt.level, tt.where)
		})
	}
}

// Who does not know pods, or where they are, takes every packet for one of theirs.
func TestRulesetsInDoubt(t *testing.T) {
	priv.Isolate(t)
	write(t, dockerNAT, "iptables-nft-restore")
	expect(t, around, Masquerades, "")
	for name, change := range map[string]func(*Surroundings){
		"no pods":              func(s *Surroundings) { s.Pods = nil },
		"pods of IPv6 alone":   func(s *Surroundings) { s.Pods = prefixes("fd00:10:244:1::/64") },
		"nothing masqueraded":  func(s *Surroundings) { s.Unmasqueraded = prefixes("0.0.0.0/0") },
		"pods behind docker0":  func(s *Surroundings) { s.Pods = append(prefixes("172.17.8.0/24"), s.Pods...) },
		"containers see pods'": func(s *Surroundings) { s.Unmasqueraded = append(prefixes("172.16.0.0/12"), s.Unmasqueraded...) },
	} {
		among := around.clone()
		change(&among)
		if f := found(t, among); f.Level != Translates {
			t.Errorf("%s: level %d, %q", name, f.Level, f.Where)
		}
	}
	if f := found(t, Surroundings{Families: []int{unix.AF_INET}}); f.Level != Translates {
		t.Errorf("who knows nothing finds level %d", f.Level)
	}
}

// Docker's rules of IPv6, in both forms.
func TestRulesetsOfIPv6(t *testing.T) {
	six := of(dockerNAT, "172.17.0.0/16", "fd00:d0c::/64", "172.20.0.0/16", "fd00:d0c:1::/64", "172.17.0.2/32", "fd00:d0c::2/128",
		"172.17.0.2:", "[fd00:d0c::2]:", "127.0.0.0/8", "::1/128", "127.0.0.1/32", "::1/128")
	among := around.clone()
	among.Families = []int{unix.AF_INET6}
	for _, variant := range []string{"nft", "legacy"} {
		t.Run(variant, func(t *testing.T) {
			priv.Isolate(t)
			write(t, six, "ip6tables-"+variant+"-restore")
			expect(t, among, Masquerades, "-s fd00:d0c::/64")
			run(t, "ip6tables-"+variant+" -t nat -A DOCKER ! -i docker0 -p tcp --dport 81 -j DNAT --to-destination [fd00:10:244:1::9]:81")
			expect(t, among, Translates, "dport 81 -j DNAT --to-destination fd00:10:244:1::9:81")
		})
	}
}

// A table that grew large is read when its size has changed, and now and then.
func TestLargeTable(t *testing.T) {
	priv.Isolate(t)
	var many strings.Builder
	for range 600 {
		many.WriteString("-A DOCKER -p tcp -m tcp --dport 9 -j RETURN\n")
	}
	write(t, of(dockerNAT, "-A DOCKER -i docker0 -j RETURN\n", many.String()), "iptables-legacy-restore")
	among := around.clone()
	r := newRules(&among)
	defer r.close()
	now := time.Now()
	step := func(when string, after time.Duration, want Level) {
		t.Helper()
		if f, err := r.find(now.Add(after)); f.Level != want || err != nil {
			t.Errorf("%s: level %d, error %v", when, f.Level, err)
		}
	}
	step("at first", 0, Masquerades)
	run(t, "iptables-legacy -t nat -R POSTROUTING 1 -s 10.244.0.0/16 -j MASQUERADE")
	step("of the same size", time.Second, Masquerades)
	step("after a while", readLarge, Translates)
	run(t, "iptables-legacy -t nat -D POSTROUTING 1")
	step("just found", readLarge+time.Second, Translates)
	step("a rule less", readLarge+lookAgain, Masquerades)
}

// Rules that translate are not read anew for each Node that comes or goes, large tables least of all; others are.
func TestRulesAmongOtherPods(t *testing.T) {
	const dnat = "-p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.1.9"
	for _, c := range []struct {
		command string
		set     int
		rules   int
		pause   time.Duration
	}{
		{"iptables-nft-restore", 0, 1, lookAgain},
		{"iptables-legacy-restore", 1, 1, lookAgain},
		{"iptables-legacy-restore", 1, 600, readLarge},
	} {
		t.Run(fmt.Sprint(c.command, c.rules), func(t *testing.T) {
			priv.Isolate(t)
			write(t, "*nat\n"+strings.Repeat("-A PREROUTING "+dnat+"\n", c.rules)+"COMMIT\n", c.command)
			among := around.clone()
			among.Pods = nil
			r := newRules(&among)
			defer r.close()
			now := time.Now()
			assert := func(when string, after time.Duration, looks bool) {
				t.Helper()
				at := now.Add(after)
				if f, err := r.find(at); f.Level != Translates || err != nil || r.sets[c.set].at.Equal(at) != looks {
					t.Errorf("%s: level %d, error %v, looked at after %v", when, f.Level, err, r.sets[c.set].at.Sub(now))
				}
			}
			assert("no pod is known", 0, true)
			among.Pods = around.Pods
			assert("pods are", time.Second, true)
			among.Pods = append(slices.Clone(around.Pods), netip.MustParsePrefix("10.244.3.0/24"))
			assert("a Node comes", 2*time.Second, false)
			assert("later", time.Second+c.pause, true)
			run(t, strings.Replace(c.command, "-restore", "", 1)+" -t nat -I PREROUTING 1 "+dnat)
			assert("a rule comes", time.Second+2*c.pause, true)
		})
	}
}
