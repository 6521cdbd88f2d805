package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// service is a Service of the cluster.
type service struct{ *core.Service }

// addService makes a Service of the type NodePort in front of the pods that are labelled app=NAME, with what change says.
func addService(t *testing.T, s *standing, name string, change func(*core.ServiceSpec)) service {
	t.Helper()
	wanted := s.wantedService(name)
	if change != nil {
		change(&wanted.Spec)
	}
	return createService(t, s, wanted)
}

// wantedService has an address of the cluster's first family.
func (s *standing) wantedService(name string) *core.Service {
	return &core.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeNodePort, Selector: map[string]string{"app": name}, IPFamilies: []core.IPFamily{s.Family()},
			Ports: []core.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(cluster.HTTPPort)},
				{Name: "udp", Port: 81, TargetPort: intstr.FromInt32(cluster.UDPPort), Protocol: core.ProtocolUDP},
			},
		},
	}
}

func createService(t *testing.T, s *standing, wanted *core.Service) service {
	t.Helper()
	client, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	services := client.CoreV1().Services(wanted.Namespace)
	made, err := services.Create(t.Context(), wanted, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := services.Delete(context.Background(), made.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return service{made}
}

// behind has a Service choose the pods of that name.
func behind(name string) func(*core.ServiceSpec) {
	return func(spec *core.ServiceSpec) { spec.Selector = map[string]string{"app": name} }
}

// target is where a client finds a Service.
type target struct{ tcp, udp string }

// servicePorts are those that addService gives a Service at any address of its own.
func servicePorts(addr netip.Addr) target { return target{at(addr, 80), at(addr, 81)} }

// podPorts are those at which a pod answers.
func podPorts(addr netip.Addr) target {
	return target{at(addr, cluster.HTTPPort), at(addr, cluster.UDPPort)}
}

// byAddr is the address that a Service of one family has.
func (v service) byAddr(t *testing.T) target {
	t.Helper()
	addr, err := netip.ParseAddr(v.Spec.ClusterIP)
	if err != nil {
		t.Fatal(err)
	}
	return servicePorts(addr)
}

func (v service) byPorts(node *cluster.Machine) target {
	return target{at(node.Addr, uint16(v.Spec.Ports[0].NodePort)), at(node.Addr, uint16(v.Spec.Ports[1].NodePort))}
}

// client is somebody who asks: the address that a Service sees when nothing is masqueraded, and the node where it is.
type client struct {
	name string
	dialer
	addr netip.Addr
	node *cluster.Machine
}

// clients are pods and the nodes' own processes.
func clients(s *standing) []client {
	one, two := s.Nodes[0], s.Nodes[1]
	return []client{
		{"a pod of node-1", s.client, s.client.Addr, one}, {"a pod of node-2", s.far, s.far.Addr, two},
		{"node-1", one, one.Addr, one}, {"node-2", two, two.Addr, two},
	}
}

// hasProxy says whether it is kube-proxy that serves; else it is the programs.
func (s *standing) hasProxy() bool { return s.Options.KubeProxy != cluster.NoProxy }

// outside is a client that is no part of the cluster.
func outside(s *standing) client { return client{"the world", s.Fabric, s.Fabric.Addr, nil} }

// seenBy is the address that a pod sees of a client whose packets are masqueraded only when it asks itself.
func (s *standing) seenBy(from client, backend *cluster.Pod) netip.Addr {
	if from.dialer == dialer(backend) {
		return s.masqueraded(backend.Node, backend)
	}
	return from.addr
}

// seen is seenBy where it is the client's own node that translates: kube-proxy masquerades the node's own packets there. A pod that asks
// itself has from the programs the address that it has asked.
func (s *standing) seen(from client, backend *cluster.Pod, to target) netip.Addr {
	switch {
	case from.dialer == dialer(from.node) && s.hasProxy():
		return s.masqueraded(from.node, backend)
	case from.dialer == dialer(backend) && !s.hasProxy():
		return netip.MustParseAddrPort(to.tcp).Addr()
	}
	return s.seenBy(from, backend)
}

// seenOutside is seen by an address from outside of the cluster, for which kube-proxy masquerades everybody, and the programs nobody.
func (s *standing) seenOutside(from client, backend *cluster.Pod, to target) netip.Addr {
	if s.hasProxy() {
		return s.masqueraded(from.node, backend)
	}
	return s.seen(from, backend, to)
}

// seenBehind is the address that a backend sees of a client who has asked a node: by its ports, or as the world by any other address. kube-proxy
// masquerades all but what goes to the node's own processes, the programs what they send to other nodes.
func (s *standing) seenBehind(node *cluster.Machine, from client, backend *cluster.Pod, to target) netip.Addr {
	switch {
	case from.node == node && !s.hasProxy():
		return s.seen(from, backend, to)
	case backend.Node == node && (backend.HostNetwork || !s.hasProxy()):
		return from.addr
	}
	return s.masqueraded(node, backend)
}

// visit is a way to a Service, and as whom the one who answers has to see the client.
type visit struct {
	what string
	from dialer
	to   target
	seen netip.Addr
}

// makeVisits makes all of them, some at a time.
func makeVisits(t *testing.T, all []visit) {
	t.Helper()
	concurrently(all, func(v visit) { reaches(t, v.what, v.from, v.to, v.seen) })
}

// mustBeVain is for those who are to get no answer.
func mustBeVain(t *testing.T, all []visit) {
	t.Helper()
	concurrently(all, func(v visit) { mustNotReach(t, v.what, v.from, v.to) })
}

// concurrently calls f for each of all, and waits. The computer is a small one: more at once would only wait for each other.
func concurrently[T any](all []T, f func(T)) {
	var group sync.WaitGroup
	defer group.Wait()
	places := make(chan struct{}, 8)
	for _, one := range all {
		places <- struct{}{}
		group.Go(func() {
			defer func() { <-places }()
			f(one)
		})
	}
}

// reaches waits until a Service answers, since whoever serves it takes a moment, then asks it over TCP and UDP several times. It
// has to see the client as want.
func reaches(t *testing.T, what string, from dialer, to target, want netip.Addr) {
	t.Helper()
	if err := answers(t, what, from, to); err != nil {
		t.Error(err)
		return
	}
	for i := range 4 {
		seesTCP(t, what, from, to.tcp, want)
		seesUDP(t, what, from, to.udp, want)
		message := fmt.Sprint("m", i)
		if got, err := ask(t.Context(), from, to.tcp, "/echo?msg="+message); err != nil || got != message {
			t.Errorf("%s over TCP: %q, error %v", what, got, err)
		}
	}
}

// fresh is a client whose every connection has a port of its own. One who may come before kube-proxy has written a Service's rules
// has to be: netfilter notes that such a flow is not to be translated, for minutes, and another connection from its port would hang.
type fresh struct{ dialer }

func (f fresh) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return f.DialFrom(ctx, newPort(), network, address)
}

var portsTaken atomic.Int32

// newPort is one that nobody has had, and that the kernel gives to nobody.
func newPort() uint16 { return uint16(20000 + portsTaken.Add(1)) }

// answers waits until somebody does.
func answers(t *testing.T, what string, from dialer, to target) error {
	t.Helper()
	return cluster.Poll(within(t, stepLimit), what+": an answer", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := ask(ctx, fresh{from}, to.tcp, "/hostname")
		return err
	})
}

