package observe

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
)

// spoilt is a healthy node made sick.
type spoilt struct {
	spoil func(n *node)
	want  []string // one problem each, in order, holding this text
}

func findProblems(t *testing.T, cases map[string]spoilt) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, attach.Auto)
			c.spoil(n)
			s, err := n.Survey()
			if err != nil {
				t.Fatal(err)
			}
			if len(s.Problems) != len(c.want) {
				t.Fatalf("problems: %q, want %q", s.Problems, c.want)
			}
			for i, want := range c.want {
				if !strings.Contains(s.Problems[i], want) {
					t.Errorf("problem %d: %q, want %q", i, s.Problems[i], want)
				}
			}
		})
	}
}

func TestSurveyFindsProblemsOfTheCluster(t *testing.T) {
	findProblems(t, map[string]spoilt{
		"agent dead": {
			func(n *node) { n.agent.Release() },
			[]string{"no agent is running"},
		},
		"node off link": {
			func(n *node) {
				n.destination("10.244.5.0/24", destinations.Value{Kind: destinations.PodCIDR, Node: addr("192.0.2.5")})
			},
			[]string{"node 192.0.2.5 is off link: neither an uplink nor the tunnel reaches it, so pods in 10.244.5.0/24"},
		},
		"node off link, with a name": {
			func(n *node) {
				n.destination("10.244.5.0/24", destinations.Value{Kind: destinations.PodCIDR, Node: addr("192.0.2.5")})
				n.cluster(Cluster{
					Nodes:    []ClusterNode{{"far", netip.MustParseAddr("192.0.2.5")}},
					Problems: []ClusterProblem{{"far", "off_link", "said by the maps already"}},
				})
			},
			[]string{"node far (192.0.2.5) is off link"},
		},
		"bad Node object": {
			func(n *node) {
				n.cluster(Cluster{Problems: []ClusterProblem{{"twin", "podcidr_conflict", "claims 10.244.2.0/24, which worker has"}}})
			},
			[]string{"node twin: claims 10.244.2.0/24, which worker has (podcidr_conflict)"},
		},
		"a Service that can't be served": {
			func(n *node) {
				n.cluster(Cluster{ServiceProblems: []ServiceProblem{{"shop/web", "taken", "tcp 192.0.2.9:80 is served for Service shop/api, which is older"}}})
			},
			[]string{"Service shop/web: tcp 192.0.2.9:80 is served for Service shop/api, which is older (taken)"},
		},
		"unreadable names": {
			func(n *node) {
				if err := os.WriteFile(filepath.Join(n.StateDir, ClusterFile), []byte("{"), 0o600); err != nil {
					n.t.Fatal(err)
				}
			},
			[]string{"the names of the nodes are not known"},
		},
	})
}

func TestSurveySaysWhyTheNodeIsNotReady(t *testing.T) {
	findProblems(t, map[string]spoilt{
		"not ready": {
			func(n *node) { n.cluster(Cluster{NotReady: "the list of nodes can't be read"}) },
			[]string{"this node is not ready: the list of nodes can't be read"},
		},
		"just started": {
			func(n *node) {
				if err := os.Remove(filepath.Join(n.StateDir, ClusterFile)); err != nil {
					n.t.Fatal(err)
				}
			},
			[]string{"this node is not ready: its agent has just been started"},
		},
		"stuck": {
			func(n *node) { n.silence() },
			[]string{"the agent runs but has done nothing for 2m0s"},
		},
		"stuck and not ready": {
			func(n *node) {
				n.cluster(Cluster{NotReady: "the list of nodes can't be read"})
				n.silence()
			},
			[]string{"the agent runs but has done nothing", "this node is not ready: the list"},
		},
		"stuck, until it died": {
			func(n *node) {
				n.silence()
				n.agent.Release()
			},
			[]string{"no agent is running"},
		},
		"not ready, said before the agent died": {
			func(n *node) {
				n.cluster(Cluster{NotReady: "the list of nodes can't be read"})
				n.agent.Release()
			},
			[]string{"no agent is running"},
		},
		"degraded": {
			func(n *node) {
				n.cluster(Cluster{Degraded: []Degraded{{"mode/netfilter's translation", "Services may not work"}, {"cluster/pass", "map destinations is full"}}})
			},
			[]string{"degraded, mode/netfilter's translation: Services may not work", "degraded, cluster/pass: map destinations is full"},
		},
		"the source of Nodes is lost": {
			func(n *node) {
				n.cluster(Cluster{Lost: time.Now().Add(-time.Hour), Degraded: []Degraded{{AboutNodes, "they can't be read: i/o timeout"}, {"cluster/pass", "map destinations is full"}}})
			},
			[]string{"(1h0m0s), source/Nodes: they can't be read: i/o timeout", "degraded, cluster/pass: map destinations is full"},
		},
		"a network problem": {
			func(n *node) {
				n.cluster(Cluster{NetworkProblems: []NetworkProblem{{"no_uplink_address", "eth0 IPv6", "uplink eth0 has no IPv6 address", "give it one"}}})
			},
			[]string{"uplink eth0 has no IPv6 address; to mend it: give it one (no_uplink_address)"},
		},
		"a network problem, said before the agent died": {
			func(n *node) {
				n.cluster(Cluster{NetworkProblems: []NetworkProblem{{"no_uplink_address", "eth0 IPv6", "uplink eth0 has no IPv6 address", "give it one"}}})
				n.agent.Release()
			},
			[]string{"no agent is running"},
		},
		"degraded, said before the agent died": {
			func(n *node) {
				n.cluster(Cluster{Degraded: []Degraded{{"cluster/pass", "map destinations is full"}}, Lost: time.Now()})
				n.agent.Release()
			},
			[]string{"no agent is running"},
		},
		"not ready, and nothing pinned": {
			func(n *node) {
				n.cluster(Cluster{NotReady: "the programs do not load"})
				n.Dir += "/elsewhere"
			},
			[]string{"this node is not ready: the programs do not load", "the dataplane is not pinned below"},
		},
	})
}

