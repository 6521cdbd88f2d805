package e2e

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

var migrateFlows = flag.Int("migrate-flows", 2, "busy connections, and idle ones, that TestMigration opens on each trip at each change; 7 are a thousand of either at its end")

// takeLimit is how long agents may take to see that somebody else serves.
const takeLimit = 10 * time.Second

// turns are the modes in which kube-proxy comes, one after the other. The newer ones come first: tables of iptables go on to
// translate when its chains are gone, so where those have been a missing bridge would not show.
var turns = []struct {
	how  string
	drop bool // a host whose policy is to forward nothing but what its rules name
}{{"nftables", false}, {"iptables-nft", true}, {"iptables-legacy", false}}

// migration is a cluster of two nodes whose Services are kube-proxy's and the programs' by turns.
type migration struct {
	*lab.Lab
	// client and near are on the first node, far and heir are on the second; mortal is there for a while.
	client, near, far, mortal, heir *lab.Pod
	servers                         []*lab.Server
	services                        [wire.Families][]kubeService
	trips                           []trip
	flows                           *survivors
}

// Nobody loses a connection when kube-proxy leaves Services to the programs, node by node, nor when it comes again: neither who talks
// all the time, nor who is silent for long, nor whom the server speaks to first. What is opened meanwhile is served.
func TestMigration(t *testing.T) {
	t.Parallel()
	m := startMigration(t)
	m.flows = newSurvivors(t, time.Duration(*migrateFlows)*100*time.Millisecond)
	for i, turn := range turns {
		for _, node := range m.Nodes {
			m.proxyComes(t, node, turn.how, turn.drop)
			if i == 0 && node == m.Nodes[1] {
				m.flows.openAnew(m.trips, 300*time.Millisecond)
			}
			m.flows.changed(t, m.servers)
		}
		m.assertServer(t, false)
		m.flows.open(t, m.trips, *migrateFlows)
		var left *forsaken
		if i == 0 {
			left = m.forsake(t)
			m.restartBeside(t, m.Nodes[0])
		}
		for _, node := range m.Nodes {
			m.proxyGoes(t, node)
			m.flows.changed(t, m.servers)
		}
		m.assertServer(t, true)
		m.flows.open(t, m.trips, *migrateFlows)
		if left != nil {
			left.assertNoticed(t, m)
		}
		if turn.drop {
			m.forwardAll(t, turn.how)
		}
	}
	m.flows.end(t)
	m.flows.close()
	m.assertNothingDead(t)
}

// startMigration starts agents, pods and servers, and tells agents of Services before kube-proxy does anything.
func startMigration(t *testing.T) *migration {
	t.Helper()
	m := &migration{Lab: startCluster(t, lab.Options{Nodes: 2, Router: true, Families: families, AgentFlags: []string{"--services=auto", serviceCIDRs}},
		drops.BackendGone, drops.NoEndpoint, drops.NoService)}
	one, two := m.Nodes[0], m.Nodes[1]
	m.client, m.near = addPod(t, one, "client"), addPod(t, one, "near")
	m.far, m.mortal, m.heir = addPod(t, two, "far"), addPod(t, two, "mortal"), addPod(t, two, "heir")
	for i, pod := range []*lab.Pod{m.near, m.far, m.near, m.far, m.near, m.mortal, m.heir} {
		server, err := pod.Serve(migratedPort(i))
		if err != nil {
			t.Fatal(err)
		}
		if pod != m.mortal {
			m.servers = append(m.servers, server)
		}
	}
	for family := range m.services {
		at := serviceAddr[family]
		for i, pod := range []*lab.Pod{m.near, m.far, m.near, m.far, m.near, m.mortal} {
			m.services[family] = append(m.services[family], kubeService{
				name: migrated[i], cluster: netip.AddrPortFrom(at, servicePort), endpoint: pod.Endpoint(wire.Family(family), migratedPort(i)).At,
				nodePort: clusterPort + uint16(i), local: migrated[i] == "local",
			})
			at = at.Next()
		}
	}
	m.tell(t)
	processes := [2]caller{callerOf(startProcess(t, one, one.Namespace)), callerOf(startProcess(t, two, two.Namespace))}
	for _, family := range families {
		m.trips = append(m.trips, m.tripsOf(family, processes)...)
	}
	return m
}

