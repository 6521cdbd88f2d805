package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// The ports of the node behind which a pod answers.
const hostPort, hostPortUDP, hostPortOfTwo, hostPortAndNodePort = 18080, 18081, 18082, 31980

// The plugin opens the host ports that pods ask for, and closes them. Nobody who asks by them is masqueraded: a pod that asks itself sees
// the address that it has asked.
func testHostPorts(t *testing.T, s *stage) {
	node := s.Nodes[0]
	departs(t, s.standing, "hosted")
	pod, err := s.AddPodWith(t.Context(), "hosted", node, nil, func(spec *core.PodSpec) {
		spec.Containers[0].Ports = []core.ContainerPort{
			{ContainerPort: cluster.HTTPPort, HostPort: hostPort},
			{ContainerPort: cluster.UDPPort, HostPort: hostPortUDP, Protocol: core.ProtocolUDP},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	to, local := target{at(node.Addr, hostPort), at(node.Addr, hostPortUDP)}, loopbacks[s.Family()]
	visits := []visit{
		{"the pod itself by its host port", pod, to, node.Addr},
		{"its node by the loopback address", node, target{at(local, hostPort), at(local, hostPortUDP)}, node.Addr},
	}
	for _, from := range append(clients(s.standing), outside(s.standing)) {
		visits = append(visits, visit{from.name + " by the host port", from, to, from.addr})
	}
	makeVisits(t, visits)
	if err := s.DeletePods(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	for i := range visits {
		visits[i].what += " of a pod that is gone"
	}
	mustBeVain(t, visits[1:])
}

// Two pods ask for one port, of which Kubernetes notices nothing: all addresses of a family are for it another one than any of them. The
// second waits, its event names the first, and it starts once that is gone.
func testHostPortOfTwo(t *testing.T, s *stage) {
	const first, second = "has-the-port", "wants-the-port"
	node := seenIn(t, s.standing, core.IPv6Protocol).Nodes[1]
	departs(t, s.standing, first, second)
	add := func(name string, host netip.Addr) (*cluster.Pod, error) {
		return s.AddPodWith(t.Context(), name, node, nil, func(spec *core.PodSpec) {
			spec.Containers[0].Ports = []core.ContainerPort{{ContainerPort: cluster.HTTPPort, HostPort: hostPortOfTwo, HostIP: host.String()}}
		})
	}
	has, err := add(first, netip.IPv6Unspecified())
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() {
		_, err := add(second, node.Addr)
		started <- err
	}()
	awaitEvent(t, s, second, "default/"+first)
	if err := s.DeletePods(t.Context(), has); err != nil {
		t.Error(err)
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
	if got, err := ask(t.Context(), s.Fabric, at(node.Addr, hostPortOfTwo), "/hostname"); err != nil || got != second {
		t.Errorf("the port is answered by %q, want %s; %v", got, second, err)
	}
}

// awaitEvent waits for one about an object that says so.
func awaitEvent(t *testing.T, s *stage, about, says string) {
	t.Helper()
	err := cluster.Poll(within(t, stepLimit), "an event of "+about+" says "+says, func(ctx context.Context) error {
		events, err := s.Kubectl(ctx, "get", "events", "--field-selector=involvedObject.name="+about, "-o", "jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(events, says) {
			err = fmt.Errorf("there are %q", events)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// A Service gets a port that a pod has: on the pod's node it does not answer, as an event of it says, elsewhere it does.
func testHostPortBeforeNodePort(t *testing.T, s *stage) {
	const name = "before-the-service"
	departs(t, s.standing, name)
	pod, err := s.AddPodWith(t.Context(), name, s.Nodes[0], nil, func(spec *core.PodSpec) {
		spec.Containers[0].Ports = []core.ContainerPort{{ContainerPort: cluster.HTTPPort, HostPort: hostPortAndNodePort}}
	})
	if err != nil {
		t.Fatal(err)
	}
	made := addService(t, s.standing, "after-the-pod", func(spec *core.ServiceSpec) {
		behind(s.far.Name)(spec)
		spec.Ports[0].NodePort = hostPortAndNodePort
	})
	awaitEvent(t, s, made.Name, "the host port of a pod")
	for node, want := range map[*cluster.Machine]string{s.Nodes[0]: pod.Name, s.Nodes[1]: s.far.Name} {
		if got, err := ask(t.Context(), s.Fabric, at(node.Addr, hostPortAndNodePort), "/hostname"); err != nil || got != want {
			t.Errorf("%s answers by %q, want %s; %v", node.Name, got, want, err)
		}
	}
}
