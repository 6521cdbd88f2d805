package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const (
	// settled is how long the agent is left alone before its memory is read, as in tools/bench.
	settled = time.Second
	// limit is how long an agent may take to know all Nodes.
	limit = time.Minute
	// creators are how many Nodes are created at once.
	creators = 20
	// renewal is how often a kubelet renews its Node's status when nothing changes.
	renewal = 5 * time.Minute
)

// agents measures the agents of the cluster at some numbers of Node objects.
func agents(ctx context.Context, o Options, c *cluster.Cluster, p *printer) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	if err := fewControllers(ctx, c); err != nil {
		return err
	}
	images, err := nodeImages()
	if err != nil {
		return err
	}
	s := &sweep{Options: o, printer: p, cluster: c, client: client, known: len(c.Nodes), images: images}
	for _, count := range o.Nodes {
		if err := s.at(ctx, count); err != nil {
			return fmt.Errorf("with %d Nodes: %w", count, err)
		}
	}
	return nil
}

// fewControllers leaves the cluster with the controller of DaemonSets only. The others would write each Node that no kubelet speaks for
// again and again, as no cluster's Nodes are.
func fewControllers(ctx context.Context, c *cluster.Cluster) error {
	const name = "kube-controller-manager"
	node := c.Nodes[0]
	if err := node.Stop(ctx, name, syscall.SIGTERM); err != nil {
		return err
	}
	return node.Start(ctx, name, name, "--kubeconfig="+filepath.Join(c.Dir, name+".kubeconfig"), "--leader-elect=false",
		"--controllers=daemonset-controller")
}

// sweep measures agents while there are more and more Nodes.
type sweep struct {
	Options
	*printer

	cluster *cluster.Cluster
	client  kubernetes.Interface
	known   int
	images  []core.ContainerImage // of each Node that no kubelet stands for
}

func (s *sweep) at(ctx context.Context, count int) error {
	started := time.Now()
	group, within := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i := s.known; i < count; i++ {
		group.Go(func() error {
			_, err := s.client.CoreV1().Nodes().Create(within, paper(i, s.images), metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("create Nodes: %w", err)
	}
	s.say("%d Nodes more after %.1f s", count-s.known, time.Since(started).Seconds())
	s.known = count
	for round := 1; round <= s.Starts; round++ {
		if err := s.start(ctx, round); err != nil {
			return err
		}
	}
	return s.rest(ctx)
}

func paperName(i int) string { return fmt.Sprintf("paper-%d", i) }

// nodeImages are those that tools/bench gives its Nodes as well.
func nodeImages() (images []core.ContainerImage, err error) {
	raw, err := cluster.ReadTestdata("images.json")
	if err == nil {
		err = json.Unmarshal(raw, &images)
	}
	if err != nil {
		return nil, fmt.Errorf("read the images of a Node: %w", err)
	}
	return images, nil
}

// paper is a Node that no kubelet stands for, as large as one in use. Pods can't be there.
func paper(i int, images []core.ContainerImage) *core.Node {
	podCIDR := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + i/256), byte(i % 256), 0}), 24).String()
	addr := netip.AddrFrom4([4]byte{172, 30, byte(1 + i/250), byte(1 + i%250)}).String()
	node := &core.Node{
		ObjectMeta: metav1.ObjectMeta{Name: paperName(i), Labels: map[string]string{"kubernetes.io/arch": "amd64", "kubernetes.io/hostname": paperName(i)}},
		Spec:       core.NodeSpec{PodCIDR: podCIDR, PodCIDRs: []string{podCIDR}, Unschedulable: true},
		Status: core.NodeStatus{Addresses: []core.NodeAddress{
			{Type: core.NodeInternalIP, Address: addr}, {Type: core.NodeHostName, Address: paperName(i)},
		}, Images: images},
	}
	for _, condition := range []core.NodeConditionType{core.NodeReady, core.NodeMemoryPressure, core.NodeDiskPressure, core.NodePIDPressure} {
		node.Status.Conditions = append(node.Status.Conditions, core.NodeCondition{
			Type: condition, Status: core.ConditionUnknown, Reason: "Paper", Message: "no kubelet stands for this Node",
		})
	}
	return node
}