// migrated are the names of Services, whose node ports begin at clusterPort. No client asks two of one backend: if one of those is the
// programs' still and the other is netfilter's, from one port by chance, neither sees the other, and an answer goes to the wrong one.
var migrated = []string{"near", "far", "nearports", "farports", "local", "mortal", "heir"}

// migratedPort is where the backend of a Service answers.
func migratedPort(i int) uint16 { return backendPort + uint16(i) }

func (m *migration) service(family wire.Family, name string) kubeService {
	return m.services[family][slices.Index(migrated, name)]
}

// tell gives the agents the Services as they are.
func (m *migration) tell(t *testing.T) {
	t.Helper()
	var specs []lab.ServiceSpec
	for i, name := range migrated[:len(m.services[wire.IPv4])] {
		spec := lab.ServiceSpec{Name: name, Port: servicePort, NodePort: m.services[wire.IPv4][i].nodePort, ExternalLocal: m.services[wire.IPv4][i].local}
		for _, family := range families {
			s := m.services[family][i]
			node := m.Nodes[0]
			if !s.hasEndpoint(node) {
				node = m.Nodes[1]
			}
			spec.ClusterIPs = append(spec.ClusterIPs, s.cluster.Addr())
			spec.Endpoints = append(spec.Endpoints, lab.EndpointSpec{At: s.endpoint, Node: node.Name})
		}
		specs = append(specs, spec)
	}
	if err := m.SetServices(specs...); err != nil {
		t.Fatal(err)
	}
}

// tripsOf are all kinds of ways to Services in a family.
func (m *migration) tripsOf(family wire.Family, processes [2]caller) []trip {
	near, far, local := m.service(family, "near"), m.service(family, "far"), m.service(family, "local")
	nearPort, farPort := m.service(family, "nearports"), m.service(family, "farports")
	client, other, outside := callerIn(m.client.Namespace), callerIn(m.far.Namespace), callerIn(m.Outside)
	one, two := m.Nodes[0], m.Nodes[1]
	at := func(node *lab.Node, s kubeService) netip.AddrPort {
		return netip.AddrPortFrom(node.AddrOf(family), s.nodePort)
	}
	trips := []trip{
		{"a pod to its neighbour", client, near.cluster, one},
		{"a pod to the other node's", client, far.cluster, one},
		{"a pod from the other node", other, near.cluster, two},
		{"a pod to itself", other, far.cluster, two},
		{"a pod by the other node's port", client, at(two, nearPort), two},
		{"a pod by its node's port", client, at(one, farPort), one},
		{"a process to its node's pod", processes[0], near.cluster, one},
		{"a process to the other node's", processes[0], far.cluster, one},
		{"a process by its node's port", processes[1], at(two, nearPort), two},
		{"a process by the other node's port", processes[1], at(one, farPort), one},
		{"outside by the pod's node", outside, at(one, nearPort), one},
		{"outside by the other node", outside, at(two, nearPort), two},
		{"outside, policy Local", outside, at(one, local), one},
	}
	for i := range trips {
		trips[i].name = fmt.Sprintf("%v, %s", family, trips[i].name)
	}
	return trips
}

// proxyComes has kube-proxy write its rules on a node, and waits until the agent leaves new flows to it.
func (m *migration) proxyComes(t *testing.T, node *lab.Node, how string, drop bool) {
	t.Helper()
	for _, family := range families {
		services := m.services[family]
		applyRules(t, node, kubeProxy[how].rules(node, services), kubeProxy[how].program(services[0].names())...)
	}
	if drop {
		m.forwardSome(t, node, how)
	}
	m.waitServed(t, node, false)
}

