package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const (
	// standstill is how long a trial that can't work is looked at, at least. TCP repeats a packet twice meanwhile.
	standstill = time.Second
	// trialLimit is how long a trial may take: TCP repeats once more when the program is back, however late that is.
	trialLimit = time.Minute
)

// Each program removed alone, with no agent to repair it, beside kube-proxy and its rule against what netfilter calls
// INVALID: who is then cut off, and that nobody loses a connection for good.
func TestServicesWithAProgramRemoved(t *testing.T) {
	s := newStage(t, running(t))
	ways := waysToServices(t, s)
	for _, w := range ways { // the rules are there, and neighbours are known
		if w.to == (target{}) {
			continue
		}
		if err := answers(t, w.name, w.from, w.to); err != nil {
			t.Fatal(err)
		}
	}
	withoutAgents(t, s)
	one, two := s.Nodes[0], s.Nodes[1]
	for _, c := range []struct {
		name string
		node *cluster.Machine
		hook cluster.Hook
		pod  *cluster.Pod
		cut  []string
	}{
		{"from_pod of the client", one, cluster.FromPod, s.client, nil},
		// Netfilter drops the answer to what it did not see.
		{"from_pod of the backend beside it", one, cluster.FromPod, s.near, []string{"new: pod to pod, same node"}},
		{"from_pod of the backend on the other node", two, cluster.FromPod, s.far, []string{
			"new: pod to its Service, other node", "new: pod to pod, other node",
		}},
		{"from_uplink of the client's node", one, cluster.FromUplink, nil, []string{
			"new: pod to a Service outside", "new: pod to pod, other node", "new: pod to the world",
			"old: pod to a Service outside", "old: pod to the world",
		}},
		{"from_uplink of the other node", two, cluster.FromUplink, nil, nil},
		// Nobody masquerades then what the stack sends out for a pod.
		{"to_uplink of the client's node", one, cluster.ToUplink, nil, []string{
			"new: pod to a Service outside", "new: pod to the world", "old: pod to a Service outside", "old: pod to the world",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := prepare(t, ways)
			putBack, err := c.node.Detach(within(t, stepLimit), c.hook, interfaceOf(t, s, c.node, c.pod))
			if err != nil {
				t.Fatal(err)
			}
			pending := all.start(t, c.cut)
			if !slices.Equal(pending.names(), c.cut) {
				t.Errorf("what stands still:\n%q, want\n%q", pending.names(), c.cut)
			}
			sendDatagrams(t, ways, c.cut)
			if err := putBack(); err != nil {
				t.Fatal(err)
			}
			pending.finish(t)
		})
	}
}

