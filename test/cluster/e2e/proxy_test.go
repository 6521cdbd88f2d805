package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// kube-proxy changes its mode while pods talk, and Services work in the other mode as they did.
func TestServicesInNftablesMode(t *testing.T) {
	s := newStage(t, running(t))
	t.Cleanup(func() { switchKubeProxy(t, s.standing, cluster.IPTables) })
	connections := throughServices(t, s)
	undisturbedOn(t, s.standing, slices.Concat(direct(s.standing), overOthers(t, s.standing)), func() { switchKubeProxy(t, s.standing, cluster.NFTables) })
	connections.end(t)
	runServiceTests(t, s, true)
}

// throughServices keeps connections to pods of both nodes busy that are translated: by a Service's address and by a node's port.
func throughServices(t *testing.T, s *stage) *traffic {
	t.Helper()
	tr := newTraffic(t)
	for _, backend := range []*cluster.Pod{s.near, s.far} {
		made := addService(t, s.standing, "kept-"+backend.Name, behind(backend.Name))
		for _, w := range []path{
			{"a pod", s.client, made.byAddr(t)}, {"a node", s.Nodes[1], made.byAddr(t)},
			{"the world by a node's port", s.Fabric, made.byPorts(s.Nodes[0])},
		} {
			w.what = backend.Name + " by its Service from " + w.what
			if err := answers(t, w.what, w.from, w.to); err != nil {
				t.Fatal(err)
			}
			tr.connection(t, w)
		}
	}
	return tr
}

// switchKubeProxy changes the mode on all nodes, and waits until rules of this mode and none of the other are there.
func switchKubeProxy(t *testing.T, s *standing, mode string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), stepLimit)
	defer cancel()
	for _, node := range s.Nodes {
		if err := s.SwitchKubeProxy(ctx, node, mode); err != nil {
			t.Error(err)
			return
		}
	}
	translateBy(ctx, t, s, mode)
}

// ruleTools are where each family has kube-proxy's rules, by its mode.
var ruleTools = map[core.IPFamily]struct{ table, save string }{
	core.IPv4Protocol: {"ip kube-proxy", "iptables-save"}, core.IPv6Protocol: {"ip6 kube-proxy", "ip6tables-save"},
}

// translateBy waits until all nodes have rules of kube-proxy's mode, and none of the other.
func translateBy(ctx context.Context, t *testing.T, s *standing, mode string) {
	t.Helper()
	concurrently(s.Nodes, func(node *cluster.Machine) {
		err := cluster.Poll(ctx, node.Name+" translates by "+mode, func(ctx context.Context) error {
			tables, err := node.Run(ctx, "nft", "list", "tables")
			for _, family := range s.Options.Families {
				chains, err2 := node.Run(ctx, ruleTools[family].save, "-t", "nat")
				byNftables, byIptables := strings.Contains(tables, ruleTools[family].table), strings.Contains(chains, "-j KUBE-SEP-")
				if byNftables != (mode == cluster.NFTables) || byIptables != (mode == cluster.IPTables) {
					err2 = fmt.Errorf("rules of %s in nftables mode %v, in iptables mode %v", family, byNftables, byIptables)
				}
				err = errors.Join(err, err2)
			}
			return err
		})
		if err != nil {
			t.Errorf("%v\n%s", err, node.LogTail("kube-proxy", 20))
		}
	})
}
