package cni

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// hostPort is a mapping as runtimes ask for it; more is the protocol and the address of the host.
func hostPort(host, pod int, more ...string) map[string]any {
	m := map[string]any{"hostPort": host, "containerPort": pod}
	for i, name := range []string{"protocol", "hostIP"}[:len(more)] {
		m[name] = more[i]
	}
	return m
}

func mapped(list ...map[string]any) map[string]any {
	return runtimeConfig(map[string]any{"portMappings": list})
}

// newServing is a node whose programs serve host ports.
func newServing(t *testing.T, families ...wire.Family) *fixture {
	w := newFixture(t, families...)
	w.conf["addressQuarantine"] = "0s"
	w.serveServices(true)
	return w
}

func (w *fixture) openHostPorts() *hostports.Map {
	w.t.Helper()
	m, err := hostports.Open(w.pins.Map(hostports.Name))
	w.must(err)
	w.t.Cleanup(func() { m.Close() })
	return m
}

// hostPorts are all entries, in text, and all have to be of the pod's link.
func (w *fixture) hostPorts(of *pod) []string {
	w.t.Helper()
	link, err := w.host.LinkByName(of.id.HostLinkName())
	w.must(err)
	all := []string{}
	for e, err := range w.openHostPorts().All() {
		w.must(err)
		if int(e.Value.Ifindex) != link.Index {
			w.t.Errorf("%v is of link %d, not %d", e.Key, e.Value.Ifindex, link.Index)
		}
		all = append(all, e.Key.String()+" "+e.Value.PodAddress.With(e.Value.PodPort))
	}
	slices.Sort(all)
	return all
}

func TestHostPorts(t *testing.T) {
	forEachStack(t, func(t *testing.T, w *fixture) {
		w.conf["addressQuarantine"] = "0s"
		w.serveServices(true)
		before := w.everything()
		p := w.newPod()
		conf := mapped(
			hostPort(8080, 80), hostPort(8080, 80, "TCP", ""), // the same
			hostPort(8080, 53, "Udp"), hostPort(9090, 9090, "SCTP"), hostPort(0, 80), hostPort(0, 0, "nonsense"),
			map[string]any{"HostPort": 7070, "ContainerPort": 70, "Protocol": "tcp", "HostIP": ""}, // as containerd writes it
		)
		r := w.add(p, conf)
		var want []string
		for _, f := range w.families {
			host := [wire.Families]string{"0.0.0.0", "[::]"}[f]
			pod := [wire.Families]string{"10.9.0.2", "[fd00:9::2]"}[f]
			want = append(want, host+":8080/tcp "+pod+":80", host+":8080/udp "+pod+":53", host+":9090/132 "+pod+":9090", host+":7070/tcp "+pod+":70")
		}
		slices.Sort(want)
		if diff := cmp.Diff(want, w.hostPorts(p)); diff != "" {
			t.Errorf("entries (-want +got):\n%s", diff)
		}
		w.ok("CHECK", p, merged(prevResult(t, r), conf))
		if diff := cmp.Diff(r, w.add(p, conf)); diff != "" {
			t.Errorf("a repeated ADD (-first +second):\n%s", diff)
		}
		w.refused(codeExists, "ADD", p, mapped(hostPort(8080, 80)), "other host ports", "DEL")
		w.refused(codeExists, "ADD", p, nil, "other host ports")
		for range 2 {
			w.ok("DEL", p, conf)
			w.unchanged(before)
		}
	})
}

