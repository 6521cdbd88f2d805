package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// The addresses that a node's DNS cache has, where kube-proxy works by iptables or nftables: one of its own, and the
// Service's, on each node its own.
const (
	localDNS   = "169.254.20.10"
	serviceDNS = "10.96.0.10"
	// cacheLink holds them, and nothing is behind it.
	cacheLink = "nodelocaldns"
	// clusterName is one that CoreDNS knows.
	clusterName = "kubernetes.default.svc.cluster.local."
)

// cacheConfig is what a node's cache is told: its addresses, what it says by itself, and whom it asks.
const cacheConfig = `cluster.local:53 where.test:53 {
    errors
    bind %s %s
    template IN A where.test {
        answer "{{ .Name }} 1 IN A %s"
    }
    cache 30
    forward . %s {
        force_tcp
    }
}
`

// untracked are upstream's rules: what goes to the cache and comes from it, netfilter neither follows nor translates.
func untracked() (rules [][]string) {
	for _, addr := range []string{localDNS, serviceDNS} {
		for _, proto := range []string{"udp", "tcp"} {
			rules = append(rules,
				[]string{"raw", "PREROUTING", "-d", addr, "-p", proto, "--dport", "53", "-j", "NOTRACK"},
				[]string{"raw", "OUTPUT", "-d", addr, "-p", proto, "--dport", "53", "-j", "NOTRACK"},
				[]string{"raw", "OUTPUT", "-s", addr, "-p", proto, "--sport", "53", "-j", "NOTRACK"},
				[]string{"filter", "INPUT", "-d", addr, "-p", proto, "--dport", "53", "-j", "ACCEPT"},
				[]string{"filter", "OUTPUT", "-s", addr, "-p", proto, "--sport", "53", "-j", "ACCEPT"})
		}
	}
	return rules
}

// Pods ask the DNS cache of their node by either address, past netfilter.
func testNodeLocalDNS(t *testing.T, s *stage) {
	upstream := cacheUpstream(t, s)
	for _, node := range s.Nodes {
		// A cache would keep for a while that nobody has answered.
		asker := resolver(fresh{node}, "tcp", net.JoinHostPort(upstream, "53"))
		err := cluster.Poll(within(t, stepLimit), node.Name+" reaches CoreDNS by "+upstream, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			return resolves(ctx, asker, clusterName, netip.MustParseAddr(apiService))
		})
		if err == nil {
			err = startCache(t.Context(), s, node, upstream)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, node.LogTail("node-cache", 20))
		}
		t.Cleanup(func() {
			if err := stopCache(node); err != nil {
				t.Error(err)
			}
		})
	}
	concurrently(clients(s.standing), func(from client) { asksCache(t, from) })
	for _, node := range s.Nodes {
		pastNetfilter(t, node)
	}
}

// cacheUpstream is whom a node's cache asks: CoreDNS by another Service.
func cacheUpstream(t *testing.T, s *stage) string {
	t.Helper()
	return createService(t, s.standing, &core.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-dns-upstream", Namespace: cluster.Namespace},
		Spec: core.ServiceSpec{
			Selector: map[string]string{"k8s-app": "kube-dns"},
			Ports: []core.ServicePort{
				{Name: "dns", Port: 53, Protocol: core.ProtocolUDP}, {Name: "dns-tcp", Port: 53, Protocol: core.ProtocolTCP},
			},
		},
	}).Spec.ClusterIP
}

// startCache starts a node's cache on addresses of the node.
func startCache(ctx context.Context, s *stage, node *cluster.Machine, upstream string) error {
	dir := filepath.Join(s.Dir, node.Name)
	config := filepath.Join(dir, "node-cache.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, cacheConfig, localDNS, serviceDNS, node.Addr, upstream), 0o600); err != nil {
		return err
	}
	steps := [][]string{
		{"ip", "link", "add", cacheLink, "type", "bridge"},
		{"ip", "address", "add", localDNS + "/32", "dev", cacheLink},
		{"ip", "address", "add", serviceDNS + "/32", "dev", cacheLink},
		{"ip", "link", "set", cacheLink, "up"},
	}
	for _, rule := range untracked() {
		steps = append(steps, append([]string{"iptables", "-w", "10", "-t", rule[0], "-I"}, rule[1:]...))
	}
	for _, step := range steps {
		if out, err := node.Run(ctx, step...); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
	}
	return node.Start(ctx, "node-cache", s.Program("coredns"), "-conf", config)
}

// stopCache takes all of that away.
func stopCache(node *cluster.Machine) error {
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	err := node.Stop(ctx, "node-cache", syscall.SIGTERM)
	for _, rule := range untracked() {
		_, err2 := node.Run(ctx, append([]string{"iptables", "-w", "10", "-t", rule[0], "-D"}, rule[1:]...)...)
		err = errors.Join(err, err2)
	}
	_, err2 := node.Run(ctx, "ip", "link", "del", cacheLink)
	return errors.Join(err, err2)
}

// asksCache has a client ask its node's cache, which says where it is and knows the cluster's names from CoreDNS.
func asksCache(t *testing.T, from client) {
	t.Helper()
	for _, server := range []string{localDNS, serviceDNS} {
		for _, network := range []string{"udp", "tcp"} {
			asker := resolver(from, network, net.JoinHostPort(server, "53"))
			what := fmt.Sprintf("%s asks %s over %s", from.name, server, network)
			err := cluster.Poll(within(t, stepLimit), what, func(ctx context.Context) error {
				return resolves(ctx, asker, "where.test.", from.node.Addr)
			})
			if err != nil {
				t.Error(err)
				continue
			}
			for range 5 {
				for name, want := range map[string]netip.Addr{
					"where.test.": from.node.Addr, clusterName: netip.MustParseAddr(apiService),
				} {
					if err := resolves(within(t, answerLimit), asker, name, want); err != nil {
						t.Errorf("%s: %v", what, err)
					}
				}
			}
		}
	}
}

func resolves(ctx context.Context, asker *net.Resolver, name string, want netip.Addr) error {
	found, err := asker.LookupNetIP(ctx, "ip4", name)
	if err == nil && (len(found) != 1 || found[0] != want) {
		err = fmt.Errorf("%s is %v, want %s", name, found, want)
	}
	return err
}

// pastNetfilter checks that the node's connection table has nothing of the cache's own address, and its rules have met packets.
func pastNetfilter(t *testing.T, node *cluster.Machine) {
	t.Helper()
	for _, direction := range []string{"--orig-dst", "--reply-src"} {
		if out, err := node.Run(t.Context(), "conntrack", "-L", direction, localDNS); err != nil || !strings.Contains(out, " 0 flow entries") {
			t.Errorf("%s follows flows to its cache: %v\n%s", node.Name, err, out)
		}
	}
	rules, err := node.Run(t.Context(), "iptables-save", "-c", "-t", "raw")
	if err != nil {
		t.Error(err)
	}
	met := 0
	for line := range strings.Lines(rules) {
		if strings.Contains(line, "-A PREROUTING") && strings.Contains(line, "-j NOTRACK") && !strings.HasPrefix(line, "[0:0]") {
			met++
		}
	}
	if met != 4 {
		t.Errorf("%d rules of %s for what comes to the cache have met packets, want 4:\n%s", met, node.Name, rules)
	}
}
