package modes

import (
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// servesAService: what goes to a Service arrives at the server under the client's address, and what goes straight to it does not pass for that.
func servesAService(t *testing.T, n *Network) {
	t.Helper()
	if n.setup.rules == "" && !n.setup.services {
		return
	}
	translated := exchanged
	translated.Served = true
	for _, path := range []string{result.SameNode, result.AcrossNodes} {
		if _, err := n.Resize(t.Context(), 2, Services{20, path}); err != nil {
			t.Fatal(err)
		}
		before, after, seen := exchangeVia(t, n, path, n.Frontend(path))
		if client, _ := n.Ends(path); seen != client.Addr() {
			t.Errorf("%s, through a Service: the server saw %s", path, seen)
		}
		if err := n.Carried(before, after, path, translated); err != nil {
			t.Error(err)
		}
		before, after, _ = exchange(t, n, path)
		complains(t, n.Carried(before, after, path, translated), "rose by 0")
	}
	if n.Mode == result.IPTables || n.Mode == result.EBPF || n.Mode == result.NFTables {
		servesOthers(t, n)
	}
	if _, err := n.Resize(t.Context(), 2, Services{}); err != nil {
		t.Fatal(err)
	}
}

// seenVia is the address under which a client on a path of a Service arrives. On the node that has the endpoint kube-proxy's rules masquerade to the bridge, and
// the programs to nothing.
func (n *Network) seenVia(path string) netip.Addr {
	switch {
	case path == result.InboundLocal && n.setup.services:
		return lab.GatewayAddr[n.setup.family]
	case path == result.InboundLocal:
		return n.lab.Nodes[0].PodCIDR().Addr().Next()
	}
	return n.lab.Nodes[0].Addr()
}

// servesOthers: what the world and the node's own processes send to a Service arrives in the node's name, or the bridge's, or its own, and they are told apart; so is a process outside the
// node's cgroup, which the programs serve packet by packet.
func servesOthers(t *testing.T, n *Network) {
	t.Helper()
	translated := exchanged
	translated.Served = true
	for _, path := range result.ServicePaths() {
		if _, err := n.Resize(t.Context(), 2, Services{20, path}); err != nil {
			t.Fatal(err)
		}
		leave, err := n.Enter(path)
		if err != nil {
			t.Fatal(err)
		}
		before, after, seen := exchangeVia(t, n, path, n.Frontend(path))
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		if seen != n.seenVia(path) {
			t.Errorf("%s, through a Service: the server saw %s", path, seen)
		}
		for _, claimed := range append(result.ServicePaths(), result.AcrossNodes) {
			err := n.Carried(before, after, claimed, translated)
			if claimed == path && err != nil {
				t.Error(err)
			}
			if claimed != path && err == nil {
				t.Errorf("packets sent %s pass for packets sent %s", path, claimed)
			}
		}
	}
	if n.Mode == result.EBPF {
		before, after, _ := exchangeVia(t, n, result.FromNode, n.Frontend(result.FromNode))
		complains(t, n.Carried(before, after, result.FromNode, translated), "to_uplink forwarded")
	}
}
