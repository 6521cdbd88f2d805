package cni

import (
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// asFlannelDelegates is what the plugin flannel makes of a network whose pods have both families, before it adds what
// its user wrote below "delegate".
func asFlannelDelegates(delegate map[string]any) map[string]any {
	conf := hostLocal(map[string]any{
		"ranges": rangesOf(wire.IPv4, wire.IPv6),
		"routes": []any{map[string]any{"dst": "10.9.0.0/16"}, map[string]any{"dst": "fd00:9::/56"}},
	})
	conf["ipMasq"] = false
	return merged(conf, delegate)
}

// Pods get the default routes beside that of flannel's network, unless isDefaultGateway says that they shall not.
func TestDefaultRoutesOfFlannelsPods(t *testing.T) {
	w := newDual(t)
	for name, c := range map[string]struct {
		conf map[string]any
		want bool
	}{
		"nothing said":    {asFlannelDelegates(nil), true},
		"as kube-flannel": {asFlannelDelegates(map[string]any{"isDefaultGateway": true, "hairpinMode": true}), true},
		"refused":         {asFlannelDelegates(map[string]any{"isDefaultGateway": false}), false},
		"not of flannel":  {asFlannelDelegates(map[string]any{"ipMasq": nil}), false},
		"asked otherwise": {asFlannelDelegates(map[string]any{"ipMasq": nil, "isDefaultGateway": true}), true},
		"routes are theirs": {merged(asFlannelDelegates(nil), hostLocal(map[string]any{
			"ranges": rangesOf(wire.IPv4, wire.IPv6), "routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}},
		})), true},
	} {
		p := w.newPod()
		r := w.add(p, c.conf)
		got := podRoutes(w, p)
		for _, dst := range []string{"0.0.0.0/0", "::/0"} {
			if _, ok := got[dst]; ok != c.want {
				t.Errorf("%s: routes %v", name, got)
			}
		}
		if len(r.Routes) != len(got) {
			t.Errorf("%s: the result has %v, the pod %v", name, r.Routes, got)
		}
		w.ok("CHECK", p, merged(prevResult(t, r), c.conf))
	}
}

// What is as bridge would have it is not spoken of, what is not is.
func TestFieldsOfBridge(t *testing.T) {
	w := newDual(t)
	for name, c := range map[string]struct {
		delegate map[string]any
		ignored  string
	}{
		"as kube-flannel": {map[string]any{"isDefaultGateway": true, "hairpinMode": true, "isGateway": true}, ""},
		"masquerading":    {map[string]any{"ipMasq": true}, `fields=[ipMasq]`},
		"others":          {map[string]any{"isGateway": false, "hairpinMode": false, "promiscMode": true}, `fields="[hairpinMode isGateway promiscMode]"`},
	} {
		out, e := w.call("ADD", w.newPod(), asFlannelDelegates(c.delegate))
		if e != nil || !strings.Contains(out, c.ignored) || strings.Contains(out, "ignored") != (c.ignored != "") {
			t.Errorf("%s: %v, log: %s", name, e, out)
		}
	}
	for _, field := range []string{"isDefaultGateway", "ipMasq", "isGateway", "hairpinMode"} {
		w.refused(7, "ADD", w.newPod(), asFlannelDelegates(map[string]any{field: "yes"}), field, "must be true or false")
	}
}
