package cni

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

func hostLocal(extra map[string]any) map[string]any {
	ipam := map[string]any{"type": "host-local", "ranges": [][]any{{map[string]any{"subnet": "10.9.0.0/24"}}}}
	maps.Copy(ipam, extra)
	return map[string]any{"ipam": ipam}
}

func runtimeConfig(what map[string]any) map[string]any { return map[string]any{"runtimeConfig": what} }

func TestEveryVersionOfTheSpecification(t *testing.T) {
	w := newDual(t)
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		p := w.newPod()
		conf := map[string]any{"cniVersion": version}
		out, e := w.call("ADD", p, conf)
		if e != nil {
			t.Fatalf("%s: ADD: %s", version, e)
		}
		var raw map[string]any
		w.must(json.NewDecoder(strings.NewReader(out)).Decode(&raw))
		if raw["cniVersion"] != version {
			t.Errorf("%s: the result is of version %v", version, raw["cniVersion"])
		}
		if version != "0.3.1" { // CHECK is newer
			w.ok("CHECK", p, map[string]any{"cniVersion": version, "prevResult": raw})
		}
		w.ok("DEL", p, conf)
	}
	for _, version := range []string{"0.1.0", "2.0.0", "x"} {
		if _, e := w.call("ADD", w.newPod(), map[string]any{"cniVersion": version}); e == nil {
			t.Errorf("version %s was accepted", version)
		}
	}
	out, e := w.call("VERSION", nil, nil)
	if e != nil {
		t.Fatal(e)
	}
	var v struct{ SupportedVersions []string }
	w.must(json.NewDecoder(strings.NewReader(out)).Decode(&v))
	if diff := cmp.Diff([]string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}, v.SupportedVersions); diff != "" {
		t.Errorf("VERSION (-want +got):\n%s", diff)
	}
	for _, verb := range []string{"GC", "STATUS"} {
		w.refused(1, verb, nil, map[string]any{"cniVersion": "1.0.0", gcKey: []any{}})
	}
}

func TestRequestedAddress(t *testing.T) {
	w := newFixture(t)
	for name, ask := range map[string]struct {
		conf map[string]any
		env  string
	}{
		"CNI_ARGS":        {nil, "CNI_ARGS=IgnoreUnknown=1;IP=10.9.0.77;K8S_POD_NAME=x"},
		"capability ips":  {runtimeConfig(map[string]any{"ips": []string{"10.9.0.77/24"}}), "A=B"},
		"args in conf":    {map[string]any{"args": map[string]any{"cni": map[string]any{"ips": []string{"10.9.0.77"}}}}, "A=B"},
		"both, the same":  {runtimeConfig(map[string]any{"ips": []string{"10.9.0.77"}}), "CNI_ARGS=IP=10.9.0.77"},
		"all over again ": {nil, "CNI_ARGS=IP=10.9.0.77"}, // it rests, and is given at once
	} {
		p := w.newPod()
		if r := w.add(p, ask.conf, ask.env); r.IPs[0].Address.String() != "10.9.0.77/32" {
			t.Errorf("%s: got %s", name, r.IPs[0].Address.String())
		}
		other, before := w.newPod(), w.everything()
		_, e := w.call("ADD", other, ask.conf, ask.env)
		w.isError(e, codeNoAddress, "10.9.0.77")
		w.unchanged(before)
		w.ok("DEL", p, ask.conf, ask.env)
	}
	w.refused(7, "ADD", w.newPod(), runtimeConfig(map[string]any{"ips": []string{"10.8.0.1"}}), "runtimeConfig.ips[0]", "10.8.0.1")
	_, e := w.call("ADD", w.newPod(), nil, "CNI_ARGS=IP=10.8.0.1")
	w.isError(e, 4, "CNI_ARGS", "10.8.0.1")
	// A podCIDR's network address is the tunnel device's.
	dual := hostLocal(map[string]any{"ranges": rangesOf(wire.IPv4, wire.IPv6)})
	for _, cidr := range podCIDRs {
		_, e = w.call("ADD", w.newPod(), dual, "CNI_ARGS=IP="+cidr.Addr().String())
		w.isError(e, 4, "CNI_ARGS", cidr.Addr().String())
	}
	r := w.add(w.newPod(), merged(runtimeConfig(map[string]any{"ips": []string{"fd00:9::77/64", "10.9.0.78"}}), dual))
	if r.IPs[0].Address.String() != "10.9.0.78/32" || r.IPs[1].Address.String() != "fd00:9::77/128" {
		t.Errorf("of both families: got %v", r.IPs)
	}
}

