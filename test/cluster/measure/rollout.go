package measure

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// path is two flows between the same places, there and back.
type path struct {
	name        string
	there, back flow
}

// before and after a rollout traffic is watched for so long: what comes late is to be seen.
const watched = time.Second

// rollouts rolls the DaemonSet out anew, one time after the other, while datagrams go everywhere at a known rate.
func rollouts(ctx context.Context, o Options, c *cluster.Cluster, p *printer) error {
	node, other := c.Nodes[1], c.Nodes[0]
	var pods []*cluster.Pod
	for _, one := range []struct {
		name string
		node *cluster.Machine
	}{{"sender", node}, {"near", node}, {"far", other}} {
		pod, err := c.AddPod(ctx, one.name, one.node, nil)
		if err != nil {
			return err
		}
		pods = append(pods, pod)
	}
	for round := 1; round <= o.Rollouts; round++ {
		if err := rollout(ctx, c, p, pods, round); err != nil {
			return err
		}
	}
	return c.DeletePods(ctx, pods...)
}

func rollout(ctx context.Context, c *cluster.Cluster, p *printer, pods []*cluster.Pod, round int) error {
	started := time.Now()
	t, err := startTraffic(ctx, c, pods)
	if err != nil {
		return err
	}
	took, err := restart(ctx, c)
	if err = errors.Join(err, t.end(ctx)); err != nil {
		return err
	}
	for _, one := range t.paths {
		lost, sent := one.there.lost()+one.back.lost(), one.there.sent.Load()+one.back.sent.Load()
		// Half of what is due is a sender that did not run.
		if due := int64(2 * took.Seconds() * rate); sent < due/2 {
			return fmt.Errorf("%s: only %d datagrams were sent in %s", one.name, sent, took)
		}
		p.say("rollout %d: %s: %d of %d datagrams lost", round, one.name, lost, sent)
		err := p.line(Sample{Workload: Rollout, Path: one.name, Mode: ours, Round: round, Started: started, Values: map[string]float64{
			"lost": float64(lost), "sent": float64(sent), "took": took.Seconds(),
			"gap": max(one.there.longestGap(), one.back.longestGap()).Seconds(),
		}})
		if err != nil {
			return err
		}
	}
	return nil
}

// restart is a rollout, from the command until the last agent is ready.
func restart(ctx context.Context, c *cluster.Cluster) (time.Duration, error) {
	if err := pause(ctx, watched); err != nil {
		return 0, err
	}
	before, err := agentsByPod(ctx, c)
	if err != nil {
		return 0, err
	}
	started := time.Now()
	if _, err := c.Kubectl(ctx, "-n", cluster.Namespace, "rollout", "restart", "daemonset/"+cluster.DaemonSet); err != nil {
		return 0, err
	}
	if err := c.WaitReady(ctx); err != nil {
		return 0, err
	}
	took := time.Since(started)
	after, err := agentsByPod(ctx, c)
	if err != nil {
		return 0, err
	}
	for name := range after {
		if before[name] {
			return 0, fmt.Errorf("pod %s is still there after a rollout", name)
		}
	}
	return took, pause(ctx, watched)
}

// traffic are the flows of one rollout.
type traffic struct {
	paths     []*path
	stop      context.CancelFunc
	senders   *errgroup.Group
	receivers *errgroup.Group
	sockets   []*net.UDPConn
}

// startTraffic starts it from the first pod to the second, on its node, to the third, on another, and to the world, and back from each.
func startTraffic(ctx context.Context, c *cluster.Cluster, pods []*cluster.Pod) (*traffic, error) {
	ctx, stop := context.WithCancel(ctx)
	t := &traffic{stop: stop, receivers: &errgroup.Group{}}
	t.senders, ctx = errgroup.WithContext(ctx)
	hosts := make([]host, len(pods))
	for i, pod := range pods {
		hosts[i] = host{pod.Do, pod.Addr}
	}
	sameNode, acrossNodes, egress := &path{name: "same node"}, &path{name: "across nodes"}, &path{name: "egress"}
	t.paths = []*path{sameNode, acrossNodes, egress}
	err := errors.Join(
		t.oneWay(ctx, hosts[0], hosts[1], &sameNode.there), t.oneWay(ctx, hosts[1], hosts[0], &sameNode.back),
		t.oneWay(ctx, hosts[0], hosts[2], &acrossNodes.there), t.oneWay(ctx, hosts[2], hosts[0], &acrossNodes.back),
		t.echoed(ctx, hosts[0], host{c.Fabric.Do, c.World()}, egress),
	)
	if err != nil {
		return nil, errors.Join(err, t.end(context.WithoutCancel(ctx)))
	}
	return t, nil
}

func (t *traffic) oneWay(ctx context.Context, from, to host, f *flow) error {
	target, err := to.listen()
	if err != nil {
		return err
	}
	t.sockets = append(t.sockets, target)
	source, err := from.dial(target.LocalAddr())
	if err != nil {
		return err
	}
	t.sockets = append(t.sockets, source)
	t.receivers.Go(func() error { return f.receive(target, nil) })
	t.senders.Go(func() error { return f.send(ctx, source) })
	return nil
}

// echoed is for where nobody can begin on the way back.
func (t *traffic) echoed(ctx context.Context, from, to host, p *path) error {
	target, err := to.listen()
	if err != nil {
		return err
	}
	t.sockets = append(t.sockets, target)
	source, err := from.dial(target.LocalAddr())
	if err != nil {
		return err
	}
	t.sockets = append(t.sockets, source)
	t.receivers.Go(func() error { return p.there.receive(target, &p.back) })
	t.receivers.Go(func() error { return p.back.receive(source, nil) })
	t.senders.Go(func() error { return p.there.send(ctx, source) })
	return nil
}

// end waits for what is under way, and ends everything.
func (t *traffic) end(ctx context.Context) error {
	t.stop()
	err := t.senders.Wait()
	err = errors.Join(err, pause(ctx, drain))
	for _, socket := range t.sockets {
		err = errors.Join(err, socket.Close())
	}
	return errors.Join(err, t.receivers.Wait())
}
