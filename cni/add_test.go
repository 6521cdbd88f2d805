package cni

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestAddMakesAPodAndDelUnmakesIt(t *testing.T) {
	forEachStack(t, func(t *testing.T, w *fixture) {
		before := w.everything()
		p := w.newPod()
		r := w.add(p, nil)

		var given []string
		for _, ip := range r.IPs {
			given = append(given, fmt.Sprintf("%s by %s, interface %d", ip.Address.String(), ip.Gateway, *ip.Interface))
		}
		var want []string
		for _, f := range w.families {
			want = append(want, fmt.Sprintf("%s by %s, interface 1", whole(firstPods[f]), gateways[f]))
		}
		if diff := cmp.Diff(want, given); diff != "" {
			t.Fatalf("addresses (-want +got):\n%s", diff)
		}
		if len(r.Interfaces) != 2 || r.Interfaces[0].Name != p.id.HostLinkName() || r.Interfaces[1].Sandbox != p.path() ||
			r.Interfaces[1].Mtu != 1400 {
			t.Fatalf("interfaces %v", r.Interfaces)
		}
		host, err := w.host.LinkByName(p.id.HostLinkName())
		w.must(err)
		if !host.Up() || host.MTU != 1400 || host.MAC.String() != r.Interfaces[0].Mac {
			t.Errorf("host side %+v", host)
		}
		checkPodSide(t, w, p, host)
		checkHostSide(t, w, host, r.Interfaces[1].Mac)
		w.ok("CHECK", p, prevResult(t, r))

		state, err := endpoint.Read(w.stateDir, p.id)
		w.must(err)
		if state.HostIndex != host.Index || state.Network != "net1" || state.IPAM != "host-local" || state.NetNS != p.path() ||
			!slices.Equal(state.Addresses, w.pick(firstPods)) {
			t.Errorf("state %+v", state)
		}
		w.ok("DEL", p, nil)
		w.unchanged(before)
		w.ok("DEL", p, nil) // again
		w.unchanged(before)
	})
}

func checkPodSide(t *testing.T, w *fixture, p *pod, host device.Link) {
	t.Helper()
	h, err := device.OpenIn(p.ns)
	w.must(err)
	defer h.Close()
	l, err := h.LinkByName("eth0")
	w.must(err)
	if !l.Up() || l.MTU != 1400 || l.PeerIndex != host.Index {
		t.Errorf("pod side %+v", l)
	}
	addresses, err := h.Addresses()
	w.must(err)
	var got []netip.Addr
	for _, a := range addresses {
		if a.Index == l.Index && a.Prefix.IsSingleIP() {
			got = append(got, a.Prefix.Addr())
		}
	}
	want := w.pick(firstPods)
	slices.SortFunc(want, netip.Addr.Compare)
	if !slices.Equal(got, want) {
		t.Errorf("pod addresses %v, want %v", got, want)
	}
	checkPodRoutes(t, w, h)
	neighbours, err := h.Neighbours(l.Index)
	w.must(err)
	permanent := slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(gateways[wire.IPv4], host.MAC) })
	if permanent != slices.Contains(w.families, wire.IPv4) {
		t.Errorf("pod neighbours %v", neighbours)
	}
	w.must(p.ns.Do(func() error {
		checkSysctls(t, w, "net/ipv6/conf/eth0/", map[string]string{"accept_ra": "0", "autoconf": "0", "accept_dad": "0", "disable_ipv6": "0"})
		return nil
	}))
}