func TestHostAddresses(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	p := w.newPod()
	w.add(p, mapped(
		hostPort(80, 80, "tcp", "0.0.0.0"), hostPort(80, 81, "tcp", "::"), hostPort(82, 80, "", nodeIPs[0].String()),
		hostPort(82, 81, "", nodeIPs[1].String()), hostPort(83, 80, "", "127.0.0.1"), hostPort(84, 80, "", "::ffff:192.0.2.1"),
	))
	want := []string{
		"0.0.0.0:80/tcp 10.9.0.2:80", "127.0.0.1:83/tcp 10.9.0.2:80", "192.0.2.1:82/tcp 10.9.0.2:80", "192.0.2.1:84/tcp 10.9.0.2:80",
		"[2001:db8::1]:82/tcp [fd00:9::2]:81", "[::]:80/tcp [fd00:9::2]:81",
	}
	if diff := cmp.Diff(want, w.hostPorts(p)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// A hostIP of a family that the pod has not opens nothing, as with portmap.
func TestHostAddressOfAnotherFamily(t *testing.T) {
	w := newServing(t)
	p := w.newPod()
	w.add(p, mapped(hostPort(80, 80, "tcp", "::"), hostPort(81, 80, "tcp", "2001:db8::1"), hostPort(82, 80, "tcp", "0.0.0.0")))
	if diff := cmp.Diff([]string{"0.0.0.0:82/tcp 10.9.0.2:80"}, w.hostPorts(p)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

func TestMalformedPortMappings(t *testing.T) {
	w := newServing(t)
	before := w.everything()
	p := w.newPod()
	refused := func(field string, mappings any, words ...string) {
		t.Helper()
		conf := runtimeConfig(map[string]any{"portMappings": mappings})
		w.refused(7, "ADD", p, conf, append(words, "runtimeConfig.portMappings"+field)...)
		w.ok("DEL", p, conf)
	}
	good := hostPort(8080, 80)
	refused("", 7)
	refused("", good)
	refused("[1]", []any{good, "8080:80"})
	for field, list := range map[string][]map[string]any{
		"hostPort": {
			{"hostPort": -1, "containerPort": 1}, {"hostPort": 65536, "containerPort": 1}, {"hostPort": "80", "containerPort": 1},
			{"hostPort": 1.5, "containerPort": 1}, hostPort(90, 80, "sctp"), hostPort(8080, 81), hostPort(8080, 81, "tcp", nodeIPs[0].String()),
		},
		"containerPort": {{"hostPort": 90}, {"hostPort": 90, "containerPort": 0}, {"hostPort": 90, "containerPort": 65536}, {"hostPort": 90, "containerPort": []int{}}},
		"protocol":      {hostPort(90, 80, "icmp"), hostPort(90, 80, "6"), {"hostPort": 90, "containerPort": 80, "protocol": 6}},
		"hostIP": {
			hostPort(90, 80, "tcp", "localhost"), hostPort(90, 80, "tcp", "fe80::1%eth0"), hostPort(90, 80, "tcp", "fe80::1"), hostPort(90, 80, "tcp", "224.0.0.1"),
			hostPort(90, 80, "tcp", "ff02::1"), hostPort(90, 80, "tcp", "192.0.2.0/24"), {"hostPort": 90, "containerPort": 80, "hostIP": 7},
			hostPort(90, 80, "tcp", "127.0.0.53"),
		},
	} {
		for _, bad := range list {
			refused("[1]."+field, []any{good, bad})
		}
	}
	for _, bad := range []any{"x", 7, map[string]any{"mac": 7, "portMappings": 7}} {
		w.ok("DEL", p, map[string]any{"runtimeConfig": bad})
	}
	w.add(p, nil)
	w.ok("DEL", p, runtimeConfig(map[string]any{"mac": "nonsense"}))
	w.unchanged(before)
}

// refusedPort is an ADD whose host port is somebody else's: it makes no link, leaves no trace and names the holder.
func (w *fixture) refusedPort(conf map[string]any, words ...string) {
	w.t.Helper()
	before := w.everything()
	_, e := w.call("ADD", w.newPod(), conf, killAt+"=link")
	w.isError(e, codeHostPort, words...)
	w.unchanged(before)
}

func TestHostPortIsTaken(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	holder := w.newPod()
	w.add(holder, mapped(hostPort(8080, 80), hostPort(9090, 90, "udp", nodeIPs[0].String())), "CNI_ARGS=K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web")
	who := []string{"pod shop/web", holder.id.ContainerID, holder.id.HostLinkName()}
	for says, ask := range map[string]map[string]any{
		"host port 8080/tcp of all":                hostPort(8080, 81),
		"host port 8080/tcp of all IPv6 addresses": hostPort(8080, 81, "tcp", "::"),
		"host port 8080/tcp of 127.0.0.1":          hostPort(8080, 81, "tcp", "127.0.0.1"),
		"host port 8080/tcp of 2001:db8::1":        hostPort(8080, 81, "tcp", nodeIPs[1].String()),
		"host port 9090/udp of 192.0.2.1":          hostPort(9090, 90, "udp", nodeIPs[0].String()),
		"host port 9090/udp of all IPv4 addresses": hostPort(9090, 90, "udp"),
	} {
		w.refusedPort(mapped(hostPort(7070, 70), ask), append(who, says)...)
	}
	// One with another protocol, port or address is free.
	beside := w.newPod()
	w.add(beside, mapped(
		hostPort(8080, 80, "udp"), hostPort(8081, 80), hostPort(9090, 90, "udp", "192.0.2.2"), hostPort(9090, 90, "udp", "::"), hostPort(9090, 90),
	))
	w.ok("DEL", beside, nil)
	w.ok("DEL", holder, nil)
	w.add(w.newPod(), mapped(hostPort(8080, 80), hostPort(9090, 90, "udp")))
}

func TestHostPortIsANodePort(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	frontends, err := typed.Open[services.Key, services.Value](w.pins.Map(services.Name))
	w.must(err)
	defer frontends.Close()
	names, err := typed.Open[services.SetKey, services.ServiceName](w.pins.Map(services.NamesName))
	w.must(err)
	defer names.Close()
	key := services.NodePort(wire.IPv6, wire.PortFrom(30080), wire.TCP)
	w.must(frontends.Put(key, services.Value{Set: 7}))
	name := services.ServiceName{Port: wire.PortFrom(443)}
	copy(name.Namespace[:], "shop")
	copy(name.Name[:], "front")
	w.must(names.Put(services.SetKey{Set: 7}, name))
	says := []string{"host port 30080/tcp of all IPv6 addresses", "the NodePort of Service shop/front port 443"}
	w.refusedPort(mapped(hostPort(30080, 80)), says...)
	copy(name.PortName[:], "https")
	w.must(names.Put(services.SetKey{Set: 7}, name))
	w.refusedPort(mapped(hostPort(30080, 80, "tcp", nodeIPs[1].String())), "port https")
	p := w.newPod()
	r := w.add(p, mapped(hostPort(30080, 80, "udp"), hostPort(30080, 80, "tcp", "0.0.0.0"), hostPort(30081, 80)))

	// A NodePort that comes later takes nothing away, also when the pod's entry is made again.
	w.must(frontends.Put(services.NodePort(wire.IPv4, wire.PortFrom(30080), wire.UDP), services.Value{Set: 7}))
	lost := hostports.KeyFrom(netip.IPv4Unspecified(), 30080, wire.UDP)
	w.must(w.openHostPorts().Delete(lost))
	w.repair(p)
	w.ok("CHECK", p, prevResult(t, r))
}

func TestHostPortOfADeadPodIsTaken(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	m := w.openHostPorts()
	dead := hostports.Value{PodAddress: wire.AddrFrom(firstPods[0]), PodPort: wire.PortFrom(1), Ifindex: 4242}
	for _, host := range []netip.Addr{netip.IPv4Unspecified(), nodeIPs[0], nodeIPs[1]} {
		w.must(m.Put(hostports.KeyFrom(host, 8080, wire.TCP), dead))
	}
	p := w.newPod()
	r := w.add(p, mapped(hostPort(8080, 80)))
	if got := w.hostPorts(p); len(got) != 2 {
		t.Errorf("entries %v", got)
	}
	w.ok("CHECK", p, prevResult(t, r))
}

// A pod may have a port for each of many calls, or name one address after the other: what ADD takes for that, others wait for.
func TestManyHostPorts(t *testing.T) {
	const many = 8000
	c := &conf{}
	addresses := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}
	for i := range uint16(many) {
		h := endpoint.HostPort{Port: 10000 + i, PodPort: 10000 + i, Protocol: "udp"}
		single := endpoint.HostPort{Address: netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}), Port: 80, PodPort: 80, Protocol: "tcp"}
		c.ports = append(c.ports, portMapping{HostPort: h}, portMapping{HostPort: single})
	}
	began := time.Now()
	if all, err := c.hostPorts(addresses); err != nil || len(all) != 3*many {
		t.Errorf("%d, %v", len(all), err)
	}
	if took := time.Since(began); took > 2*time.Second { // it is some tens of milliseconds; one by one it was half a minute
		t.Errorf("took %s", took)
	}
}

// A pod leaves others half of what it finds. One that asks for more leaves nothing behind, and a message that people can read.
func TestShareOfHostPorts(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	m := w.openHostPorts()
	room := int(m.MaxEntries())
	from := func(first, n int) (list []map[string]any) {
		for port := first; port < first+n; port++ {
			list = append(list, hostPort(port, port))
		}
		return list
	}
	half := room / 2 / int(wire.Families)
	w.refusedPort(mapped(from(1, half+1)...), fmt.Sprintf("asks for %d host ports", room/2+2), fmt.Sprintf("may have %d at most", room/2), fmt.Sprintf("%d of %d;", room, room))
	greedy := w.newPod()
	r := w.add(greedy, mapped(from(1, half)...))
	w.refusedPort(mapped(from(20000, half/2+1)...), fmt.Sprintf("may have %d at most", room/4), fmt.Sprintf("%d of %d;", room/2, room))

	// Of the last three one has a pod's port of both families, and what is left one family's; then there are none.
	all, err := m.Content()
	w.must(err)
	for port := uint16(30000); len(all) < room-3; port++ {
		key := hostports.KeyFrom(nodeIPs[0], port, wire.TCP)
		all[key] = hostports.Value{Ifindex: 1}
		w.must(m.Put(key, all[key]))
	}
	w.add(w.newPod(), mapped(hostPort(20000, 80)))
	w.add(w.newPod(), mapped(hostPort(20000, 80, "udp", "0.0.0.0")))
	w.refusedPort(mapped(hostPort(20001, 80)), "asks for 2 host ports", "may have 0 at most", fmt.Sprintf("0 of %d;", room))

	// What a pod was given is made again, however few are free.
	lost := hostports.KeyFrom(netip.IPv4Unspecified(), 1, wire.TCP)
	w.must(m.Delete(lost))
	w.repair(greedy)
	if v, err := m.Get(lost); err != nil || v != all[lost] {
		t.Errorf("repaired to %+v, %v", v, err)
	}
	w.ok("CHECK", greedy, prevResult(t, r))
}

// Of two at once one gets it, and is whole.
func TestHostPortIsGivenOnce(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	before := w.everything()
	confs := [2][]byte{}
	for i, m := range []map[string]any{hostPort(8080, 80), hostPort(8080, 81, "tcp", nodeIPs[1].String())} {
		raw, err := json.Marshal(merged(mapped(m), w.conf))
		w.must(err)
		confs[i] = raw
	}
	for range 5 {
		pods := [2]*pod{w.newPod(), w.newPod()}
		var done [2]func() (string, error)
		for i := range pods {
			done[i] = w.start("ADD", pods[i], confs[i])
		}
		got := 0
		for i := range pods {
			out, err := done[i]()
			if err == nil {
				got++
				w.ok("CHECK", pods[i], prevResult(t, parseResult(t, out)))
			} else if !strings.Contains(out, `"code": 103`) {
				t.Errorf("refused with %s", out)
			}
		}
		if got != 1 {
			t.Fatalf("%d got the host port", got)
		}
		for _, p := range pods {
			w.ok("DEL", p, nil)
		}
		w.unchanged(before)
	}
}

// A claim that comes after the look that ADD begins with is what the lock is for.
func TestHostPortThatIsClaimedMeanwhile(t *testing.T) {
	w := newServing(t)
	before := w.everything()
	lo, err := w.host.LinkByName("lo")
	w.must(err)
	m := w.openHostPorts()
	key := hostports.KeyFrom(nodeIPs[0], 8080, wire.TCP)
	raw, err := json.Marshal(merged(mapped(hostPort(8080, 80)), w.conf))
	w.must(err)
	p := w.newPod()
	pl := &plugin{stdout: discard{}, stderr: discard{}, wait: lockWait, step: func(name string) error {
		if name != "host port entry" {
			return nil
		}
		return m.Put(key, hostports.Value{Ifindex: uint32(lo.Index)})
	}}
	err = pl.funcs().Add(p.skelArgs(raw))
	if err == nil || !strings.Contains(err.Error(), "host port 8080/tcp of all IPv4 addresses is taken by link lo") {
		t.Errorf("ADD: %v", err)
	}
	w.must(m.Delete(key))
	w.unchanged(before)
}

func TestCheckSeesHostPorts(t *testing.T) {
	w := newServing(t, wire.IPv4, wire.IPv6)
	p := w.newPod()
	r := w.add(p, mapped(hostPort(8080, 80)))
	m := w.openHostPorts()
	for _, host := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		key := hostports.KeyFrom(host, 8080, wire.TCP)
		v, err := m.Get(key)
		w.must(err)
		other := v
		other.PodPort = wire.PortFrom(81)
		stale := v
		stale.Ifindex = 4242
		for what, damage := range map[string]func() error{
			"missing": func() error { return m.Delete(key) },
			"another": func() error { return m.Put(key, other) },
			"stale":   func() error { return m.Put(key, stale) },
		} {
			w.must(damage())
			w.refused(codeCheckFailed, "CHECK", p, prevResult(t, r), "the entry of host port 8080/tcp of all", wire.FamilyOf(host).Name())
			w.repair(p)
			if got, err := m.Get(key); err != nil || got != v {
				t.Errorf("%s: repaired to %+v, %v", what, got, err)
			}
			w.ok("CHECK", p, prevResult(t, r))
		}
	}
	w.must(m.Delete(hostports.KeyFrom(netip.IPv4Unspecified(), 8080, wire.TCP)))
	w.add(p, mapped(hostPort(8080, 80))) // it is complete but for what the agent repairs
	w.ok("DEL", p, nil)
}