// silent is how long a client waits who is to get no answer: TCP asks a second time meanwhile, and a busy computer is no reason.
const silent = 2 * time.Second

// mustNotReach fails when somebody answers, or when it could not be tried.
func mustNotReach(t *testing.T, what string, from dialer, to target) {
	t.Helper()
	var both sync.WaitGroup
	both.Go(func() {
		got, err := askFor(t.Context(), silent, from, to.tcp, "/hostname")
		isVain(t, what+" over TCP", got, err)
	})
	both.Go(func() {
		got, err := askUDP(within(t, silent), from, to.udp, "hostname")
		isVain(t, what+" over UDP", got, err)
	})
	both.Wait()
}

// isVain checks that a question got no answer, by silence or by refusal.
func isVain(t *testing.T, what, got string, err error) {
	t.Helper()
	switch {
	case err == nil:
		t.Errorf("%s: %q answers", what, got)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ECONNREFUSED):
	default:
		t.Errorf("%s: want silence or a refusal: %v", what, err)
	}
}

// stage is the cluster with pods in the nodes' networks, for tests of Services.
type stage struct {
	*standing
	hosts []*cluster.Pod
}

// newStage adds those pods, each the only one with its name as label.
func newStage(t *testing.T, on *standing) *stage {
	t.Helper()
	s := &stage{standing: on}
	t.Cleanup(func() {
		if err := s.DeletePods(context.Background(), s.hosts...); err != nil {
			t.Error(err)
		}
	})
	var mu sync.Mutex
	concurrently(s.Nodes, func(node *cluster.Machine) {
		name := "host-of-" + node.Name
		pod, err := s.AddHostPod(t.Context(), name, node, map[string]string{"app": name})
		if err != nil {
			t.Error(err)
			return
		}
		mu.Lock()
		s.hosts = append(s.hosts, pod)
		mu.Unlock()
	})
	if t.Failed() {
		t.FailNow()
	}
	return s
}

// in is the stage as a family sees it.
func (s *stage) in(t *testing.T, family core.IPFamily) *stage {
	t.Helper()
	seen := &stage{standing: seenIn(t, s.standing, family)}
	for _, pod := range s.hosts {
		same, err := seen.ReadyPod(t.Context(), pod.Name)
		if err != nil {
			t.Fatal(err)
		}
		seen.hosts = append(seen.hosts, same)
	}
	return seen
}

// backends are pods of all kinds on both nodes.
func (s *stage) backends() []*cluster.Pod {
	return slices.Concat([]*cluster.Pod{s.near, s.far}, s.hosts)
}