// TestPodIsNamed: the state file and the log say what the runtime calls the pod, and no name keeps a pod from its network.
func TestPodIsNamed(t *testing.T) {
	w := newFixture(t)
	w.conf["logLevel"] = "info"
	for env, want := range map[string][2]string{
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=6ba7-1": {"shop/web", "6ba7-1"},
		"CNI_ARGS=K8S_POD_NAME=web":                                                       {"/web", ""},
		"CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_UID=6ba7":                                {"", "6ba7"},
		"CNI_ARGS=K8S_POD_NAMESPACE=\x1b[2J;K8S_POD_NAME=w\xff;K8S_POD_UID=\n":            {"", ""},
		"CNI_ARGS=K8S_POD_NAME=web;K8S_POD_UID=" + strings.Repeat("u", 100_000):           {"/web", ""},
		"CNI_ARGS=K8S_POD_NAMESPACE=a/b;K8S_POD_NAME=" + strings.Repeat("w", 300) + ";=;": {"", ""},
	} {
		p := w.newPod()
		log, failed := w.call("ADD", p, nil, env)
		if failed != nil {
			t.Fatalf("%.100q: %v", env, failed)
		}
		e, err := endpoint.Read(w.stateDir, p.id)
		w.must(err)
		if got := [2]string{e.Pod, e.PodUID}; got != want {
			t.Errorf("%.100q: the state has %q", env, got)
		}
		named := want[0] == "" || strings.Contains(log, "pod="+want[0]+" ")
		if !named || strings.Contains(log, "\x1b") || !utf8.ValidString(log) {
			t.Errorf("%.100q: the log says %.500q", env, log)
		}
		w.ok("DEL", p, nil, env)
	}
}

func TestRequestedMAC(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	r := w.add(p, runtimeConfig(map[string]any{"mac": "02:AA:00:00:00:07"}))
	if got := r.Interfaces[1].Mac; got != "02:aa:00:00:00:07" {
		t.Errorf("the result says %s", got)
	}
	w.ok("CHECK", p, prevResult(t, r))
	for _, bad := range []any{"x", "01:00:5e:00:00:01", "00:00:00:00:00:00", "02:00:00:00:00:00:00:01", 7} {
		w.refused(7, "ADD", w.newPod(), runtimeConfig(map[string]any{"mac": bad}), "runtimeConfig.mac")
	}
}

func TestBandwidthIsSeenAndNotShaped(t *testing.T) {
	w := newFixture(t)
	out, e := w.call("ADD", w.newPod(), runtimeConfig(map[string]any{"bandwidth": map[string]any{"ingressRate": 1000}}))
	if e != nil || !strings.Contains(out, "bandwidth limit ignored") {
		t.Errorf("%v, log: %s", e, out)
	}
	out, e = w.call("ADD", w.newPod(), nil)
	if e != nil || strings.Contains(out, "bandwidth limit ignored") {
		t.Errorf("without a request: %v, log: %s", e, out)
	}
}

