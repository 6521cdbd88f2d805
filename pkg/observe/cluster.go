package observe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// ClusterFile is the file of the state directory in which the agent leaves what
// it knows of the other nodes and the maps do not say: names, and what is wrong
// with a Node object. It is for people; no packet depends on it.
const ClusterFile = "cluster.json"

// MaxSilence is how long a running agent may leave ClusterFile untouched, or its loop take for one round, before it
// counts as stuck. It touches the file after each look at the node, which it takes at least every 28 s.
const MaxSilence = time.Minute

// Whose packets netfilter may translate: others' than pods', or pods' as well.
const (
	Masquerades = "masquerades"
	Translates  = "translates"
)

// Cluster is the content of ClusterFile.
type Cluster struct {
	// NotReady says in a sentence why this node can't carry a pod, as /readyz does;
	// empty: it can. It holds for as long as the agent that wrote it runs.
	NotReady string `json:"not_ready"`
	// APIServer is the API server that the agent goes by; empty: it goes by a file.
	APIServer string `json:"api_server"`
	// Routing is the routing mode, with what there is to know of the tunnel.
	Routing string `json:"routing"`
	// SNATPorts names the ports that new masqueraded flows get; empty: pods are not masqueraded.
	SNATPorts string `json:"snat_ports"`
	// Netfilter names the rule that translates addresses in the node's netfilter, so that the
	// programs work beside it; empty: nothing does. NetfilterLevel is then Masquerades or Translates.
	Netfilter      string `json:"netfilter"`
	NetfilterLevel string `json:"netfilter_level"`
	// Degraded is what is wrong with this node but keeps no pod from being carried. It
	// holds for as long as the agent that wrote it runs, as does Lost.
	Degraded []Degraded `json:"degraded"`
	// Lost is since when Nodes can't be read that could be before; zero: they can. Why is Degraded, about AboutNodes.
	Lost time.Time `json:"lost,omitzero"`
	// Routes and IPsec say that, and why, the host's stack decides on packets' ways, and
	// on what policies reach; empty: it does not.
	Routes string `json:"routes"`
	IPsec  string `json:"ipsec"`
	// Services says who serves Services; empty: others do.
	Services        string           `json:"services"`
	Nodes           []ClusterNode    `json:"nodes"`
	Problems        []ClusterProblem `json:"problems"`
	ServiceProblems []ServiceProblem `json:"service_problems"`
	// NetworkProblems are faults of this node's surroundings that pods meet. They hold for as long as the agent that wrote them runs.
	NetworkProblems []NetworkProblem `json:"network_problems"`
}

// AboutNodes is what the loss of the source of Nodes is about.
const AboutNodes = "source/Nodes"

// Degraded is one thing that is not as it should be.
type Degraded struct {
	// About begins with the controller, as in "cluster/pass".
	About string `json:"about"`
	// Text is what is wrong, on one line.
	Text string `json:"text"`
}

// ClusterNode is a name for an address that stands in the map destinations.
type ClusterNode struct {
	Name    string     `json:"name"`
	Address netip.Addr `json:"address"`
}

// ClusterProblem is one thing that is wrong with a Node.
type ClusterProblem struct {
	Node string `json:"node"`
	// Reason is off_link, podcidr_conflict or refused, as in metrics.
	Reason string `json:"reason"`
	// Text is a sentence for people.
	Text string `json:"text"`
}

// ServiceProblem is one thing that is wrong with a Service.
type ServiceProblem struct {
	// Service is "namespace/name".
	Service string `json:"service"`
	// Reason is malformed, unsupported, taken, full, healthcheck or hostport, as in metrics.
	Reason string `json:"reason"`
	// Text is a sentence for people.
	Text string `json:"text"`
}

// NetworkProblem is one thing that is wrong with this node's surroundings, that pods meet and that an administrator has to mend.
type NetworkProblem struct {
	// Reason is the kind of problem in one word, as in metrics.
	Reason string `json:"reason"`
	// About names the object of a problem of which there may be several of one reason, such as an interface; may be empty.
	About string `json:"about"`
	// Text is a sentence for people, Remedy what mends it.
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
}

// Subject identifies a problem for as long as it lasts; Text may change meanwhile.
func (p NetworkProblem) Subject() string { return p.Reason + " " + p.About }

