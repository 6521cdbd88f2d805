package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/flow"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// Services are served without an agent; one that starts again finds all in place, follows what it has missed, and disturbs nobody.
func TestServicesOutliveTheAgent(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		s := startServed(t, lab.Options{AgentFlags: []string{attach}}, drops.NoBackend)
		node, family := s.Nodes[0], firstFamily(s.Lab)
		s.set(t, s.spec("near", s.near), s.spec("far", s.far), s.spec("other", s.near, s.far))
		flows := startSteadyFlows(t, s.client.Namespace, s.at("near", family), s.at("far", family), s.at("other", family))
		streams := connect(t, s.client.Namespace, s.at("other", family), 1, 3)
		before := serviceTables(t, node)

		starts := 1
		if priv.Long() {
			starts = 3
		}
		for range starts {
			if err := node.KillAgent(); err != nil {
				t.Fatal(err)
			}
			streams.assertAlive(t, "without an agent")
			if err := errors.Join(node.StartAgent(), node.WaitReady(within(t, readyLimit))); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, serviceTables(t, node)); diff != "" {
				t.Errorf("an agent that finds nothing changed has changed the maps:\n%s", diff)
			}
		}
		flows.end(t)

		if err := node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		moved := s.spec("moved", s.far)
		gone := s.named("other")
		gone.Endpoints = nil
		s.stage(t, moved, gone)()
		if err := errors.Join(node.StartAgent(), node.WaitReady(within(t, readyLimit))); err != nil {
			t.Fatal(err)
		}
		s.wait(t)
		if by := s.servedBy(t, s.at("moved", family)); by.Addr() != s.far.AddrOf(family) {
			t.Errorf("a Service that came meanwhile is served by %s", by)
		}
		s.assertRefused(t, s.at("other", family))
		streams.assertAlive(t, "with a backend that is in no slice")
		streams.close()
		s.set(t, s.spec("last", s.near)) // by an agent that knows all by now
	})
}

// serviceTables are the Services of a node as an operator sees them.
func serviceTables(t *testing.T, node *lab.Node) (lines []string) {
	t.Helper()
	for _, table := range []string{"services", "backends"} {
		for _, row := range dump(t, node, table) {
			lines = append(lines, fmt.Sprintf("%s %v", table, row))
		}
	}
	slices.Sort(lines)
	if len(lines) == 0 {
		t.Error("the dumps of Services are empty")
	}
	return lines
}

// A node whose Services kube-proxy serves: the dataplane serves pods, with the flows that are there already, though its rules
// stay; and kube-proxy does again once told so.
func TestServicesTakenOverFromKubeProxy(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, flag string) {
		p := startProxied(t, lab.Options{AgentFlags: []string{flag}})
		proxy(t, p.Lab, "iptables-nft", p.services)
		p.waitBeside(t, true)
		names := []string{"near", "far", "outside", "host", "kubernetes"}
		var specs []lab.ServiceSpec
		var fronts []netip.AddrPort
		for _, name := range names {
			service := p.service(name)
			fronts = append(fronts, service.cluster)
			specs = append(specs, lab.ServiceSpec{
				Name: name, ClusterIPs: []netip.Addr{service.cluster.Addr()}, Port: service.cluster.Port(),
				Endpoints: []lab.EndpointSpec{{At: service.endpoint, Node: p.nodeOf(service.endpoint.Addr())}},
			})
		}
		if err := p.SetServices(specs...); err != nil {
			t.Fatal(err)
		}
		streams, datagrams := p.open(t, fronts), startSteadyFlows(t, p.client.Namespace, fronts...)
		alive := func(when string) {
			t.Helper()
			for i, stream := range streams {
				if err := stream.Echo(within(t, answerLimit), 100_000); err != nil {
					t.Errorf("%s: %s: %v", when, names[i%len(names)], err)
				}
			}
		}
		alive("by kube-proxy")
		p.restart(t, "--services=on")
		eventually(t, changeLimit, "the Services are there", func() bool { return hasFrontends(t, p.Nodes[0], specs) })
		alive("taken over")
		if out, err := p.Nodes[0].Ebpfctl(t.Context(), "status"); err != nil || !strings.Contains(string(out), "served by the programs; connections that netfilter translates already") {
			t.Errorf("error %v, the status says nothing of both:\n%s", err, out)
		}
		if flows := serviceFlows(t, p.Nodes[0]); flows < len(fronts) {
			t.Errorf("%d flows to Services are the dataplane's, want %d", flows, len(fronts))
		}
		streams = append(streams, p.open(t, fronts)...)
		alive("by the dataplane")
		datagrams.end(t)
		p.restart(t) // which ends flows to Services
		for _, at := range fronts {
			reaches(t, p.client.Namespace, at)
		}
	})
}

// nodeOf is the name of the node that has an address, or the pod that has it.
func (p *proxied) nodeOf(addr netip.Addr) string {
	for _, node := range p.Nodes {
		if node.Addr() == addr || node.PodCIDR().Contains(addr) {
			return node.Name
		}
	}
	return ""
}