// start has the DaemonSet replace an agent, and measures how long the new one takes to know all Nodes, and what it then weighs.
// In every other round the map is emptied in between, as it is on a new node.
func (s *sweep) start(ctx context.Context, round int) error {
	node := s.cluster.Nodes[1]
	before, err := agentOn(node)
	if err != nil {
		return err
	}
	if err := s.deleteAgent(ctx, node); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	metric := "again"
	if round%2 == 1 {
		metric = "complete"
		if err := forgetAfter(ctx, node, before); err != nil {
			return err
		}
	}
	var pid int
	for pid, err = agentOn(node); err != nil || pid == before; pid, err = agentOn(node) {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("wait for another agent on %s: %w", node.Name, err)
		}
	}
	started, err := bornAt(pid)
	if err != nil {
		return err
	}
	for why := ready(ctx, node); why != nil; why = ready(ctx, node) {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the agent of %s: %w: %w", node.Name, err, why)
		}
	}
	took := time.Since(started)
	if err := s.proveComplete(ctx, node); err != nil {
		return err
	}
	if err := pause(ctx, settled); err != nil {
		return err
	}
	weight, err := weigh(pid)
	if err != nil {
		return err
	}
	weight[metric] = took.Seconds()
	if weight["initial"], err = received(node, pid); err != nil {
		return err
	}
	s.say("%d Nodes, start %d (%s): ready after %.2f s, %.1f MiB", s.known, round, metric, took.Seconds(), weight["memory"]/(1<<20))
	return s.line(Sample{Workload: Agent, Mode: ours, Point: s.known, Round: round, Started: started, Values: weight})
}

// forgetAfter empties the map of Nodes when an agent has ended, before the next one starts.
func forgetAfter(ctx context.Context, node *cluster.Machine, before int) error {
	pid, err := agentOn(node)
	for ; err == nil && pid == before; pid, err = agentOn(node) {
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the end of the agent of %s: %w", node.Name, err)
		}
	}
	if errors.Is(err, errNoAgent) {
		err = node.Forget()
	}
	if err != nil {
		return err
	}
	pid, err = agentOn(node)
	if err == nil {
		return fmt.Errorf("process %d, the next agent of %s, was there before its map was empty", pid, node.Name)
	}
	if !errors.Is(err, errNoAgent) {
		return err
	}
	return nil
}

func (s *sweep) deleteAgent(ctx context.Context, node *cluster.Machine) error {
	return s.client.CoreV1().Pods(cluster.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		LabelSelector: cluster.AgentLabel, FieldSelector: "spec.nodeName=" + node.Name,
	})
}

// ready asks the agent as the kubelet does.
func ready(ctx context.Context, node *cluster.Machine) error {
	client := http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return node.Dial(ctx, network, address)
		}},
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9965/readyz", http.NoBody)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(answer.Body)
		return errors.New(strings.TrimSpace(string(said)))
	}
	return nil
}

// proveComplete looks whether a ready agent's map has every other Node's podCIDR.
func (s *sweep) proveComplete(ctx context.Context, node *cluster.Machine) error {
	out, err := node.Run(ctx, s.cluster.Binary("ebpfctl"), "dump", "destinations", "-o", "json")
	if err != nil {
		return err
	}
	nodes, err := s.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	missing := 0
	for _, other := range nodes.Items {
		if other.Name != node.Name && !strings.Contains(out, strconv.Quote(other.Spec.PodCIDR)) {
			missing++
		}
	}
	if missing > 0 || len(nodes.Items) != s.known {
		return fmt.Errorf("the agent of %s is ready, but %d podCIDRs of %d Nodes are not in its map; there should be %d Nodes", node.Name, missing, len(nodes.Items), s.known)
	}
	return nil
}