// offLink is the reason that the maps show as well.
const offLink = "off_link"

// notReported is why a node is not ready whose agent has written no ClusterFile yet.
const notReported = "its agent has just been started and has not reported yet"

// readCluster reads the file, and how long ago an agent has touched it.
func readCluster(stateDir string) (c Cluster, silent time.Duration, err error) {
	path := filepath.Join(stateDir, ClusterFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Cluster{NotReady: notReported}, 0, nil
	}
	if err != nil {
		return c, 0, err
	}
	if info, err := os.Stat(path); err == nil {
		silent = time.Since(info.ModTime())
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		return Cluster{}, silent, fmt.Errorf("read %s: %v", path, err)
	}
	return c, silent, nil
}

// cluster passes on what the agent found wrong: with this node, and with the
// Nodes. What it says of readiness is news only while it runs.
func (s *survey) cluster() Cluster {
	c, silent, err := readCluster(s.StateDir)
	if s.Agent.Stuck = s.Agent.Running && silent > MaxSilence; s.Agent.Stuck {
		s.problemOf("stuck", "the agent runs but has done nothing for %s: it hangs or has been stopped (SIGSTOP), and changes of the cluster are not followed; restart it",
			silent.Round(time.Second))
	}
	if err != nil {
		s.problem("the names of the nodes are not known: %v", err)
		return Cluster{}
	}
	if err := endpoint.HaveRoom(s.StateDir); err != nil {
		c.NotReady = err.Error() // there may be none for the file either
	}
	s.Agent.Ready = s.Agent.Running && !s.Agent.Stuck && c.NotReady == ""
	if s.Agent.Running && c.NotReady != "" {
		s.Agent.NotReady = typed.Printable(c.NotReady)
		s.problemOf("ready", "this node is not ready: %s", c.NotReady)
	}
	if s.Agent.Running {
		s.Agent.APIServer = typed.Printable(c.APIServer)
		s.degraded(c)
		for _, p := range c.NetworkProblems {
			s.problemOf("network "+p.Subject(), "%s; to mend it: %s (%s)", p.Text, p.Remedy, p.Reason)
		}
	}
	for _, p := range c.Problems {
		if p.Reason != offLink { // reported from the maps, where it has its effect
			s.problemOf(fmt.Sprintf("node %s %s", p.Node, p.Reason), "node %s: %s (%s)", p.Node, p.Text, p.Reason)
		}
	}
	for _, p := range c.ServiceProblems {
		s.problemOf(fmt.Sprintf("service %s %s %s", p.Service, p.Reason, p.Text), "Service %s: %s (%s)", p.Service, p.Text, p.Reason)
	}
	return c
}

// degraded passes on what the agent found wrong that keeps no pod from being carried.
func (s *survey) degraded(c Cluster) {
	s.Agent.Lost = c.Lost
	for _, d := range c.Degraded {
		controller, _, _ := strings.Cut(d.About, "/")
		if !slices.Contains(s.Agent.Degraded, controller) {
			s.Agent.Degraded = append(s.Agent.Degraded, typed.Printable(controller))
		}
		since := ""
		if d.About == AboutNodes && !c.Lost.IsZero() {
			since = fmt.Sprintf(" since %s (%s)", c.Lost.Format(time.RFC3339), time.Since(c.Lost).Round(time.Second))
		}
		s.problemOf("degraded "+d.About, "degraded%s, %s: %s", since, d.About, d.Text)
	}
}

// name says what the agent has left of this node, and gives the peers their names.
func (s *survey) name(c Cluster) {
	s.Node.Routing, s.Node.Netfilter, s.Node.NetfilterLevel, s.Node.Routes, s.Node.IPsec = typed.Printable(c.Routing), typed.Printable(c.Netfilter), typed.Printable(c.NetfilterLevel), typed.Printable(c.Routes), typed.Printable(c.IPsec)
	s.Node.Services, s.Node.SNATPorts = typed.Printable(c.Services), typed.Printable(c.SNATPorts)
	names := map[netip.Addr]string{}
	for _, n := range c.Nodes {
		names[n.Address] = n.Name
	}
	for i, p := range s.Peers {
		s.Peers[i].Name = names[p.Node]
	}
}