// content is what a map of a node's programs has.
func content[K comparable, V any](t *testing.T, node *lab.Node, name string) map[K]V {
	t.Helper()
	m, err := typed.Open[K, V](bpffs.Dir(node.BPFFS()).Map(name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	all, err := m.Content()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// serviceFlows is how many flows to Services a node has.
func serviceFlows(t *testing.T, node *lab.Node) (flows int) {
	t.Helper()
	for _, value := range content[snat.Key, snat.Value](t, node, snat.Name) {
		if value.Flags&flow.Service != 0 {
			flows++
		}
	}
	return flows
}

// Switched off, Services are nobody's, and what was never one goes on.
func TestServicesSwitchedOff(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		s := startServed(t, lab.Options{AgentFlags: []string{attach, serviceCIDRs}})
		family := firstFamily(s.Lab)
		s.set(t, s.spec("far", s.far))
		reaches(t, s.client.Namespace, s.at("far", family))
		direct := connect(t, s.client.Namespace, s.far.Endpoint(family, backendPort).At, 1, 1)
		for _, of := range []string{"services", "backends", "destinations", "to_pod", "cgroup"} {
			if there := ofServices(t, s.client); !slices.ContainsFunc(there, func(line string) bool { return strings.HasPrefix(line, of+" ") }) {
				t.Errorf("with Services on there is %q", there)
			}
		}
		s.Options.AgentFlags = slices.DeleteFunc(s.Options.AgentFlags, func(flag string) bool { return flag == "--services=on" })
		restartEach(t, s.Lab)
		if left := ofServices(t, s.client); len(left) > 0 {
			t.Errorf("with Services off there is %q", left)
		}
		direct.assertAlive(t, "with Services off")
		direct.close()
		if _, err := s.client.TCP(within(t, refusedAtOnce), s.at("far", family)); err == nil {
			t.Error("Services are off, and one is served")
		}
		if _, err := s.client.TCP(t.Context(), s.far.Endpoint(family, backendPort).At); err != nil {
			t.Error(err)
		}
		later := addPod(t, s.Nodes[0], "later")
		if _, err := later.TCP(t.Context(), s.far.Endpoint(family, backendPort).At); err != nil {
			t.Error(err)
		}
		restartEach(t, s.Lab, "--services=on")
		s.wait(t)
		for _, pod := range []*lab.Pod{s.client, later} {
			reaches(t, pod.Namespace, s.at("far", family))
		}
	})
}

// ofServices is all that a pod's node has for Services alone: what is in maps, and what is attached to the pod's link and to the
// node's cgroup.
func ofServices(t *testing.T, pod *lab.Pod) (all []string) {
	t.Helper()
	node := pod.Node
	for _, table := range []string{"services", "backends", "destinations"} {
		for _, row := range dump(t, node, table) {
			if table != "destinations" || row["kind"] == "service" {
				all = append(all, fmt.Sprintf("%s %v", table, row))
			}
		}
	}
	link, err := node.Netlink().LinkByName(pod.Result.Interfaces[0].Name)
	if err != nil {
		t.Fatal(err)
	}
	var there attach.State
	attacher := attach.Attacher{Dir: bpffs.Dir(node.BPFFS())}
	if err := node.Do(func() (err error) { there, err = attacher.Attached(link.Attrs().Index, attach.ToPod); return err }); err != nil {
		t.Fatal(err)
	}
	if there.Mode != "" {
		all = append(all, fmt.Sprintf("to_pod %+v", there))
	}
	for _, pin := range socketPins(t, node) {
		all = append(all, "cgroup "+pin)
	}
	return all
}

// A pod that has used up its share of the flow table opens no more flows; those that it has go on, as do other pods'.
func TestServiceFlowsHaveShares(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		const entries, wanted = 256, 400
		s := startServed(t, lab.Options{AgentFlags: []string{attach, fmt.Sprintf("--snat-entries=%d", entries)}}, drops.SnatLimit, drops.SnatFull)
		s.set(t, s.spec("near", s.near))
		to := s.at("near", firstFamily(s.Lab))
		stream, err := s.client.DialTCP(t.Context(), to, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		for range wanted {
			conn, err := s.client.DialUDP(to, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write(make([]byte, 64)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond)
		limited := dropped(t, s.Nodes[0], drops.SnatLimit) + dropped(t, s.Nodes[0], drops.SnatFull)
		if flows := serviceFlows(t, s.Nodes[0]); flows == 0 || flows >= entries || limited == 0 {
			t.Errorf("%d flows in a table of %d, %d packets refused", flows, entries, limited)
		}
		if err := stream.Echo(t.Context(), 1000); err != nil {
			t.Error(err)
		}
		reaches(t, addPod(t, s.Nodes[0], "another").Namespace, to)
	})
}