// silence is what an agent leaves that has not gone round for long.
func (n *node) silence() {
	n.t.Helper()
	at := time.Now().Add(-2 * MaxSilence)
	if err := os.Chtimes(filepath.Join(n.StateDir, ClusterFile), at, at); err != nil {
		n.t.Fatal(err)
	}
}

func TestSurveyFindsProblemsOfHostPorts(t *testing.T) {
	serve := func(n *node) {
		n.attach(attach.Auto, attach.ToPod, n.pod)
		n.serveServices()
	}
	findProblems(t, map[string]spoilt{
		"not served": {
			func(n *node) { n.hostPort("0.0.0.0:8080", "10.244.1.9", n.pod) },
			[]string{"the programs serve no host ports, and pods of this node have 1"},
		},
		"its pod is gone": {
			func(n *node) {
				serve(n)
				n.hostPort("192.0.2.1:8080", "10.244.1.77", 4711)
				n.hostPort("0.0.0.0:8081", "10.244.1.9", n.pod)
			},
			[]string{"host port 192.0.2.1:8080/tcp is of pod 10.244.1.77, which is gone"},
		},
		"another pod has its address": {
			func(n *node) {
				serve(n)
				n.hostPort("[::]:8080", "10.244.1.9", n.pod+1)
			},
			[]string{"host port [::]:8080/tcp is of pod 10.244.1.9, which is gone"},
		},
	})
}

func TestSurveyFindsProblemsOfAttachments(t *testing.T) {
	findProblems(t, map[string]spoilt{
		"pod detached": {
			func(n *node) {
				if err := (attach.Attacher{Dir: n.Dir}).Detach(n.pod, attach.FromPod); err != nil {
					n.t.Fatal(err)
				}
			},
			[]string{"ec_from_pod is not attached to interface"},
		},
		"no program to the pod": {
			func(n *node) { n.serveServices() },
			[]string{"ec_to_pod is not attached to interface"},
		},
		"pod's interface gone, entries left": {
			func(n *node) { n.unlink("pod") },
			[]string{"of pod 10.244.1.9 is gone, but has entries in the maps"},
		},
		"pod with a name detached": {
			func(n *node) {
				name(n.t, n.Reader, n.pod, "shop/web", "6ba7-1")
				if err := (attach.Attacher{Dir: n.Dir}).Detach(n.pod, attach.FromPod); err != nil {
					n.t.Fatal(err)
				}
			},
			[]string{"(pod) of pod shop/web (10.244.1.9); a running agent attaches it again"},
		},
		"severed link": {
			func(n *node) {
				extra := n.link("extra")
				n.attach(attach.TCX, attach.FromPod, extra)
				n.unlink("extra")
			},
			[]string{"is severed"},
		},
		"link pinned where nothing of ours is": {
			func(n *node) { n.attach(attach.TCX, attach.FromPod, n.link("extra")) },
			[]string{"belongs to no pod and is neither uplink nor tunnel"},
		},
		// The agent attaches first, and puts the tunnel into config once it works.
		"programs on a tunnel that does not work": {
			func(n *node) {
				tunnel := n.link("tunnel")
				for _, hook := range attach.TunnelHooks() {
					n.attach(attach.TCX, hook, tunnel)
				}
			},
			nil,
		},
		"another program than the pinned one": {
			func(n *node) {
				n.programs[attach.FromPod] = pins.Program(n.t, "ec_from_pod", 99)
				n.attach(attach.Auto, attach.FromPod, n.pod)
			},
			[]string{"an update has not reached it"},
		},
		"program not pinned": {
			func(n *node) {
				if err := os.Remove(n.Dir.Program("ec_to_uplink")); err != nil {
					n.t.Fatal(err)
				}
			},
			[]string{"program ec_to_uplink is not pinned"},
		},
	})
}