func TestGCOfHostPorts(t *testing.T) {
	w := newServing(t)
	kept := w.newPod()
	w.add(kept, mapped(hostPort(8080, 80)))
	before := w.everything()
	m := w.openHostPorts()
	w.must(m.Put(hostports.KeyFrom(nodeIPs[0], 7070, wire.TCP), hostports.Value{Ifindex: 4242}))
	stale, unreadable, lost := w.newPod(), w.newPod(), w.newPod()
	w.add(stale, mapped(hostPort(8081, 80)))
	w.add(unreadable, mapped(hostPort(8082, 80)))
	w.add(lost, mapped(hostPort(8083, 80)))
	w.must(os.WriteFile(filepath.Join(endpoint.Dir(w.stateDir), unreadable.id.String()+".json"), []byte("{"), 0o600))
	w.must(endpoint.Remove(w.stateDir, lost.id))
	w.destroy(lost)
	w.ok("DEL", unreadable, nil)
	w.ok("GC", nil, gcList(kept))
	w.unchanged(before)
}

// The first host port of a node waits for programs that serve them.
func TestFirstHostPort(t *testing.T) {
	w := newServing(t)
	w.serveServices(false)
	w.env = []string{portWait + "=200ms"}
	before := w.everything()
	p := w.newPod()
	conf := mapped(hostPort(8080, 80))
	w.add(w.newPod(), mapped(hostPort(0, 80))) // asks for none
	if endpoint.HostPortsAsked(w.stateDir) {
		t.Error("asked for without a host port")
	}
	w.ok("GC", nil, gcList())
	w.refused(11, "ADD", p, conf, "the first one of this node", "no agent runs", w.stateDir)
	if !endpoint.HostPortsAsked(w.stateDir) {
		t.Error("not asked for")
	}
	agent, err := bpffs.File(t.Context(), filepath.Join(w.stateDir, bpffs.AgentLock))
	w.must(err)
	w.refused(11, "ADD", p, conf, "it runs, and its log")
	agent.Release()
	w.must(os.Remove(filepath.Join(w.stateDir, bpffs.AgentLock)))
	w.unchanged(before)

	w.env = nil
	raw, err := json.Marshal(merged(mapped(hostPort(8080, 80)), w.conf))
	w.must(err)
	done := w.start("ADD", p, raw)
	time.Sleep(300 * time.Millisecond)
	w.ok("STATUS", nil, nil) // no lock is held
	lock, err := bpffs.Exclusive(t.Context(), w.stateDir, "test")
	w.must(err)
	w.serveServices(true)
	lock.Release()
	if out, err := done(); err != nil {
		t.Fatalf("ADD: %v\n%s", err, out)
	}
	if got := w.hostPorts(p); len(got) != 1 {
		t.Errorf("entries %v", got)
	}
	w.ok("DEL", p, nil)
	w.unchanged(before)

	w.must(os.Remove(w.pins.Map(hostports.Name)))
	w.refused(11, "ADD", p, conf, "the agent is of a version without host ports")
	w.add(p, nil)
	w.ok("DEL", p, nil)
}
