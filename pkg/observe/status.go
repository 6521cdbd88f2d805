package observe

import (
	"cmp"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// Status is the state of a node as its pins and its state directory show it.
type Status struct {
	Agent       Agent        `json:"agent"`
	Node        Node         `json:"node"`
	Uplinks     []Uplink     `json:"uplinks"`
	Bridges     []Bridge     `json:"bridges"`
	Programs    []Program    `json:"programs"`
	Attachments []Attachment `json:"attachments"`
	Maps        []Fill       `json:"maps"`
	Peers       []Peer       `json:"peers"`
	// Problems says in a sentence each what is wrong; empty: nothing is.
	Problems []string `json:"problems"`
	// subjects says of each problem what it is about.
	subjects []string
}

// KeepLasting drops the problems that an earlier look did not find.
func (s *Status) KeepLasting(earlier Status) {
	problems, subjects := []string{}, []string{}
	for i, subject := range s.subjects {
		if slices.Contains(earlier.subjects, subject) {
			problems, subjects = append(problems, s.Problems[i]), append(subjects, subject)
		}
	}
	s.Problems, s.subjects = problems, subjects
}

// Agent says whether an agent runs on these directories.
type Agent struct {
	Running bool   `json:"running"`
	Lock    string `json:"lock"`
	// Stuck: it runs and has done nothing for longer than MaxSilence, so what it has said may not be true any more.
	Stuck bool `json:"stuck"`
	// Ready: it runs and says that the node can carry a pod.
	Ready bool `json:"ready"`
	// NotReady is why it can't, while the agent runs.
	NotReady string `json:"not_ready"`
	// Degraded are the controllers with problems that keep no pod from being carried.
	Degraded []string `json:"degraded"`
	// APIServer is the API server that it goes by, and how many it knows; empty: it goes by a file, or does not run.
	APIServer string `json:"api_server"`
	// Lost is since when the agent can't read Nodes that it could read before; zero: it can.
	Lost time.Time `json:"lost,omitzero"`
}

// Node is this node as the map config has it.
type Node struct {
	Layout    uint32         `json:"layout"`
	Addresses []netip.Addr   `json:"addresses"`
	PodCIDRs  []netip.Prefix `json:"pod_cidrs"`
	Pods      int            `json:"pods"`
	// MTU is what the ways to all other nodes' pods carry, in bytes of IP packet; 0: there is no such way. PodsAbove is
	// how many pods have an interface that sends larger packets.
	MTU       uint32 `json:"mtu"`
	PodsAbove int    `json:"pods_above_mtu"`
	// Tunnel is the index of the tunnel device; 0: there is none that works.
	Tunnel uint32 `json:"tunnel"`
	// Routing is the routing mode, with what there is to know of the tunnel; empty where the agent has not left it.
	Routing string `json:"routing"`
	// SNATPorts names the ports that new masqueraded flows get; empty: none do, or the agent has not left it.
	SNATPorts string `json:"snat_ports"`
	// Netfilter names the rule that translates addresses here, beside which the programs work;
	// empty: nothing does. NetfilterLevel is then Masquerades or Translates.
	Netfilter      string `json:"netfilter"`
	NetfilterLevel string `json:"netfilter_level"`
	// Routes and IPsec say that, and why, the host's stack decides on packets' ways, and
	// on what policies reach; empty: it does not.
	Routes string `json:"routes"`
	IPsec  string `json:"ipsec"`
	// Services says who serves Services; empty: others do.
	Services string `json:"services"`
	// HostPorts is how many host ports this node's pods have.
	HostPorts int `json:"host_ports"`
}

// Uplink is an interface that leads out of the node, with the addresses that
// pods are masqueraded to.
type Uplink struct {
	Ifindex   uint32       `json:"ifindex"`
	Interface string       `json:"interface"`
	Addresses []netip.Addr `json:"addresses"`
}

// Peer is another node; without a podCIDR, PodCIDR is empty.
type Peer struct {
	// Name of the Node; empty where the agent has not left it.
	Name    string     `json:"name"`
	Node    netip.Addr `json:"node"`
	PodCIDR string     `json:"pod_cidr"`
	// Way is how its pods are reached, over the uplink or the tunnel of Ifindex; empty without a podCIDR.
	Way       destinations.Way `json:"way"`
	Ifindex   uint32           `json:"ifindex"`
	Interface string           `json:"interface"`
	// MTU is what the way carries, in bytes of IP packet: what the programs have learnt, if it is less than the agent knows.
	MTU uint32 `json:"mtu"`
}

// fullPercent is the fill from which on a table is a problem: the agent keeps
// them under 70.
const fullPercent = 90

// survey collects a Status, and beside it what several steps read.
type survey struct {
	Status
	Reader
	endpoints  []typed.Entry[endpoints.Key, endpoints.Value]
	devices    map[uint32]devices.Value // by index of the link
	world      devices.Value            // of all clients outside together
	uplinks    []typed.Entry[uplinks.Key, uplinks.Value]
	interfaces map[uint32]string // the names of all links, by index
	mtus       map[uint32]uint32 // the same of their MTUs
	names      Pods
	services   bool // the programs translate to backends
}

// Survey looks at the node. What is wrong with the node is no error but one of
// the Problems; an error is what could not be read.
func (r Reader) Survey() (Status, error) {
	s := survey{Reader: r, Status: Status{
		// Empty lists, not null, for who reads the JSON.
		Agent:       Agent{Degraded: []string{}},
		Node:        Node{Addresses: []netip.Addr{}, PodCIDRs: []netip.Prefix{}},
		Uplinks:     []Uplink{},
		Bridges:     []Bridge{},
		Programs:    []Program{},
		Attachments: []Attachment{},
		Maps:        []Fill{},
		Peers:       []Peer{},
		Problems:    []string{},
	}}
	if err := s.agent(); err != nil {
		return s.Status, err
	}
	left := s.cluster()
	for _, step := range []func() error{
		s.links, s.pods, s.bridges, s.node, s.hostPorts, s.destinations, func() error { s.name(left); return nil }, s.reach, s.programs, s.attachments, s.fills,
	} {
		err := step()
		if missing(err) {
			// One reason is enough: without maps nothing else can be found out.
			s.problem("%v", r.explainDir(err))
			break
		}
		if err != nil {
			return s.Status, r.explainDir(err)
		}
	}
	return s.Status, nil
}

func (s *survey) problem(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.problemOf(text, "%s", text)
}

// problemOf is a problem whose sentence may change while it lasts.
func (s *survey) problemOf(subject, format string, args ...any) {
	s.Problems = append(s.Problems, typed.Printable(fmt.Sprintf(format, args...)))
	s.subjects = append(s.subjects, subject)
}

func (s *survey) agent() error {
	s.Agent.Lock = filepath.Join(s.StateDir, bpffs.AgentLock)
	running, err := bpffs.Held(s.Agent.Lock)
	if err != nil {
		return err
	}
	s.Agent.Running = running
	if !running {
		s.problem("no agent is running (%s is not held): pods talk on, but changes of the cluster are not followed; start it",
			s.Agent.Lock)
	}
	return nil
}

// links reads the names of all links at once: each question to the kernel about one may list them all.
func (s *survey) links() error {
	host, err := device.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	all, err := host.Links()
	s.interfaces, s.mtus = make(map[uint32]string, len(all)), make(map[uint32]uint32, len(all))
	for _, l := range all {
		s.interfaces[uint32(l.Index)], s.mtus[uint32(l.Index)] = l.Name, uint32(l.MTU)
	}
	return err
}

// pods reads what the plugin writes: endpoints, their devices and what the pods are called.
func (s *survey) pods() (err error) {
	s.names, err = ReadPods(s.StateDir)
	for line := range strings.Lines(errorText(err)) { // one for each file
		s.problem("%s: the agent can't repair that pod; delete it", strings.TrimSpace(line))
	}
	if s.endpoints, err = load[endpoints.Key, endpoints.Value](s.Dir, endpoints.Name); err != nil {
		return err
	}
	entries, err := load[devices.Key, devices.Value](s.Dir, devices.Name)
	if err != nil {
		return err
	}
	s.devices = make(map[uint32]devices.Value, len(entries))
	for _, e := range entries {
		if e.Key.Ifindex == devices.World {
			s.world = e.Value
		} else {
			s.devices[e.Key.Ifindex] = e.Value
		}
	}
	slices.SortFunc(s.endpoints, func(a, b typed.Entry[endpoints.Key, endpoints.Value]) int {
		return a.Key.Address.Compare(b.Key.Address)
	})
	s.Node.Pods = len(s.devices)
	for _, e := range s.endpoints {
		if _, known := s.devices[e.Value.Ifindex]; !known {
			s.problem("pod %s cannot send: its interface %d has no entry in the map devices; a running agent makes one, or delete the pod",
				s.called(e.Value.Ifindex, e.Key.Address.String()), e.Value.Ifindex)
		}
	}
	s.conflicts()
	return nil
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// called is a pod's address, with its name if that is known.
func (s *survey) called(ifindex uint32, address string) string {
	if name := s.names.byLink[ifindex].String(); name != "" {
		return fmt.Sprintf("%s (%s)", name, address)
	}
	return address
}

func (s *survey) node() error {
	entries, err := load[config.Key, config.Value](s.Dir, config.Name)
	if err != nil {
		return err
	}
	for _, e := range entries {
		s.Node.Layout, s.Node.Tunnel = e.Value.Layout, e.Value.TunnelIfindex
		s.Node.Addresses = e.Value.NodeAddresses.All()
		s.services = e.Value.Flags&config.Services != 0
		s.Node.PodCIDRs = append(s.Node.PodCIDRs, e.Value.PodCIDRs()...)
	}
	if s.Node.Layout != wire.LayoutVersion {
		s.problem("the maps have layout %d, this ebpfctl knows %d: what it shows may be wrong; use the one in the agent's image",
			s.Node.Layout, wire.LayoutVersion)
	}
	if len(s.Node.PodCIDRs) == 0 {
		s.problem("this node has no podCIDR: where nothing above says that it is refused, give its Node one, or the agent the right --node-name")
	}
	if s.uplinks, err = load[uplinks.Key, uplinks.Value](s.Dir, uplinks.Name); err != nil {
		return err
	}
	slices.SortFunc(s.uplinks, func(a, b typed.Entry[uplinks.Key, uplinks.Value]) int {
		return cmp.Compare(a.Key.Ifindex, b.Key.Ifindex)
	})
	for _, e := range s.uplinks {
		s.Uplinks = append(s.Uplinks, Uplink{e.Key.Ifindex, s.interfaces[e.Key.Ifindex], e.Value.Addresses.All()})
	}
	if len(s.uplinks) == 0 {
		s.problem("there is no uplink: pods do not reach the world, and other nodes only over a VPN; give the node a route over an interface that can be an uplink, or the agent the right --uplink")
	}
	return nil
}

// destinations reads who else there is.
func (s *survey) destinations() error {
	entries, err := load[destinations.Key, destinations.Value](s.Dir, destinations.Name)
	s.Peers = append(s.Peers, peers(entries)...)
	return err
}

// reach looks at the way to each peer, and at what fits them all.
func (s *survey) reach() error {
	for i, p := range s.Peers {
		switch p.Way {
		case destinations.None:
			if len(s.uplinks) == 0 {
				continue // that is said once
			}
			s.problem("node %s is off link: neither an uplink nor the tunnel reaches it, so pods in %s cannot be reached; the agent's log says why",
				p.called(), p.PodCIDR)
		case destinations.Direct:
			s.Peers[i].Interface = s.interfaces[p.Ifindex]
		case destinations.Tunnel:
			s.Peers[i].Ifindex, s.Peers[i].Interface = s.Node.Tunnel, s.interfaces[s.Node.Tunnel]
		}
		if p.MTU != 0 && (s.Node.MTU == 0 || p.MTU < s.Node.MTU) {
			s.Node.MTU = p.MTU
		}
	}
	for index := range s.devices {
		if s.Node.MTU != 0 && s.mtus[index] > s.Node.MTU {
			s.Node.PodsAbove++
		}
	}
	return nil
}

// called is the node's name with its address.
func (p Peer) called() string {
	if p.Name == "" {
		return p.Node.String()
	}
	return fmt.Sprintf("%s (%s)", p.Name, p.Node)
}

// peers lists each podCIDR of another node, and the addresses of nodes that no
// podCIDR belongs to.
func peers(entries []typed.Entry[destinations.Key, destinations.Value]) []Peer {
	var out []Peer
	known := map[netip.Addr]bool{}
	for _, e := range entries {
		if v := e.Value; v.Kind == destinations.PodCIDR && v.Flags&destinations.Part == 0 {
			known[v.Node.Netip()], known[v.Alias.Netip()] = true, true
			mtu := cmp.Or(uint32(v.LearntMTU), v.MTU)
			out = append(out, Peer{Node: v.Node.Netip(), PodCIDR: e.Key.Netip().String(), Way: v.Way(), Ifindex: v.Ifindex, MTU: mtu})
		}
	}
	for _, e := range entries {
		if a := e.Key.Prefix.Netip(); e.Value.Kind == destinations.Node && !known[a] {
			out = append(out, Peer{Node: a})
		}
	}
	slices.SortFunc(out, func(a, b Peer) int {
		if c := a.Node.Compare(b.Node); c != 0 {
			return c
		}
		return comparePrefixText(a.PodCIDR, b.PodCIDR)
	})
	return out
}

func (s *survey) fills() error {
	fills, err := Fills(s.Dir)
	s.Maps = append(s.Maps, fills...)
	for _, f := range fills {
		if f.Percent() >= fullPercent {
			s.problemOf("map "+f.Name, "map %s is %d %% full (%d of %d): at 100 %% new entries are refused; ebpfctl dump %s shows whose they are", f.Name, f.Percent(), f.Entries, f.Capacity, f.Name)
		}
		if f.Name == snat.Name {
			s.outside(f)
		}
	}
	return err
}

// outside looks at what clients outside hold, who leave an eighth to pods of what those do not have (bpf/lib/holder.h).
func (s *survey) outside(f Fill) {
	has := uint64(s.world.SnatFlows)
	most := (f.Capacity - min(f.Entries, f.Capacity) + has) / 8 * 7
	if has > 0 && has*100 >= most*fullPercent {
		s.problemOf("clients outside", "clients outside hold %d of the %d flows to Services and host ports that all of them together may have: beyond, new ones are dropped as SNAT_LIMIT; a larger --snat-entries makes room, and ebpfctl dump %s shows whose they are",
			has, most, f.Name)
	}
}