// twins gives the pod's address to a second one, and to one whose interface is gone.
func twins(n *node) {
	second := n.link("second")
	n.attach(attach.Auto, attach.FromPod, second)
	for _, ifindex := range []int{second, 8888} {
		put(n.t, n.Reader, devices.Name, typed.Entry[devices.Key, devices.Value]{
			Key: devices.Key{Ifindex: uint32(ifindex)}, Value: devices.Value{Addresses: wire.Addresses{addr("10.244.1.9")}},
		})
	}
}

func TestSurveyFindsProblemsOfMaps(t *testing.T) {
	findProblems(t, map[string]spoilt{
		"endpoint without device": {
			func(n *node) {
				put(n.t, n.Reader, endpoints.Name, typed.Entry[endpoints.Key, endpoints.Value]{
					Key: endpoints.Key{Address: addr("10.244.1.77")}, Value: endpoints.Value{Ifindex: 7777},
				})
			},
			[]string{"pod 10.244.1.77 cannot send: its interface 7777 has no entry"},
		},
		"endpoint without device, with a name": {
			func(n *node) {
				name(n.t, n.Reader, 7777, "shop/web", "")
				put(n.t, n.Reader, endpoints.Name, typed.Entry[endpoints.Key, endpoints.Value]{
					Key: endpoints.Key{Address: addr("10.244.1.77")}, Value: endpoints.Value{Ifindex: 7777},
				})
			},
			[]string{"pod shop/web (10.244.1.77) cannot send"},
		},
		"state files that can't be read": {
			func(n *node) {
				name(n.t, n.Reader, n.pod, "shop/web", "")
				for _, file := range []string{"torn:eth0.json", "empty:eth0.json"} {
					if err := os.WriteFile(filepath.Join(endpoint.Dir(n.StateDir), file), nil, 0o600); err != nil {
						n.t.Fatal(err)
					}
				}
			},
			[]string{"empty:eth0.json: not the state of an endpoint", "torn:eth0.json: not the state of an endpoint"},
		},
		"two pods with one address": {
			twins,
			[]string{"have one address, 10.244.1.9: packets to it go to interface", "interface 8888"},
		},
		"two pods with one address, with a name": {
			func(n *node) {
				name(n.t, n.Reader, n.pod, "shop/web", "")
				twins(n)
			},
			[]string{"(pod of pod shop/web); delete all but one of them", "interface 8888"},
		},
		"layout of another version": {
			func(n *node) {
				put(n.t, n.Reader, config.Name, typed.Entry[config.Key, config.Value]{Value: config.Value{Layout: 999}})
			},
			[]string{"layout 999", "this node has no podCIDR"},
		},
		"full table": {
			func(n *node) {
				put(n.t, n.Reader, usage.Name, typed.Entry[usage.Key, usage.Value]{
					Key: usage.Key{Table: usage.Conntrack}, Value: usage.Value{Entries: pins.Entries * 95 / 100},
				})
			},
			[]string{"map conntrack is 94 % full"},
		},
		"clients outside have all their room": {
			func(n *node) {
				const has = pins.Entries * 85 / 100
				put(n.t, n.Reader, devices.Name, typed.Entry[devices.Key, devices.Value]{Key: devices.Key{Ifindex: devices.World}, Value: devices.Value{SnatFlows: has}})
				put(n.t, n.Reader, usage.Name, typed.Entry[usage.Key, usage.Value]{Key: usage.Key{Table: usage.Snat}, Value: usage.Value{Entries: has}})
			},
			[]string{"clients outside hold 3481 of the 3584 flows"},
		},
		"nothing pinned": {
			func(n *node) { n.Dir += "/elsewhere" },
			[]string{"the dataplane is not pinned below"},
		},
	})
}

// TestProblemsLast: a problem is the same one when only its sentence has changed.
func TestProblemsLast(t *testing.T) {
	n := newNode(t, attach.Auto)
	look := func(notReady string, entries uint64) Status {
		t.Helper()
		n.cluster(Cluster{NotReady: notReady})
		put(t, n.Reader, usage.Name, typed.Entry[usage.Key, usage.Value]{
			Key: usage.Key{Table: usage.Conntrack}, Value: usage.Value{Entries: entries},
		})
		s, err := n.Survey()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := look("for 1 s", pins.Entries*95/100)
	second := look("for 2 s", pins.Entries)
	second.KeepLasting(first)
	if len(second.Problems) != 2 || !strings.Contains(second.Problems[0], "for 2 s") || !strings.Contains(second.Problems[1], "100 % full") {
		t.Errorf("%q, want both problems as the second look saw them", second.Problems)
	}
	third := look("", pins.Entries)
	third.KeepLasting(first)
	if len(third.Problems) != 1 {
		t.Errorf("%q, want the full table alone", third.Problems)
	}
	fourth := look("again", pins.Entries)
	fourth.KeepLasting(third)
	if len(fourth.Problems) != 1 {
		t.Errorf("%q, want what the third look saw too, alone", fourth.Problems)
	}
}