func TestRoutesAndResolver(t *testing.T) {
	w := newDual(t)
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	w.must(os.WriteFile(resolv, []byte("nameserver 192.0.2.53\nsearch a.test\n"), 0o600))
	routes := []any{
		map[string]any{"dst": "10.0.0.0/8"},
		map[string]any{"dst": "192.168.0.0/16", "gw": "10.9.0.1", "mtu": 1280, "priority": 7},
		map[string]any{"dst": "fd00::/8"},
		map[string]any{"dst": "2001:db8::/32", "gw": "fd00:9::1", "mtu": 1290, "priority": 8},
	}
	conf := hostLocal(map[string]any{"resolvConf": resolv, "routes": routes, "ranges": rangesOf(wire.IPv4, wire.IPv6)})
	p := w.newPod()
	r := w.add(p, conf)
	if diff := cmp.Diff([]string{"192.0.2.53"}, r.DNS.Nameservers); diff != "" {
		t.Errorf("DNS: %s", diff)
	}
	got := podRoutes(w, p)
	for dst, want := range map[string]device.Route{"192.168.0.0/16": {MTU: 1280, Priority: 7}, "2001:db8::/32": {MTU: 1290, Priority: 8}} {
		if got[dst].MTU != want.MTU || got[dst].Priority != want.Priority {
			t.Errorf("route to %s: %+v, want %+v", dst, got[dst], want)
		}
	}
	if len(got) != len(routes) {
		t.Errorf("routes %+v", got)
	}
	w.ok("CHECK", p, merged(prevResult(t, r), conf))

	// Routes of a family that the pod has no address of are left out.
	p = w.newPod()
	w.add(p, hostLocal(map[string]any{"routes": routes}))
	if got := podRoutes(w, p); len(got) != 2 || got["10.0.0.0/8"].Index == 0 {
		t.Errorf("routes of a pod with IPv4 alone: %+v", got)
	}
	w.refused(7, "ADD", w.newPod(), hostLocal(map[string]any{"resolvConf": "/nowhere"}), "ipam.resolvConf", "/nowhere")
}

// podRoutes are the pod's routes over a gateway.
func podRoutes(w *fixture, p *pod) map[string]device.Route {
	w.t.Helper()
	h, err := device.OpenIn(p.ns)
	w.must(err)
	defer h.Close()
	routes, err := h.Routes()
	w.must(err)
	got := map[string]device.Route{}
	for _, r := range routes {
		if slices.Contains(gateways[:], r.Gateway) {
			got[r.Dst.String()] = r
		}
	}
	return got
}

func TestUnknownFieldsAreLogged(t *testing.T) {
	w := newFixture(t)
	conf := hostLocal(map[string]any{"novelty": 1})
	conf["tomorrow"] = map[string]any{"a": 1}
	out, e := w.call("ADD", w.newPod(), conf)
	const said = "fields=\"[tomorrow ipam.novelty]\""
	if e != nil || !strings.Contains(out, said) {
		t.Errorf("%v, log: %s", e, out)
	}

	// Every pod's configuration has them, so they are said once; others are another matter, and so are they in another network.
	if out, e = w.call("ADD", w.newPod(), conf); e != nil || strings.Contains(out, said) {
		t.Errorf("said again: %v, log: %s", e, out)
	}
	conf["name"], conf["ipam"].(map[string]any)["ranges"] = "net2", []any{[]any{map[string]any{"subnet": "10.9.0.0/24", "rangeStart": "10.9.0.100"}}}
	if out, e = w.call("ADD", w.newPod(), conf); e != nil || !strings.Contains(out, said) {
		t.Errorf("of another network: %v, log: %s", e, out)
	}
	conf["yesterday"] = 1
	if out, e = w.call("ADD", w.newPod(), conf); e != nil || !strings.Contains(out, "fields=\"[tomorrow yesterday ipam.novelty]\"") {
		t.Errorf("of other fields: %v, log: %s", e, out)
	}
}

func TestLogFile(t *testing.T) {
	w := newFixture(t)
	file := filepath.Join(t.TempDir(), "cni.log")
	p := w.newPod()
	w.add(p, map[string]any{"logFile": file})
	content, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(content), "endpoint added") || !strings.Contains(string(content), p.id.ContainerID) {
		t.Errorf("log file: %v, %s", err, content)
	}
	out, e := w.call("ADD", w.newPod(), map[string]any{"logFile": file + "/impossible", "logLevel": "error"})
	if e != nil || strings.Contains(out, "endpoint added") {
		t.Errorf("a log that can't be opened, level error: %v, %s", e, out)
	}
}

func TestWrongValuesAreError7(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	for field, values := range map[string][]any{
		"bpffs":             {"relative", 7, "/a\x00b"},
		"stateDir":          {"run/x", []string{"/x"}},
		"mtu":               {-1, 67, 65536, "1500", 1.5},
		"attach":            {"xdp", 7},
		"addressQuarantine": {"-1s", "soon", 60},
		"logFile":           {"x.log", true},
		"logLevel":          {"loud", 3},
		"dns":               {7},
		"runtimeConfig":     {"x"},
		"ipam.type":         {map[string]any{}, nil, map[string]any{"type": "../evil"}, map[string]any{"type": "a/b"}, map[string]any{"type": ".."}},
		"prevResult":        {7, map[string]any{"cniVersion": "1.1.0", "ips": []any{}}},
	} {
		name, _, _ := strings.Cut(field, ".")
		for _, v := range values {
			w.refused(7, "ADD", w.newPod(), map[string]any{name: v}, field)
		}
	}
	w.refused(7, "ADD", w.newPod(), map[string]any{"ipam": map[string]any{"type": "host-local", "subnet": "10.9.0.0/99"}}, "ipam.subnet")
	w.refused(7, "ADD", w.newPod(), map[string]any{"ipam": map[string]any{"type": "nosuch"}}, "ipam.type", "nosuch")
	w.unchanged(before)
}

