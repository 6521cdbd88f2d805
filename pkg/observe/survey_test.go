package observe

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// node is a healthy node with one pod and one uplink.
type node struct {
	Reader
	t        *testing.T
	agent    *bpffs.Lock
	programs map[attach.Hook]*ebpf.Program
	pod      int
	uplink   int
}

func newNode(t *testing.T, mode attach.Mode) *node {
	t.Helper()
	n := &node{Reader: isolated(t), t: t, programs: map[attach.Hook]*ebpf.Program{}}
	lock, err := bpffs.File(t.Context(), filepath.Join(n.StateDir, "agent.lock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lock.Release)
	n.agent = lock
	n.pod, n.uplink = n.link("pod"), n.link("eth0")
	for i, h := range attach.Hooks() {
		n.programs[h] = pins.Program(t, h.Program(), int32(i))
		if err := n.programs[h].Pin(n.Dir.Program(h.Program())); err != nil {
			t.Fatal(err)
		}
	}
	n.attach(mode, attach.FromPod, n.pod)
	n.attach(mode, attach.FromUplink, n.uplink)
	n.attach(mode, attach.ToUplink, n.uplink)
	put(t, n.Reader, endpoints.Name, typed.Entry[endpoints.Key, endpoints.Value]{
		Key: endpoints.Key{Address: addr("10.244.1.9")}, Value: endpoints.Value{Ifindex: uint32(n.pod)},
	})
	put(t, n.Reader, devices.Name,
		typed.Entry[devices.Key, devices.Value]{Key: devices.Key{Ifindex: devices.World}}, // no pod
		typed.Entry[devices.Key, devices.Value]{Key: devices.Key{Ifindex: uint32(n.pod)}, Value: devices.Value{Addresses: wire.Addresses{addr("10.244.1.9")}}},
	)
	put(t, n.Reader, uplinks.Name, typed.Entry[uplinks.Key, uplinks.Value]{
		Key: uplinks.Key{Ifindex: uint32(n.uplink)}, Value: uplinks.Value{Addresses: wire.Addresses{addr("172.18.0.2")}},
	})
	n.configure(0)
	n.destination("10.244.2.0/24", destinations.Value{Kind: destinations.PodCIDR, Ifindex: uint32(n.uplink), Node: addr("172.18.0.3"), MTU: 1500})
	n.destination("172.18.0.3/32", destinations.Value{Kind: destinations.Node})
	n.destination("172.18.0.9/32", destinations.Value{Kind: destinations.Node})
	n.cluster(Cluster{Nodes: []ClusterNode{{Name: "worker", Address: netip.MustParseAddr("172.18.0.3")}}})
	return n
}

// configure writes the agent's record of the node.
func (n *node) configure(flags config.Flags) {
	n.t.Helper()
	put(n.t, n.Reader, config.Name, typed.Entry[config.Key, config.Value]{Value: config.Value{
		Layout: wire.LayoutVersion, NodeAddresses: wire.Addresses{addr("172.18.0.2")}, PodCIDRAddresses: wire.Addresses{addr("10.244.1.0")}, PodCIDRLens: [wire.Families]uint32{24},
		Flags: flags,
	}})
}

// serveServices has the programs serve Services, as far as config says so.
func (n *node) serveServices() { n.configure(config.Services) }

// cluster leaves what an agent leaves.
func (n *node) cluster(c Cluster) {
	n.t.Helper()
	raw, err := json.Marshal(c)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.StateDir, ClusterFile), raw, 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// link makes one end of a veth pair in the test's namespace and returns its index.
func (n *node) link(name string) int {
	n.t.Helper()
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"})
	if err != nil {
		n.t.Fatal(err)
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		n.t.Fatal(err)
	}
	return l.Attrs().Index
}

func (n *node) unlink(name string) {
	n.t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := netlink.LinkDel(l); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) attach(mode attach.Mode, h attach.Hook, ifindex int) {
	n.t.Helper()
	if mode == attach.TCX {
		priv.NeedTCX(n.t)
	}
	if _, err := (attach.Attacher{Dir: n.Dir, Mode: mode}).Attach(ifindex, h, n.programs[h]); err != nil {
		n.t.Fatal(err)
	}
}

// hostPort writes what the plugin does of a pod's host port.
func (n *node) hostPort(host, pod string, ifindex int) {
	n.t.Helper()
	at := netip.MustParseAddrPort(host)
	put(n.t, n.Reader, hostports.Name, typed.Entry[hostports.Key, hostports.Value]{
		Key: hostports.KeyFrom(at.Addr(), at.Port(), wire.TCP), Value: hostports.Value{PodAddress: addr(pod), PodPort: wire.PortFrom(80), Ifindex: uint32(ifindex)},
	})
}

func (n *node) destination(prefix string, v destinations.Value) {
	n.t.Helper()
	put(n.t, n.Reader, destinations.Name, typed.Entry[destinations.Key, destinations.Value]{Key: prefixKey(prefix), Value: v})
}

func TestSurveyOfHealthyNode(t *testing.T) {
	for _, mode := range []attach.Mode{attach.TCX, attach.Clsact} {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, mode)
			s, err := n.Survey()
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Problems) != 0 {
				t.Errorf("problems of a healthy node: %q", s.Problems)
			}
			want := []Attachment{
				{attach.FromPod, n.pod, "pod", "10.244.1.9", PodName{}, mode, pins.ID(t, n.programs[attach.FromPod])},
				{attach.FromUplink, n.uplink, "eth0", "", PodName{}, mode, pins.ID(t, n.programs[attach.FromUplink])},
				{attach.ToUplink, n.uplink, "eth0", "", PodName{}, mode, pins.ID(t, n.programs[attach.ToUplink])},
			}
			if diff := cmp.Diff(want, s.Attachments); diff != "" {
				t.Errorf("attachments (-want +got):\n%s", diff)
			}
			wantPeers := []Peer{
				{Name: "worker", Node: addr("172.18.0.3").Netip(), PodCIDR: "10.244.2.0/24", Way: destinations.Direct, Ifindex: uint32(n.uplink), Interface: "eth0", MTU: 1500},
				{Node: addr("172.18.0.9").Netip()},
			}
			if diff := cmp.Diff(wantPeers, s.Peers, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Errorf("peers (-want +got):\n%s", diff)
			}
			fills, err := Fills(n.Dir)
			if err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(fills, s.Maps); diff != "" || len(fills) < 7 {
				t.Errorf("maps (-want +got):\n%s", diff)
			}
			if !s.Agent.Running || s.Node.Pods != 1 || s.Node.MTU != 1500 || s.Node.PodsAbove != 0 || len(s.Programs) != len(attach.Hooks()) {
				t.Errorf("status: %+v", s)
			}
		})
	}
}

