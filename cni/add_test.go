package cni

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestAddMakesAPodAndDelUnmakesIt(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	p := w.newPod()
	r := w.add(p, nil)

	if len(r.IPs) != 1 || r.IPs[0].Address.String() != "10.9.0.2/32" || r.IPs[0].Gateway.String() != "169.254.1.1" {
		t.Fatalf("addresses %v, want 10.9.0.2/32 by 169.254.1.1", r.IPs)
	}
	if len(r.Interfaces) != 2 || r.Interfaces[0].Name != p.id.HostLinkName() || r.Interfaces[1].Sandbox != p.path() ||
		*r.IPs[0].Interface != 1 || r.Interfaces[1].Mtu != 1400 {
		t.Fatalf("interfaces %v", r.Interfaces)
	}
	host, err := w.host.LinkByName(p.id.HostLinkName())
	w.must(err)
	if !host.Up() || host.MTU != 1400 || host.MAC.String() != r.Interfaces[0].Mac {
		t.Errorf("host side %+v", host)
	}
	checkPodSide(t, w, p, host)
	checkHostSide(t, w, host, r.Interfaces[1].Mac)

	state, err := endpoint.Read(w.stateDir, p.id)
	w.must(err)
	if state.HostIndex != host.Index || state.Network != "net1" || state.IPAM != "host-local" || state.NetNS != p.path() {
		t.Errorf("state %+v", state)
	}
	w.ok("DEL", p, nil)
	w.unchanged(before)
	w.ok("DEL", p, nil) // again
	w.unchanged(before)
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
	want := netip.MustParsePrefix("10.9.0.2/32")
	if !slices.ContainsFunc(addresses, func(a device.Address) bool { return a.Index == l.Index && a.Prefix == want }) {
		t.Errorf("pod addresses %v", addresses)
	}
	routes, err := h.Routes()
	w.must(err)
	var got []string
	for _, r := range routes {
		if r.Dst.Addr().Is4() {
			got = append(got, r.Dst.String()+" "+r.Gateway.String())
		}
	}
	if diff := cmp.Diff([]string{"0.0.0.0/0 169.254.1.1", "169.254.1.1/32 invalid IP"}, got); diff != "" {
		t.Errorf("pod routes (-want +got):\n%s", diff)
	}
	neighbours, err := h.Neighbours(l.Index)
	w.must(err)
	if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(gateway, host.MAC) }) {
		t.Errorf("pod neighbours %v", neighbours)
	}
}

func checkHostSide(t *testing.T, w *fixture, host device.Link, podMAC string) {
	t.Helper()
	addr := netip.MustParseAddr("10.9.0.2")
	mac, err := net.ParseMAC(podMAC)
	w.must(err)
	routes, err := w.host.OwnRoutes()
	w.must(err)
	if len(routes) != 1 || routes[0].Dst != whole(addr) || routes[0].Index != host.Index || routes[0].Source != nodeIP {
		t.Errorf("host routes %+v", routes)
	}
	neighbours, err := w.host.Neighbours(host.Index)
	w.must(err)
	if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(addr, mac) }) {
		t.Errorf("host neighbours %v", neighbours)
	}
	for name, want := range map[string]string{"rp_filter": "1", "forwarding": "1"} {
		if v, err := (device.Sysctl{}).Get("net/ipv4/conf/" + host.Name + "/" + name); err != nil || v != want {
			t.Errorf("sysctl %s of the host side: %q, %v; want %s", name, v, err, want)
		}
	}
	state, err := attach.Attacher{Dir: w.pins}.Attached(host.Index, attach.FromPod)
	if err != nil || state.Mode == "" {
		t.Errorf("attached: %+v, %v", state, err)
	}
	e, err := endpoints.Open(w.pins.Map(endpoints.Name))
	w.must(err)
	defer e.Close()
	want := endpoints.Value{Ifindex: uint32(host.Index), PodMAC: wire.MAC(mac), HostMAC: wire.MAC(host.MAC)}
	if v, err := e.Get(endpoints.Key{Address: wire.AddrFrom(addr)}); err != nil || v != want {
		t.Errorf("endpoints entry %+v, %v; want %+v", v, err, want)
	}
	d, err := devices.Open(w.pins.Map(devices.Name))
	w.must(err)
	defer d.Close()
	v, err := d.Get(devices.Key{Ifindex: uint32(host.Index)})
	if err != nil || v.Addresses[wire.IPv4] != wire.AddrFrom(addr) || v.Addresses[wire.IPv6] != (wire.Addr{}) || v.PodMAC != want.PodMAC || v.HostMAC != want.HostMAC {
		t.Errorf("devices entry %+v, %v", v, err)
	}
}

func TestHostReachesThePod(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	w.add(p, nil)
	c, err := w.reach(p)
	if err != nil {
		t.Fatalf("host to pod: %v", err)
	}
	if from := c.LocalAddr().(*net.TCPAddr).IP.String(); from != nodeIP.String() {
		t.Errorf("host to pod comes from %s, want %s", from, nodeIP)
	}
	c.Close()
}

// reach connects from the host to the pod that has the first address.
func (w *fixture) reach(p *pod) (net.Conn, error) {
	w.t.Helper()
	var listener net.Listener
	w.must(p.ns.Do(func() (err error) {
		listener, err = net.Listen("tcp4", "10.9.0.2:80")
		return err
	}))
	defer listener.Close()
	return net.DialTimeout("tcp4", "10.9.0.2:80", priv.Patience(2*time.Second)) // from the test's thread, which is in the node
}
