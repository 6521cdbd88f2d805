package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/guard"
)

// listGuarded writes what the agent does.
func (w *fixture) listGuarded(ports ...guard.Port) {
	w.t.Helper()
	content, err := endpoint.EncodeGuard(ports)
	w.must(err)
	w.must(os.WriteFile(filepath.Join(w.stateDir, endpoint.GuardFile), content, 0o600))
}

// The ports of the node's own processes are no pod's, with an agent's list or without.
func TestHostPortIsGuarded(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	for port, owner := range map[int]string{10250: "the kubelet", 10256: "health checks", 10249: "kube-proxy's metrics", 9965: "the agent"} {
		for _, host := range []string{"", "0.0.0.0", "::", nodeIPs[0].String(), nodeIPs[1].String(), "127.0.0.1", "::1"} {
			w.refusedPort(mapped(hostPort(7070, 70), hostPort(port, 80, "tcp", host)), "host port", owner)
		}
	}
	holder := w.newPod()
	w.add(holder, mapped(hostPort(10250, 80, "udp"), hostPort(6443, 80), hostPort(32100, 80, "tcp", "0.0.0.0")))
	w.listGuarded(
		guard.Port{Address: nodeIPs[0], Number: 6443, Owner: "the API server at 192.0.2.1:6443"},
		guard.Port{Address: nodeIPs[1], Number: 6444, Owner: "the API server at [2001:db8::1]:6444"},
		guard.Port{Number: 32100, Owner: "the health checks of Service shop/front (healthCheckNodePort)"},
	)
	before := w.everything()
	conf := mapped(hostPort(10250, 80, "udp"), hostPort(6443, 80), hostPort(32100, 80, "tcp", "0.0.0.0"))
	w.ok("CHECK", holder, merged(prevResult(t, w.add(holder, conf)), conf)) // what a pod has it keeps
	lost := w.openHostPorts()
	for e, err := range lost.All() {
		w.must(err)
		w.must(lost.Delete(e.Key))
	}
	w.repair(holder)
	w.unchanged(before)
	w.ok("DEL", holder, nil)
	for says, ask := range map[string]map[string]any{
		"6443/tcp of all IPv4 addresses is taken by the API server at 192.0.2.1:6443": hostPort(6443, 80),
		"6443/tcp of 192.0.2.1 is taken by the API server":                            hostPort(6443, 80, "tcp", nodeIPs[0].String()),
		"6444/tcp of all IPv6 addresses is taken by the API server":                   hostPort(6444, 80),
		"6444/tcp of 2001:db8::1 is taken by the API server":                          hostPort(6444, 80, "tcp", nodeIPs[1].String()),
		"32100/tcp of all IPv4 addresses is taken by the health checks of Service":    hostPort(32100, 80),
		"32100/tcp of all IPv6 addresses is taken by the health checks of Service":    hostPort(32100, 80, "tcp", "::"),
		"32100/tcp of 2001:db8::1 is taken by the health checks of Service":           hostPort(32100, 80, "tcp", nodeIPs[1].String()),
	} {
		w.refusedPort(mapped(hostPort(7070, 70), ask), says)
	}
	beside := w.newPod() // at other addresses, or by another protocol
	w.add(beside, mapped(
		hostPort(6443, 80, "tcp", "::"), hostPort(6443, 80, "tcp", "192.0.2.2"), hostPort(6444, 80, "tcp", "0.0.0.0"), hostPort(6443, 80, "udp"), hostPort(32100, 80, "udp"),
	))
	w.ok("DEL", beside, nil)
}

// A list that can't be read keeps the fixed ports guarded, and no pod from its node.
func TestGuardWithoutAList(t *testing.T) {
	w := newServing(t)
	w.must(os.WriteFile(filepath.Join(w.stateDir, endpoint.GuardFile), []byte("{"), 0o600))
	w.refusedPort(mapped(hostPort(10250, 80)), "the kubelet")
	w.add(w.newPod(), mapped(hostPort(6443, 80)))
	if all, err := endpoint.ReadGuard(w.stateDir); err == nil || len(all) != len(guard.Fixed()) {
		t.Errorf("guarded %v, %v", all, err)
	}
	if _, found := guard.Fixed().Find(netip.IPv4Unspecified(), 6443); found {
		t.Error("the port of some API servers is fixed")
	}
}