// rest measures the CPU time of both agents while nothing happens but that kubelets renew their Nodes.
func (s *sweep) rest(ctx context.Context) error {
	if err := s.cluster.WaitReady(ctx); err != nil {
		return err
	}
	renewing, stop := context.WithCancel(ctx)
	var renewed atomic.Int64
	var group errgroup.Group
	group.Go(func() error { return s.renew(renewing, &renewed) })
	defer func() { stop(); _ = group.Wait() }()
	// What an agent does after its start is no rest.
	if err := pause(ctx, 5*settled); err != nil {
		return err
	}
	before, started, first := make([]state, len(s.cluster.Nodes)), time.Now(), renewed.Load()
	for i, node := range s.cluster.Nodes {
		var err error
		if before[i], err = stateOf(node); err != nil {
			return err
		}
	}
	asJSON, err := s.watchJSON(ctx)
	if err != nil {
		return err
	}
	late := s.late(time.Since(started), renewed.Load()-first)
	for i, node := range s.cluster.Nodes {
		after, err := stateOf(node)
		if err != nil {
			return err
		}
		if after.pid != before[i].pid {
			return fmt.Errorf("the agent of %s was replaced while it was to rest", node.Name)
		}
		weight, err := weigh(after.pid)
		if err != nil {
			return err
		}
		took := time.Since(started)
		perMinute, perHour := (after.cpu-before[i].cpu).Seconds()/took.Minutes(), late*(after.received-before[i].received)/took.Hours()
		s.say("%d Nodes: the agent of %s takes %.0f ms a minute and %.1f MiB, and is sent %.0f MiB an hour", s.known, node.Name, 1000*perMinute,
			weight["memory"]/(1<<20), perHour/(1<<20))
		err = s.line(Sample{Workload: Agent, Mode: ours, Point: s.known, Round: i + 1, Started: started, Values: map[string]float64{
			"cpu": perMinute, "resting": weight["memory"], "hour": perHour, "hour-json": late * asJSON * time.Hour.Seconds(),
		}})
		if err != nil {
			return err
		}
	}
	stop()
	if err := group.Wait(); err != nil {
		return err
	}
	s.say("%d Nodes: %d were renewed meanwhile", s.known, renewed.Load())
	return s.lists(ctx)
}

// late is how many times as often Nodes should have been renewed: a machine that is busy may not keep up, and what is sent goes by the writes.
func (s *sweep) late(took time.Duration, renewed int64) float64 {
	if renewed == 0 {
		return 1
	}
	return float64(s.known-len(s.cluster.Nodes)) * took.Seconds() / renewal.Seconds() / float64(renewed)
}

// state is what an agent has taken until now.
type state struct {
	pid      int
	cpu      time.Duration
	received float64 // bytes, on the connections that are open
}

func stateOf(node *cluster.Machine) (now state, err error) {
	if now.pid, err = agentOn(node); err != nil {
		return now, err
	}
	if now.cpu, err = cpuTime(now.pid); err != nil {
		return now, err
	}
	now.received, err = received(node, now.pid)
	return now, err
}

// renew does what the kubelets of the Nodes would: each writes its status once in a while.
func (s *sweep) renew(ctx context.Context, count *atomic.Int64) error {
	papers := s.known - len(s.cluster.Nodes)
	if papers == 0 {
		return nil
	}
	tick := time.NewTicker(renewal / time.Duration(papers))
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":"Ready","lastHeartbeatTime":%q}]}}`, time.Now().UTC().Format(time.RFC3339))
		_, err := s.client.CoreV1().Nodes().Patch(ctx, paperName(len(s.cluster.Nodes)+i%papers), types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("renew a Node: %w", err)
		}
		count.Add(1)
	}
}
