package e2e

import (
	"encoding/json"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// Nodes of ours and one of flannel's are one network: pods reach each other whichever theirs is.
func TestBesideFlannel(t *testing.T) {
	t.Parallel()
	for name, backend := range backends {
		t.Run(name, func(t *testing.T) {
			r := startRegistered(t, lab.Options{}, backend)
			// Flannel's comes after one of ours and before the other: each learns of each.
			r.startOurs(t, r.Nodes[0])
			flannel := r.startFlannel(t, r.Nodes[1])
			r.startOurs(t, r.Nodes[2])
			a, b := addPod(t, r.Nodes[0], "a"), addPod(t, r.Nodes[2], "b")
			capture, err := flannel.Capture(lab.Uplink)
			if err != nil {
				t.Fatal(err)
			}
			meet(t, a.Namespace, flannel.pod, b.Namespace)
			r.assertVteps(t, capture.Close(), name == "vxlan")
			assertFlannelsHostReaches(t, flannel, a)
		})
	}
}

// Nodes of ours and flannel's behind different routers are one network as well.
func TestBesideFlannelOnAnotherLink(t *testing.T) {
	t.Parallel()
	r := startRegistered(t, lab.Options{Nodes: 3, Links: 2}, backends["directrouting"])
	flannel := r.startFlannel(t, r.Nodes[1])
	r.startOurs(t, r.Nodes[0], r.Nodes[2])
	a, b := addPod(t, r.Nodes[0], "a"), addPod(t, r.Nodes[2], "b")
	capture, err := flannel.Capture(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	meet(t, a.Namespace, flannel.pod, b.Namespace)
	r.assertVteps(t, capture.Close(), true)
}

// assertFlannelsHostReaches: flannel's node itself reaches a pod of ours, which answers it.
func assertFlannelsHostReaches(t *testing.T, flannel *flannelNode, pod *lab.Pod) {
	t.Helper()
	at := serve(t, pod.Namespace)
	seen, err := flannel.TCP(t.Context(), at)
	if err != nil {
		t.Error(err)
	} else if seen.Addr() != flannel.Addr() && seen.Addr() != flannel.PodCIDR().Addr() {
		t.Errorf("flannel's node shows itself as %s", seen)
	}
}

// assertVteps: each packet through a tunnel is addressed, inside, to what the lease of the node says that it is for; and
// there are such packets to the node and from it, or none.
func (r *registered) assertVteps(t *testing.T, packets []gopacket.Packet, tunnelled bool) {
	t.Helper()
	vteps := r.vteps(t)
	seen := map[string]int{}
	for _, packet := range packets {
		outer, inner := tunnelFrames(packet)
		if inner == nil {
			continue
		}
		seen[outer]++
		if want := vteps[outer]; inner.DstMAC.String() != want {
			t.Errorf("a frame through the tunnel to %s is addressed to %s, and the lease says %s", outer, inner.DstMAC, want)
			return
		}
	}
	if tunnelled != (len(seen) == len(r.Nodes)) || !tunnelled && len(seen) > 0 {
		t.Errorf("packets through the tunnel by destination: %v; tunnelled: %v", seen, tunnelled)
	}
}

// vteps are what the leases say that inner frames are addressed to, by public address.
func (r *registered) vteps(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, node := range r.Nodes {
		key, _ := r.leaseOf(t, node)
		got, err := r.client.Get(within(t, answerLimit), key)
		if err != nil || len(got.Kvs) != 1 {
			t.Fatalf("get %s: %v, %v", key, got, err)
		}
		var lease struct {
			PublicIP    string
			BackendData struct{ VtepMAC string }
		}
		if err := json.Unmarshal(got.Kvs[0].Value, &lease); err != nil {
			t.Fatalf("%s: %s: %v", key, got.Kvs[0].Value, err)
		}
		all[lease.PublicIP] = lease.BackendData.VtepMAC
	}
	return all
}

// tunnelFrames are where a packet through a tunnel goes, and the frame inside; nil of others, and of later fragments: their receiver
// writes into the buffer that the capture reads. The port is not VXLAN's own, by which gopacket would know it.
func tunnelFrames(packet gopacket.Packet) (to string, inner *layers.Ethernet) {
	ip, _ := packet.Layer(layers.LayerTypeIPv4).(*layers.IPv4)
	udp, _ := packet.Layer(layers.LayerTypeUDP).(*layers.UDP)
	if ip == nil || udp == nil || udp.DstPort != 8472 && udp.DstPort != 4790 {
		return "", nil
	}
	tunnel := gopacket.NewPacket(udp.Payload, layers.LayerTypeVXLAN, gopacket.Default)
	if inside, _ := tunnel.Layer(layers.LayerTypeIPv4).(*layers.IPv4); inside == nil || inside.FragOffset > 0 {
		return "", nil
	}
	inner, _ = tunnel.Layer(layers.LayerTypeEthernet).(*layers.Ethernet)
	return ip.DstIP.String(), inner
}

// A node of flannel's becomes ours, with the subnet that it had, and then the other one. What the node has of flannel's goes
// as with a reboot.
func TestMoveFromFlannelInEtcd(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"host-gw", "vxlan"} {
		t.Run(name, func(t *testing.T) {
			r := startRegistered(t, lab.Options{Nodes: 2}, backends[name])
			first, second := r.startFlannel(t, r.Nodes[0]), r.startFlannel(t, r.Nodes[1])
			meet(t, first.pod, second.pod)

			a := r.move(t, first)
			meet(t, a.Namespace, second.pod)
			b := r.move(t, second)
			meet(t, a.Namespace, b.Namespace)
		})
	}
}

// move has our agent take a node over from flannel's daemon, and returns a pod of the node.
func (r *registered) move(t *testing.T, f *flannelNode) *lab.Pod {
	t.Helper()
	subnet := f.PodCIDR()
	before, err := os.ReadFile(f.SubnetFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.daemon.Stop(); err != nil {
		t.Fatal(err)
	}
	f.forgetFlannel(t)
	r.startOurs(t, f.Node)
	if f.PodCIDR() != subnet {
		t.Errorf("%s had %s with flannel, and has %s", f.Name, subnet, f.PodCIDR())
	}
	after, err := os.ReadFile(f.SubnetFile())
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Errorf("%s: by flannel:\n%s\nby ours:\n%s", f.SubnetFile(), before, after)
	}
	if out, err := f.Ebpfctl(t.Context(), "status"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return addPod(t, f.Node, "moved")
}

// forgetFlannel takes away what a reboot would.
func (f *flannelNode) forgetFlannel(t *testing.T) {
	t.Helper()
	links, err := lab.RetryInterrupted(f.Netlink().LinkList)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; name == "cni0" || strings.HasPrefix(name, "flannel.") || strings.HasSuffix(name, "-flannel") {
			if err := f.Netlink().LinkDel(l); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, network, err := net.ParseCIDR(leasedNetwork)
	if err != nil {
		t.Fatal(err)
	}
	routes, err := lab.RetryInterrupted(func() ([]netlink.Route, error) { return f.Netlink().RouteList(nil, 0) })
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range routes {
		if route.Dst != nil && network.Contains(route.Dst.IP) {
			if err := f.Netlink().RouteDel(&route); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, table := range []string{"nat", "filter"} {
		for _, flag := range []string{"-F", "-X"} {
			if _, err := f.Exec(t.Context(), "iptables", "-w", "10", "-t", table, flag); err != nil {
				t.Fatal(err)
			}
		}
	}
}