// checkPodRoutes compares the routes that are not the kernel's own.
func checkPodRoutes(t *testing.T, w *fixture, pod *device.Handle) {
	t.Helper()
	routes, err := pod.Routes()
	w.must(err)
	var got, want []string
	for _, r := range routes {
		if r.Protocol != unix.RTPROT_KERNEL {
			got = append(got, r.Dst.String()+" "+r.Gateway.String())
		}
	}
	for f, routes := range [wire.Families][]string{{"0.0.0.0/0 169.254.1.1", "169.254.1.1/32 invalid IP"}, {"::/0 fe80::1"}} {
		if slices.Contains(w.families, wire.Family(f)) {
			want = append(want, routes...)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pod routes (-want +got):\n%s", diff)
	}
}

// checkSysctls compares IPv6's of a link of the current namespace. With IPv4 alone they are as for any new link.
func checkSysctls(t *testing.T, w *fixture, dir string, want map[string]string) {
	t.Helper()
	for name, value := range want {
		if !slices.Contains(w.families, wire.IPv6) {
			value, _ = device.Sysctl{}.Get("net/ipv6/conf/default/" + name)
		}
		if v, err := (device.Sysctl{}).Get(dir + name); err != nil || v != value {
			t.Errorf("sysctl %s%s: %q, %v; want %s", dir, name, v, err, value)
		}
	}
}

func checkHostSide(t *testing.T, w *fixture, host device.Link, podMAC string) {
	t.Helper()
	mac, err := net.ParseMAC(podMAC)
	w.must(err)
	for name, want := range map[string]string{"rp_filter": "1", "forwarding": "1"} {
		if v, err := (device.Sysctl{}).Get("net/ipv4/conf/" + host.Name + "/" + name); err != nil || v != want {
			t.Errorf("sysctl %s of the host side: %q, %v; want %s", name, v, err, want)
		}
	}
	checkSysctls(t, w, "net/ipv6/conf/"+host.Name+"/", map[string]string{"forwarding": "1", "accept_ra": "0", "addr_gen_mode": "1"})
	state, err := attach.Attacher{Dir: w.pins}.Attached(host.Index, attach.FromPod)
	if err != nil || state.Mode == "" {
		t.Errorf("attached: %+v, %v", state, err)
	}
	routes, err := w.host.OwnRoutes()
	w.must(err)
	neighbours, err := w.host.Neighbours(host.Index)
	w.must(err)
	e := w.openEndpoints()
	entry := endpoints.Value{Ifindex: uint32(host.Index), PodMAC: wire.MAC(mac), HostMAC: wire.MAC(host.MAC)}
	for _, f := range w.families {
		addr := firstPods[f]
		if !slices.ContainsFunc(routes, func(r device.Route) bool {
			return r.Dst == whole(addr) && r.Index == host.Index && r.Source == nodeIPs[f]
		}) {
			t.Errorf("host routes %+v lack that to %s", routes, addr)
		}
		if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(addr, mac) }) {
			t.Errorf("host neighbours %v lack %s", neighbours, addr)
		}
		if v, err := e.Get(endpoints.Key{Address: wire.AddrFrom(addr)}); err != nil || v != entry {
			t.Errorf("endpoints entry %+v, %v; want %+v", v, err, entry)
		}
	}
	if len(routes) != len(w.families) {
		t.Errorf("host routes %+v", routes)
	}
	d, err := devices.Open(w.pins.Map(devices.Name))
	w.must(err)
	defer d.Close()
	v, err := d.Get(devices.Key{Ifindex: uint32(host.Index)})
	if err != nil || v.Addresses != wire.AddressesFrom(w.pick(firstPods)...) || v.PodMAC != entry.PodMAC || v.HostMAC != entry.HostMAC {
		t.Errorf("devices entry %+v, %v", v, err)
	}
}

func TestHostReachesThePod(t *testing.T) {
	forEachStack(t, func(t *testing.T, w *fixture) {
		p := w.newPod()
		w.add(p, nil)
		for _, f := range w.families {
			c, err := w.reach(p, firstPods[f])
			if err != nil {
				t.Fatalf("host to pod: %v", err)
			}
			if from := c.LocalAddr().(*net.TCPAddr).IP.String(); from != nodeIPs[f].String() {
				t.Errorf("host to pod comes from %s, want %s", from, nodeIPs[f])
			}
			c.Close()
		}
	})
}

// reach connects from the host to the pod that has the address.
func (w *fixture) reach(p *pod, a netip.Addr) (net.Conn, error) {
	w.t.Helper()
	at := netip.AddrPortFrom(a, 80).String()
	var listener net.Listener
	w.must(p.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", at)
		return err
	}))
	defer listener.Close()
	return net.DialTimeout("tcp", at, priv.Patience(2*time.Second)) // from the test's thread, which is in the node
}
