package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

const (
	// lostFor is how long the API server is away each time it is lost; a tenth of a short soak.
	lostFor = time.Minute
	// How often the agent's metrics are asked for, and ebpfctl status, and how long either may take.
	betweenMetrics = 30 * time.Second
	betweenStatus  = time.Minute
	askTimeout     = 2 * time.Minute
)

// soakOptions are the flags of a soak.
type soakOptions struct {
	length                         time.Duration
	nodes, pods, routes, addresses int
	podChanges, routeChanges       float64
	losses                         int
	out                            string
}

func soakCommand(e env) *cobra.Command {
	var o soakOptions
	command := &cobra.Command{
		Use:   "soak",
		Short: "Keep one agent busy in a large cluster, and write its log, metrics and status into a directory",
		Args:  exactly(0, "none"),
		RunE:  func(cmd *cobra.Command, _ []string) error { return soak(cmd.Context(), e, o) },
	}
	flags := command.Flags()
	flags.DurationVar(&o.length, "for", time.Hour, "how long, once the pods are there")
	flags.IntVar(&o.nodes, "nodes", result.Nodes, "Nodes of the cluster; each one's status is renewed every five minutes")
	flags.IntVar(&o.pods, "pods", result.Pods, "pods of the node")
	flags.Float64Var(&o.podChanges, "pod-changes", 2, "how often a second a pod is deleted and another one added")
	flags.Float64Var(&o.routeChanges, "route-changes", 10, "how often a second a foreign route comes or goes")
	flags.IntVar(&o.routes, "routes", 0, "foreign routes that stay")
	flags.IntVar(&o.addresses, "addresses", 0, "foreign local addresses")
	flags.IntVar(&o.losses, "api-losses", 2, "how often the API server is lost: each time for a minute, or a tenth of a short soak")
	flags.StringVar(&o.out, "out", filepath.Join("bench-out", "soak"), "the directory to write into, in place of an earlier soak's files")
	return command
}

func (o soakOptions) check() error {
	const most = 100_000 // of what the numbers of routes and addresses reach
	if o.length <= 0 || o.nodes < 2 || o.nodes > result.Nodes || min(o.podChanges, o.routeChanges) < 0 || max(o.podChanges, o.routeChanges) > 1000 ||
		o.pods < 0 || o.pods > result.Pods || min(o.losses, o.routes, o.addresses) < 0 || o.losses > 10 || o.routes > most || o.addresses > most/2 ||
		o.pods == 0 && o.podChanges > 0 {
		return usage(fmt.Errorf("want some time, 2 to %d Nodes, up to %d pods (some, if they are to change), %d routes, %d addresses, 10 losses, 1000 changes a second",
			result.Nodes, result.Pods, most, most/2))
	}
	return nil
}

// soaker is a soak that runs.
type soaker struct {
	soakOptions
	*scale

	foreign  *foreign
	log      *slog.Logger // of what happens to the agent
	samples  *os.File
	progress io.Writer
	started  time.Time
	first    spent

	changed, failed, routed, lost atomic.Int64
}

// soak carries out a soak, and says at its end, or when it is interrupted, what the agent took.
func soak(ctx context.Context, e env, o soakOptions) (err error) {
	if err := o.check(); err != nil {
		return err
	}
	if !e.root {
		return errors.New("needs root, to make namespaces and load programs; run it with sudo, or as root")
	}
	s := &soaker{soakOptions: o, progress: e.stderr}
	if s.scale, err = newScale(ctx, o.nodes, o.pods); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	files, err := s.prepare()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files()) }()
	if err := s.start(ctx, s.full); err != nil {
		return err
	}
	if err := pause(ctx, afterStart); err != nil {
		return err
	}
	if s.first, err = spentBy(s.full); err != nil {
		return err
	}
	s.started = s.first.at
	fmt.Fprintf(e.stderr, "agent: process %d in namespace %s, for %s; writing %s\n", s.full.AgentPID(), s.full.Netns(), o.length, o.out)
	err = s.run(ctx)
	summary, said := s.summary()
	fmt.Fprint(e.stdout, summary)
	return errors.Join(err, said, os.WriteFile(filepath.Join(o.out, "summary.txt"), []byte(summary), 0o644))
}