// forwardSome has a node forward nothing but what pods send and are sent.
func (m *migration) forwardSome(t *testing.T, node *lab.Node, how string) {
	t.Helper()
	for _, family := range families {
		program := netfilters[family].iptables + "-" + strings.TrimPrefix(how, "iptables-")
		for _, direction := range []string{"-s", "-d"} {
			runOn(t, node, program, "-A", "FORWARD", direction, netfilters[family].pods, "-j", "ACCEPT")
		}
		runOn(t, node, program, "-P", "FORWARD", "DROP")
	}
}

// forwardAll ends that on all nodes.
func (m *migration) forwardAll(t *testing.T, how string) {
	t.Helper()
	for _, node := range m.Nodes {
		for _, family := range families {
			program := netfilters[family].iptables + "-" + strings.TrimPrefix(how, "iptables-")
			runOn(t, node, program, "-P", "FORWARD", "ACCEPT")
			runOn(t, node, program, "-F", "FORWARD")
		}
	}
}

// proxyGoes removes what kube-proxy, which has ended, has left on a node, while its Services are asked.
func (m *migration) proxyGoes(t *testing.T, node *lab.Node) {
	t.Helper()
	path, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	out, err := node.Exec(t.Context(), path, "cleanup", "--kube-proxy", "--bpffs="+node.BPFFS(), "--state-dir="+node.StateDir())
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "removed ") {
		t.Errorf("%s: nothing was removed:\n%s", node.Name, out)
	}
	m.waitServed(t, node, true)
}

// waitServed waits until new flows are the programs', or kube-proxy's, in both families.
func (m *migration) waitServed(t *testing.T, node *lab.Node, ours bool) {
	t.Helper()
	what := map[bool]string{true: "the programs serve on ", false: "kube-proxy serves on "}[ours] + node.Name
	eventually(t, takeLimit, what, func() bool {
		now := content[config.Key, config.Value](t, node, config.Name)[config.Key{}]
		yields := now.Flags & (config.YieldsIPv4 | config.YieldsIPv6)
		return now.Flags&config.Services != 0 && (yields == 0) == ours && (ours || yields == config.YieldsIPv4|config.YieldsIPv6)
	})
}

// assertServer opens a connection on each trip, and asks netfilter whether it translates it.
func (m *migration) assertServer(t *testing.T, ours bool) {
	t.Helper()
	for _, w := range m.trips {
		known, conn := w.isNetfilters(t)
		opened := []net.Conn{conn}
		// The programs' socket may have the port of an older one that asks the Service. Those stand side by side, as the kernel draws
		// ports, but are fewer.
		for known && ours && len(opened) < 100 {
			known, conn = w.isNetfilters(t)
			opened = append(opened, conn)
		}
		for _, conn := range opened { // now: each had another port
			_ = conn.Close()
		}
		if known == ours {
			t.Errorf("%s: netfilter translates it: %v, want %v", w.name, known, !ours)
		}
	}
}

// isNetfilters opens a connection, and says whether netfilter translates it.
func (w trip) isNetfilters(t *testing.T) (bool, net.Conn) {
	t.Helper()
	conn, err := w.from.tcp(t.Context(), w.to)
	if err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	out, err := w.by.Exec(t.Context(), "conntrack", "-L", "-p", "tcp", "--state", "ESTABLISHED", "-f", wire.FamilyOf(w.to.Addr()).String(), "--dst-nat",
		"--orig-src", local.Addr().String(), "--sport", fmt.Sprint(local.Port()), "--orig-dst", w.to.Addr().String(), "--dport", fmt.Sprint(w.to.Port()))
	if err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
	return len(out) > 0, conn
}

// restartBeside replaces an agent while kube-proxy serves.
func (m *migration) restartBeside(t *testing.T, node *lab.Node) {
	t.Helper()
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	startAgain(t, node)
	m.waitServed(t, node, false)
}