// withoutAgents keeps agents from the nodes until the test ends.
func withoutAgents(t *testing.T, s *stage) {
	t.Helper()
	selector := func(ctx context.Context, value string) error {
		patch := fmt.Sprintf(`{"spec": {"template": {"spec": {"nodeSelector": {"ebpf-cni.test/nowhere": %s}}}}}`, value)
		_, err := s.Kubectl(ctx, "-n", cluster.Namespace, "patch", "daemonset", cluster.DaemonSet, "-p", patch)
		return err
	}
	t.Cleanup(func() {
		err := selector(context.Background(), "null")
		if err = errors.Join(err, s.WaitReady(context.Background())); err != nil {
			t.Error(err)
		}
	})
	if err := selector(t.Context(), `"yes"`); err != nil {
		t.Fatal(err)
	}
	api, err := s.Client()
	if err != nil {
		t.Fatal(err)
	}
	err = cluster.Poll(within(t, stepLimit), "no agent runs", func(ctx context.Context) error {
		pods, err := api.CoreV1().Pods(cluster.Namespace).List(ctx, metav1.ListOptions{LabelSelector: cluster.AgentLabel})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods are there", len(pods.Items))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// interfaceOf is the index of a pod's interface on its node; of the node's uplink without a pod.
func interfaceOf(t *testing.T, s *stage, node *cluster.Machine, pod *cluster.Pod) int {
	t.Helper()
	if pod == nil {
		raw, err := node.Run(t.Context(), "cat", "/sys/class/net/eth0/ifindex")
		index, err2 := strconv.Atoi(strings.TrimSpace(raw))
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		return index
	}
	raw, err := ebpfctl(t.Context(), s.Cluster, node, "dump", "endpoints", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var endpoints []struct {
		Address netip.Addr
		Ifindex int
	}
	if err := json.Unmarshal([]byte(raw), &endpoints); err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	for _, e := range endpoints {
		if e.Address == pod.Addr {
			return e.Ifindex
		}
	}
	t.Fatalf("%s has no endpoint %s:\n%s", node.Name, pod.Addr, raw)
	return 0
}

// way is one to a Service or past it; with a target there are connections and datagrams, and without one only what ask does.
type way struct {
	name string
	from dialer
	to   target
	seen netip.Addr
	ask  func(context.Context) error
}

// waysToServices are those that the classical network has, with the addresses that it shows.
func waysToServices(t *testing.T, s *stage) (ways []way) {
	t.Helper()
	near := addService(t, s.standing, "removed-near", behind(s.near.Name))
	local := addService(t, s.standing, "removed-local", func(spec *core.ServiceSpec) {
		behind(s.near.Name)(spec)
		spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
	})
	far := addService(t, s.standing, "removed-far", behind(s.far.Name)).byAddr(t)
	itself := addService(t, s.standing, "removed-itself", behind(s.client.Name)).byAddr(t)
	foreign := addForeign(t, s, "removed-foreign", s.World()).byAddr(t)
	one, two := s.Nodes[0], s.Nodes[1]
	pod, world := s.client.Addr, target{at(s.World(), cluster.HTTPPort), at(s.World(), cluster.UDPPort)}
	for _, v := range []visit{
		{"pod to its Service, same node", s.client, near.byAddr(t), pod},
		{"pod to its Service, other node", s.client, far, pod},
		{"pod to itself by its Service", s.client, itself, one.Addr},
		{"pod to a Service outside", s.client, foreign, one.Addr},
		{"node to its pod's Service", one, near.byAddr(t), one.Addr},
		{"node to a Service, other node", one, far, one.Addr},
		{"the world to the backend's node", s.Fabric, near.byPorts(one), one.Addr},
		{"the world to the other node", s.Fabric, near.byPorts(two), two.Addr},
		{"the world, policy Local", s.Fabric, local.byPorts(one), s.Fabric.Addr},
		{"pod to its node's port", s.client, near.byPorts(one), one.Addr},
		{"pod to the other node's port", s.client, near.byPorts(two), two.Addr},
		{"pod to its node's port, policy Local", s.client, local.byPorts(one), pod},
		{"pod to another node's port, policy Local", s.far, local.byPorts(one), s.far.Addr},
		{"pod to pod, same node", s.client, podPorts(s.near.Addr), pod},
		{"pod to pod, other node", s.client, podPorts(s.far.Addr), pod},
		{"pod to the world", s.client, world, one.Addr},
		{"node to its pod", one, podPorts(s.near.Addr), one.Addr},
		{"node to another node's pod", one, podPorts(s.far.Addr), one.Addr},
	} {
		ways = append(ways, way{v.what, v.from, v.to, v.seen, func(ctx context.Context) error { return isSeen(ctx, v) }})
	}
	for name, from := range map[string]dialer{"pod to the API server of its node": s.client, "pod to the API server of another node": s.far} {
		ways = append(ways, way{name: name, from: from, ask: func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, trialLimit)
			defer cancel()
			return askAPI(ctx, s.standing, from)
		}})
	}
	return ways
}

// isSeen is nil when a new connection is answered by one who sees the client as he is to. Its port is fresh: netfilter would know
// one that has gone to the same backend by a Service, and the stack would carry both directions.
func isSeen(ctx context.Context, v visit) error {
	got, err := askFor(ctx, trialLimit, fresh{v.from}, v.to.tcp, "/clientip")
	if err != nil {
		return err
	}
	return seenAs(got, v.seen)
}

// seenAs checks what a server said of the client's address.
func seenAs(got string, want netip.Addr) error {
	if client, err := netip.ParseAddrPort(strings.TrimSpace(got)); err != nil || client.Addr() != want {
		return fmt.Errorf("the client is seen as %q, want %s", got, want)
	}
	return nil
}

// trial is an exchange over a way, which may take until a program is back.
type trial struct {
	name string
	do   func(context.Context) error
	end  chan error
}

type trials []trial

// prepare has every way used twice: by a flow that is there now, and by a new one.
func prepare(t *testing.T, ways []way) (all trials) {
	t.Helper()
	add := func(name string, do func(context.Context) error) {
		all = append(all, trial{name, do, make(chan error, 1)})
	}
	for _, w := range ways {
		add("new: "+w.name, w.ask)
		if w.to == (target{}) {
			continue
		}
		conn, err := w.from.Dial(within(t, answerLimit), "tcp", w.to.tcp)
		if err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
		t.Cleanup(func() { conn.Close() })
		add("old: "+w.name, oldConnection(t, w.name, conn))
	}
	slices.SortFunc(all, func(a, b trial) int { return strings.Compare(a.name, b.name) })
	return all
}

// sendDatagrams has a datagram answered on every way that is not cut.
func sendDatagrams(t *testing.T, ways []way, cut []string) {
	t.Helper()
	concurrently(ways, func(w way) {
		if w.to == (target{}) || slices.Contains(cut, "new: "+w.name) {
			return
		}
		got, err := askUDP(within(t, answerLimit), w.from, w.to.udp, "clientip")
		isClient(t, w.name+" over UDP", got, err, w.seen)
	})
}

// oldConnection has talked before.
func oldConnection(t *testing.T, name string, conn net.Conn) func(context.Context) error {
	t.Helper()
	reader := bufio.NewReader(conn)
	if err := request(conn, reader, "before"); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return func(context.Context) error {
		body, err := getBy(time.Now().Add(trialLimit), conn, reader, "/echo?msg=after")
		if err == nil && body != "after" {
			err = fmt.Errorf("the answer is %q", body)
		}
		return err
	}
}

// start starts all, waits for those that are not to be cut off, however slow the computer is, and returns the ones that go on.
func (all trials) start(t *testing.T, cut []string) (pending trials) {
	t.Helper()
	looked := time.After(standstill)
	var unhindered sync.WaitGroup
	for _, e := range all {
		run := func() { e.end <- e.do(t.Context()) }
		if slices.Contains(cut, e.name) {
			go run()
		} else {
			unhindered.Go(run)
		}
	}
	over := make(chan struct{})
	go func() { unhindered.Wait(); close(over) }()
	select {
	case <-over:
	case <-time.After(2 * answerLimit):
	}
	if len(cut) > 0 {
		<-looked
	}
	for _, e := range all {
		select {
		case err := <-e.end:
			if err != nil {
				t.Errorf("%s: %v", e.name, err)
			}
		default:
			pending = append(pending, e)
		}
	}
	return pending
}

func (all trials) names() (names []string) {
	for _, e := range all {
		names = append(names, e.name)
	}
	return names
}

// finish waits for what stood still.
func (all trials) finish(t *testing.T) {
	t.Helper()
	for _, e := range all {
		if err := <-e.end; err != nil {
			t.Errorf("%s, with the program back: %v", e.name, err)
		}
	}
}