// prepare empties the directory of an earlier soak's files, opens those of this one, which the function returned closes, and gives the node what is foreign.
func (s *soaker) prepare() (closing func() error, err error) {
	if s.out, err = filepath.Abs(s.out); err != nil {
		return nil, err
	}
	in := func(name string) string { return filepath.Join(s.out, name) }
	for _, name := range []string{"agent.log", "events.log", "samples.csv", "summary.txt", "metrics", "status"} {
		err = errors.Join(err, os.RemoveAll(in(name)))
	}
	err = errors.Join(err, os.MkdirAll(in("metrics"), 0o755), os.MkdirAll(in("status"), 0o755))
	// Straight into the directory: so it is there also if this process is killed.
	err = errors.Join(err, os.Remove(s.full.AgentLog()), os.Symlink(in("agent.log"), s.full.AgentLog()))
	if err != nil {
		return nil, fmt.Errorf("prepare the directory of a soak: %w", err)
	}
	events, err := os.Create(in("events.log"))
	if err != nil {
		return nil, err
	}
	if s.samples, err = os.Create(in("samples.csv")); err != nil {
		return nil, errors.Join(err, events.Close())
	}
	s.log = slog.New(slog.NewTextHandler(events, nil))
	closing = func() error { return errors.Join(events.Close(), s.samples.Close()) }
	if s.foreign, err = newForeign(s.full); err == nil {
		err = errors.Join(s.foreign.addRoutes(0, s.routes), s.foreign.addAddresses(s.addresses))
	}
	if err != nil {
		return nil, errors.Join(err, closing())
	}
	return closing, nil
}

// run does to the agent what it is to bear, and writes down how it bears it, until the time is over.
func (s *soaker) run(ctx context.Context) error {
	timed, cancel := context.WithTimeoutCause(ctx, s.length, errOver)
	defer cancel()
	group, within := errgroup.WithContext(timed)
	group.Go(func() error {
		n, err := s.foreign.change(within, s.routeChanges)
		s.routed.Store(int64(n))
		return err
	})
	group.Go(func() error { return s.changePods(within) })
	group.Go(func() error { return s.loseAPI(within) })
	group.Go(func() error { return regularly(within, betweenMetrics, s.sample) })
	group.Go(func() error { return regularly(within, betweenStatus, s.status) })
	err := group.Wait()
	if errors.Is(context.Cause(timed), errOver) && (err == nil || errors.Is(err, errOver)) {
		return errors.Join(s.sample(ctx), s.status(ctx))
	}
	return err
}

var errOver = errors.New("the time is over")

// regularly calls fn until the context ends or it fails.
func regularly(ctx context.Context, between time.Duration, fn func(context.Context) error) error {
	tick := time.NewTicker(between)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if err := fn(ctx); err != nil {
			return err
		}
	}
}

// changePods replaces the oldest pod by another one, again and again, and sees that the new one reaches the world. What fails is written down, and the next
// pod tried.
func (s *soaker) changePods(ctx context.Context) error {
	if s.podChanges == 0 {
		return nil
	}
	return regularly(ctx, time.Duration(float64(time.Second)/s.podChanges), func(ctx context.Context) error {
		n := s.changed.Add(1)
		if err := s.changePod(ctx, fmt.Sprintf("q%d", n)); err != nil && ctx.Err() == nil {
			s.failed.Add(1)
			s.log.Error("a pod's change failed", "pod", n, "error", err)
		}
		return nil
	})
}

