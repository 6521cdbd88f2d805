package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	kerrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// betweenPods is how long the cluster is left alone between two pods: until the kubelet has told the API server of the one before.
const betweenPods = 300 * time.Millisecond

// side is a network, and the node that has it.
type side struct {
	mode string
	node *cluster.Machine
}

// sideBySide measures pods of two nodes of one cluster, one with each network, in turn. Neither is the node of the control plane.
func sideBySide(ctx context.Context, o Options, p *printer, exchanged int, rounds [2]int) error {
	if rounds[0] > rounds[1] {
		return nil
	}
	return with(ctx, p, 3, func(c *cluster.Cluster) error {
		sides := []side{{ours, c.Nodes[1+exchanged]}, {classical, c.Nodes[2-exchanged]}}
		if err := c.InstallClassical(ctx, sides[1].node); err != nil {
			return err
		}
		if err := c.Install(ctx); err != nil {
			return err
		}
		w := &walk{Options: o, printer: p, cluster: c, sides: sides}
		var err error
		if w.greetings, err = c.Greet(); err != nil {
			return err
		}
		defer w.greetings.Close()
		return w.rounds(ctx, rounds)
	})
}

// walk measures first packets on one cluster.
type walk struct {
	Options
	*printer

	cluster   *cluster.Cluster
	greetings *cluster.Greetings
	sides     []side
}

func (w *walk) rounds(ctx context.Context, rounds [2]int) error {
	if err := w.proveSides(ctx); err != nil {
		return err
	}
	for round := rounds[0]; round <= rounds[1]; round++ {
		if slices.Contains(w.Only, FirstPacket) {
			if err := w.oneByOne(ctx, round); err != nil {
				return err
			}
		}
		if slices.Contains(w.Only, Burst) {
			if err := w.atOnce(ctx, round); err != nil {
				return err
			}
		}
	}
	return nil
}

// proveSides runs a first pod on each node, which pays for what only the first one does, and looks whether the network is the one that its
// node is to have.
func (w *walk) proveSides(ctx context.Context) error {
	for _, s := range w.sides {
		if _, err := w.greetings.FirstPacket(ctx, s.node, "first-on-"+s.node.Name, lasting); err != nil {
			return err
		}
		_, bridged := s.node.Run(ctx, "ip", "link", "show", "cni0")
		_, agent := agentOn(s.node)
		if (bridged == nil) != (s.mode == classical) || (agent == nil) != (s.mode == ours) {
			return fmt.Errorf("%s is to have the network %s; its bridge: %v; its agent: %v", s.node.Name, s.mode, bridged, agent)
		}
	}
	return w.deleteAll(ctx)
}

// proveAnswers looks whether the pods have got their answers: else they go on and on.
func (w *walk) proveAnswers(ctx context.Context) error {
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	before := w.greetings.Received()
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	if more := w.greetings.Received() - before; more > 0 {
		return fmt.Errorf("%d first packets a second come from pods that were answered: the answers are lost on their way", more)
	}
	return nil
}

// lasting are the labels of pods that stay until deleteAll.
var lasting = map[string]string{"measured": "yes"}

// oneByOne is a round of pods, each alone, in turn on one node and the other.
func (w *walk) oneByOne(ctx context.Context, round int) error {
	started, took := time.Now(), map[string][]float64{}
	for i := range w.Pods {
		order := slices.Clone(w.sides)
		if (i+round)%2 == 0 {
			slices.Reverse(order)
		}
		for _, s := range order {
			name := fmt.Sprintf("pod-%d-%d-%s", round, i, s.node.Name)
			d, err := w.greetings.FirstPacket(ctx, s.node, name, lasting)
			if err != nil {
				return err
			}
			took[s.mode] = append(took[s.mode], d.Seconds())
			if err := pause(ctx, betweenPods); err != nil {
				return err
			}
		}
	}
	for _, s := range w.sides {
		if err := w.line(Sample{Workload: FirstPacket, Mode: s.mode, Round: round, Started: started, Durations: map[string][]float64{"delay": took[s.mode]}}); err != nil {
			return err
		}
		w.say("round %d of %d: first packets on %s: median %.0f ms", round, w.Rounds, s.mode, 1000*median(took[s.mode]))
	}
	return w.deleteAll(ctx)
}

// atOnce is a round of bursts.
func (w *walk) atOnce(ctx context.Context, round int) error {
	order := slices.Clone(w.sides)
	if round%2 == 0 {
		slices.Reverse(order)
	}
	for _, s := range order {
		started, last := time.Now(), make([]time.Duration, w.Burst)
		group, within := errgroup.WithContext(ctx)
		for i := range w.Burst {
			group.Go(func() error {
				begun := time.Since(started)
				took, err := w.greetings.FirstPacket(within, s.node, fmt.Sprintf("burst-%d-%d-%s", round, i, s.node.Name), lasting)
				last[i] = begun + took
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		longest := slices.Max(last).Seconds()
		if err := w.line(Sample{Workload: Burst, Mode: s.mode, Round: round, Started: started, Values: map[string]float64{"last": longest}}); err != nil {
			return err
		}
		w.say("round %d of %d: %d pods at once on %s: %.2f s", round, w.Rounds, w.Burst, s.mode, longest)
		if err := w.deleteAll(ctx); err != nil {
			return err
		}
	}
	return nil
}

// deleteAll ends all pods, and gives the nodes a moment to be done with them. None may have been without an answer until then.
func (w *walk) deleteAll(ctx context.Context) error {
	if err := w.proveAnswers(ctx); err != nil {
		return err
	}
	client, err := w.cluster.Client()
	if err != nil {
		return err
	}
	pods, those := client.CoreV1().Pods(metav1.NamespaceDefault), metav1.ListOptions{LabelSelector: "measured=yes"}
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{}, those); err != nil && !kerrors.IsNotFound(err) {
		return fmt.Errorf("delete the pods: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err = cluster.Poll(limited, "the pods are gone", func(ctx context.Context) error {
		left, err := pods.List(ctx, those)
		if err == nil && len(left.Items) > 0 {
			err = errors.New("some are there")
		}
		return err
	})
	if err != nil {
		return err
	}
	return pause(ctx, time.Second)
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