func TestSurveyOfProgramsToPods(t *testing.T) {
	for mode, want := range map[attach.Mode]attach.Mode{attach.Auto: attach.Clsact, attach.Clsact: attach.Clsact, attach.TCX: attach.TCX} {
		t.Run(string(mode), func(t *testing.T) {
			n := newNode(t, mode)
			n.attach(mode, attach.ToPod, n.pod)
			for _, on := range []bool{false, true} { // turned off, a link may be left for a moment
				if on {
					n.serveServices()
				}
				s, err := n.Survey()
				if err != nil {
					t.Fatal(err)
				}
				if len(s.Problems) != 0 {
					t.Errorf("%q", s.Problems)
				}
				shown := slices.ContainsFunc(s.Attachments, func(a Attachment) bool { return a.Hook == attach.ToPod && a.Mode == want && a.Pod == "10.244.1.9" })
				if on && !shown {
					t.Errorf("attachments %+v", s.Attachments)
				}
			}
		})
	}
}

func TestSurveyCountsHostPorts(t *testing.T) {
	n := newNode(t, attach.Auto)
	n.attach(attach.Auto, attach.ToPod, n.pod)
	n.serveServices()
	n.hostPort("0.0.0.0:8080", "10.244.1.9", n.pod)
	n.hostPort("[::]:8080", "10.244.1.9", n.pod)
	if s, err := n.Survey(); err != nil || s.Node.HostPorts != 2 || len(s.Problems) > 0 {
		t.Errorf("%d host ports, problems %q, error %v", s.Node.HostPorts, s.Problems, err)
	}
	for _, name := range []string{hostports.Name, bridges.Name} { // as with an older agent
		if err := os.Remove(n.Dir.Map(name)); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := n.Survey(); err != nil || s.Node.HostPorts != 0 || len(s.Problems) > 0 {
		t.Errorf("without the maps: %d host ports, problems %q, error %v", s.Node.HostPorts, s.Problems, err)
	}
}

// A pod that came when the ways carried more is counted, and is no problem.
func TestSurveyCountsPodsAboveTheMTU(t *testing.T) {
	n := newNode(t, attach.Auto)
	n.destination("10.244.3.0/24", destinations.Value{Kind: destinations.PodCIDR, Flags: destinations.ByTunnel, Node: addr("fd00::3"), MTU: 1430, LearntMTU: 1330})
	n.destination("10.244.4.0/24", destinations.Value{Kind: destinations.PodCIDR, Flags: destinations.ByTunnel, Node: addr("fd00::4"), MTU: 1430})
	s, err := n.Survey()
	if err != nil {
		t.Fatal(err)
	}
	var mtus []uint32
	for _, p := range s.Peers {
		if p.PodCIDR != "" {
			mtus = append(mtus, p.MTU)
		}
	}
	if diff := cmp.Diff([]uint32{1500, 1330, 1430}, mtus); diff != "" || s.Node.MTU != 1330 || s.Node.PodsAbove != 1 || len(s.Problems) != 0 {
		t.Errorf("node %+v, problems %q, MTUs of peers (-want +got):\n%s", s.Node, s.Problems, diff)
	}
}

func TestSurveyIsWholeJSON(t *testing.T) {
	s, err := Reader{Dir: "/nowhere", StateDir: "/nowhere"}.Survey()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(raw), "null") {
		t.Errorf("an empty list is null: %s", raw)
	}
}