func (s *soaker) changePod(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, operation)
	defer cancel()
	if pods := s.full.Pods(); len(pods) >= s.pods {
		err := pods[0].Del(ctx)
		if err := errors.Join(err, s.full.LosePod(pods[0])); err != nil {
			return err
		}
	}
	pod, err := s.full.AddPod(ctx, name, lab.PodOptions{})
	if err == nil {
		_, err = pod.Ping(ctx, lab.OutsideAddr[wire.IPv4], lab.PingOptions{})
	}
	return err
}

// loseAPI has the API server refuse connections for a while, so often, with the same time between.
func (s *soaker) loseAPI(ctx context.Context) error {
	away := min(lostFor, s.length/10)
	for range s.losses {
		if err := pause(ctx, s.length/time.Duration(s.losses+1)-away/2); err != nil {
			return err
		}
		s.log.Info("the API server is lost")
		s.lost.Add(1)
		if err := s.api.lose(); err != nil {
			return err
		}
		over := pause(ctx, away)
		if err := s.api.listen(); err != nil {
			return err
		}
		s.log.Info("the API server is back")
		if over != nil {
			return over
		}
	}
	return nil
}

// file is where what is asked for at this moment is written.
func (s *soaker) file(dir string) string {
	return filepath.Join(s.out, dir, fmt.Sprintf("%05.0fs.txt", time.Since(s.started).Seconds()))
}

// sample writes the agent's metrics down, and what it has taken so far.
func (s *soaker) sample(ctx context.Context) error {
	asked, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if status, body, err := s.full.HTTPGet(asked, "/metrics"); ctx.Err() != nil {
		return context.Cause(ctx)
	} else if err != nil || status != http.StatusOK {
		s.log.Error("no metrics", "status", status, "error", err)
	} else if err := os.WriteFile(s.file("metrics"), body, 0o644); err != nil {
		return err
	}
	line, err := s.taken()
	if err == nil {
		_, err = fmt.Fprintln(io.MultiWriter(s.samples, s.progress), line)
	}
	return err
}

// taken is what the agent has taken, as a line. An agent that has ended is an error.
func (s *soaker) taken() (string, error) {
	now, err := spentBy(s.full)
	if err != nil {
		return "", fmt.Errorf("the agent runs no more: %w\n%s", err, s.full.LogTail(20))
	}
	memory, peak, err := memory(s.full.AgentPID())
	cpu, _ := now.since(s.first)
	return fmt.Sprintf("%.0f s, CPU %.2f %%, memory %.1f MiB, peak %.1f MiB, log lines %d, pods changed %d, failed %d", now.at.Sub(s.started).Seconds(), 100*cpu,
		memory/(1<<20), peak/(1<<20), now.lines-s.first.lines, s.changed.Load(), s.failed.Load()), err
}

// status writes down what ebpfctl says, and how long it took to.
func (s *soaker) status(ctx context.Context) error {
	asked, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	file, started := s.file("status"), time.Now()
	out, err := s.full.Ebpfctl(asked, "status")
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	said := fmt.Sprintf("%s\n# took %.3f s; error: %v\n", out, time.Since(started).Seconds(), err)
	return os.WriteFile(file, []byte(said), 0o644)
}

// summary is what there is to say of the whole.
func (s *soaker) summary() (string, error) {
	took := time.Since(s.started)
	line, err := s.taken()
	return fmt.Sprintf("%d Nodes, %d pods, %d foreign routes, %d foreign addresses; %s pods and %s routes changed a second (%d in all), the API server lost %d times\n%s\n",
		s.soakOptions.nodes, s.pods, s.routes, s.addresses, rate(s.podChanges, s.changed.Load(), took), rate(s.routeChanges, s.routed.Load(), took), s.routed.Load(),
		s.lost.Load(), line), err
}

// rate is how often a second something happened, and where that is not as often as it was asked for, both.
func rate(asked float64, times int64, within time.Duration) string {
	reached := float64(times) / within.Seconds()
	if reached >= leastChanges*asked {
		return fmt.Sprintf("%g", asked)
	}
	return fmt.Sprintf("%.2g (asked for: %g)", reached, asked)
}