func TestHostileNames(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	for _, verb := range []string{"ADD", "DEL", "CHECK"} {
		for _, id := range []string{"../../etc", "a/b", "..", ".x", "a b", "x:y", "-x", "=x", "a\r\nb"} {
			p := w.newPod()
			p.id.ContainerID = id
			w.refused(4, verb, p, nil)
		}
		for _, ifname := range []string{"..", ".", "a/b", "a:b", "a b", "sixteen-letters0", "a\x01b"} {
			p := w.newPod()
			p.id.IfName = ifname
			w.refused(4, verb, p, nil)
		}
	}
	for _, name := range []string{"", "../x", "a/b", ".x", strings.Repeat("n", 201)} {
		w.refused(7, "ADD", w.newPod(), map[string]any{"name": name}, "name")
	}
	w.unchanged(before)
	for _, p := range []string{"/nowhere", "/dev/null", "/etc/passwd", "/proc/self/ns/mnt"} {
		_, e := w.call("ADD", w.newPod(), nil, "CNI_NETNS="+p)
		w.isError(e, 8, p)
	}
	_, e := w.call("ADD", w.newPod(), nil, "CNI_NETNS=/proc/self/ns/net")
	w.isError(e, 8, "node's own")
	w.unchanged(before)
	for _, raw := range []string{"", "{", "[]", "7", `{"name":7}`, `{"cniVersion":"1.0.0","name":"n","mtu":{}}`, strings.Repeat(`{"a":`, 20000)} {
		if _, e := w.callRaw("ADD", w.newPod(), []byte(raw)); e == nil {
			t.Errorf("%.40q was accepted", raw)
		}
	}
	w.unchanged(before)
}

func TestAddTwice(t *testing.T) {
	w := newDual(t)
	p := w.newPod()
	first := w.add(p, nil)
	before := w.everything()
	second := w.add(p, nil)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("the second result differs:\n%s", diff)
	}
	older, e := w.call("ADD", p, map[string]any{"cniVersion": "0.4.0"})
	if e != nil || !strings.Contains(older, `"version": "4"`) {
		t.Errorf("in an older version: %v %s", e, older)
	}
	elsewhere := w.newPod()
	elsewhere.id = p.id
	w.refused(codeExists, "ADD", elsewhere, nil, "exists already", "DEL")
	w.refused(codeExists, "ADD", p, map[string]any{"name": "net2"}, "exists already", "net1")
	same := w.newPod()
	same.ns = p.ns // another container id in the same namespace: eth0 is taken
	w.refused(codeExists, "ADD", same, nil, "eth0 exists already")
	w.unchanged(before)

	second.Interfaces = nil
	p.id.IfName = "eth1" // another interface of the same container is another attachment
	if r := w.add(p, nil); r.IPs[0].Address.String() == first.IPs[0].Address.String() {
		t.Error("two interfaces got one address")
	}
}

// TestLongContainerID: the specification has no limit, the file system has one for names.
func TestLongContainerID(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	for _, length := range []int{201, 1000} {
		p := w.newPod()
		p.id.ContainerID = strings.Repeat("a", length)
		r := w.add(p, nil)
		w.ok("CHECK", p, prevResult(t, r))
		w.ok("DEL", p, nil)
		w.unchanged(before)
	}
	p := w.newPod()
	p.id.ContainerID = strings.Repeat("b", 300)
	w.add(p, nil)
	w.ok("GC", nil, gcList(p))
	if slices.Equal(w.everything(), before) {
		t.Error("GC released the endpoint that it was told to keep")
	}
	w.ok("GC", nil, gcList())
	w.unchanged(before)
}
