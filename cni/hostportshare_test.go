package cni

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// A namespace leaves others half of what they leave, by however many pods.
func TestShareOfANamespace(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	room := int(w.openHostPorts().MaxEntries())
	many := func(first, n int) map[string]any {
		var list []map[string]any
		for port := first; port < first+n; port++ {
			list = append(list, hostPort(port, port))
		}
		return mapped(list...)
	}
	of := func(pod string) string { return "CNI_ARGS=K8S_POD_NAMESPACE=" + pod + ";K8S_POD_NAME=web" }
	first, second := w.newPod(), w.newPod()
	conf := many(1, 3*room/16)
	r := w.add(first, conf, of("shop"))
	w.add(second, many(10000, room/32), of("shop")) // 3/8 and 1/16 are 7/16
	_, e := w.call("ADD", w.newPod(), many(20000, room/32+1), of("shop"), killAt+"=link")
	w.isError(e, codeHostPort, "namespace shop, which has ", fmt.Sprint(7*room/16), fmt.Sprintf("may have %d at most", room/2), fmt.Sprintf("%d of %d;", room, room))
	w.add(w.newPod(), many(20000, room/32), of("shop"))
	_, e = w.call("ADD", w.newPod(), many(30000, 1), of("shop"), killAt+"=link")
	w.isError(e, codeHostPort, "namespace shop")

	// Other namespaces have a share of what it leaves, and pods that nobody has named the share of a pod.
	w.add(w.newPod(), many(30000, room/8), of("other"))
	_, e = w.call("ADD", w.newPod(), many(40000, 1), of("other"), killAt+"=link")
	w.isError(e, codeHostPort, "namespace other, which has ", fmt.Sprint(room/4))
	w.add(w.newPod(), many(40000, 10))

	// What a pod was given is made again, and a repeated ADD answers, also now that the namespace may have less.
	w.must(w.openHostPorts().Delete(hostports.KeyFrom(netip.IPv4Unspecified(), 1, wire.TCP)))
	w.repair(first)
	w.add(first, conf, of("shop"))
	w.ok("CHECK", first, merged(prevResult(t, r), conf))
	w.ok("DEL", second, nil)
	w.refused(codeHostPort, "ADD", w.newPod(), many(30000, 1), "taken by pod other/web")
}
