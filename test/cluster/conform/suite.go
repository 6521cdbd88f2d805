package main

import (
	"context"
	_ "embed" // what is left out
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/onsi/ginkgo/v2/types"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

//go:embed left-out.yaml
var leftOutYAML []byte

// What a run leaves in its directory.
const (
	logFile    = "e2e.log"
	reportFile = "report.json"
)

// suite is upstream's tests, ready to run, and what of them does not.
type suite struct {
	programs, base string
	out            string
	leftOut        leftOut
}

// prepare builds the tests, and checks what is left out, or chosen, against the names that they have today.
func prepare(ctx context.Context, o options) (s suite, err error) {
	s.out = o.out
	if s.leftOut, err = readLeftOut(leftOutYAML); err != nil {
		return s, err
	}
	if s.programs, s.base, err = cluster.PrepareUpstream(ctx); err != nil {
		return s, err
	}
	names, err := s.list(ctx)
	if err != nil {
		return s, err
	}
	return s, errors.Join(s.leftOut.check(names), o.chosen.check(names))
}

// list names all tests of the network. None runs for that.
func (s suite) list(ctx context.Context) ([]string, error) {
	dir, err := os.MkdirTemp("", "ebpf-cni-conform-")
	if err != nil {
		return nil, fmt.Errorf("list upstream's tests: %w", err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, reportFile)
	list := exec.CommandContext(ctx, s.program(cluster.UpstreamTests), "-ginkgo.dry-run", "-ginkgo.label-filter="+label, "-ginkgo.json-report="+file)
	if said, err := list.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("list upstream's tests: %w\n%s", err, said)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("list upstream's tests: %w", err)
	}
	report, err := readReport(raw)
	if err != nil {
		return nil, err
	}
	return namesIn(report)
}

func (s suite) program(name string) string { return filepath.Join(s.programs, name) }

// run runs the tests on a cluster of some families, which is gone afterwards.
func (s suite) run(ctx context.Context, o options, family string) (all runOf, err error) {
	c, err := cluster.New(ctx, cluster.Options{Nodes: o.nodes, Families: cluster.FamilyChoices[family], KubeProxy: cluster.NoProxy})
	if err != nil {
		return all, err
	}
	defer func() { err = errors.Join(err, c.Close(context.WithoutCancel(ctx))) }()
	if err := s.furnish(ctx, c); err != nil {
		return all, err
	}
	report, err := s.test(ctx, c, o, family)
	if err != nil {
		return all, err
	}
	about, err := subjectOf(o)
	of := func(test string) string { return s.leftOut.reason(family, test) }
	return runOf{about, family, results(report, o.focus.MatchString, of)}, err
}

// furnish gives a cluster this network, DNS, the tests' images and, where the nodes suffice for them, zones.
func (s suite) furnish(ctx context.Context, c *cluster.Cluster) error {
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.InstallDNS(ctx); err != nil {
		return err
	}
	if err := c.AddImages(ctx, s.images(c)); err != nil {
		return err
	}
	if len(c.Nodes) < wholeNodes {
		return nil
	}
	for i, node := range c.Nodes {
		if _, err := c.Kubectl(ctx, "label", "node", node.Name, fmt.Sprint("topology.kubernetes.io/zone=z", i%zones)); err != nil {
			return err
		}
	}
	return nil
}

// test runs the tests from outside of the cluster, and returns ginkgo's report also of those that fail.
func (s suite) test(ctx context.Context, c *cluster.Cluster, o options, family string) (report types.Report, err error) {
	dir := filepath.Join(s.out, family)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return report, fmt.Errorf("make a directory for the tests' log: %w", err)
	}
	const program = "e2e"
	said := filepath.Join(c.Dir, c.Fabric.Name, "log", program+".log")
	if err := c.Fabric.Start(ctx, program, s.command(c, o, family)...); err != nil {
		return report, err
	}
	status, err := follow(ctx, c.Fabric, program, said)
	if err := errors.Join(err, keep(said, filepath.Join(dir, logFile))); err != nil {
		return report, err
	}
	made := filepath.Join(c.Dir, reportFile)
	if err := keep(made, filepath.Join(dir, reportFile)); err != nil {
		return report, fmt.Errorf("ginkgo ended with status %d: %w", status, err)
	}
	raw, err := os.ReadFile(made)
	if err != nil {
		return report, fmt.Errorf("read ginkgo's report: %w", err)
	}
	return readReport(raw)
}

// command is ginkgo's.
func (s suite) command(c *cluster.Cluster, o options, family string) []string {
	argv := []string{s.program("ginkgo"), "--procs=" + strconv.Itoa(o.procs), "--timeout=6h", "--no-color", "--silence-skips",
		"--label-filter=" + label, "--output-dir=" + c.Dir, "--json-report=" + reportFile}
	if focus := o.focus.String(); focus != "" {
		argv = append(argv, "--focus="+focus)
	}
	if skip := s.leftOut.expression(family); skip != "" {
		argv = append(argv, "--skip="+skip)
	}
	// Without the number of nodes some tests take it for too small.
	return append(argv, s.program(cluster.UpstreamTests), "--", "--provider=skeleton", "--kubeconfig="+c.Kubeconfig,
		"--kubectl-path="+c.Program("kubectl"), "--num-nodes="+strconv.Itoa(o.nodes))
}

// follow shows what a program says until it has ended.
func follow(ctx context.Context, m *cluster.Machine, program, file string) (status int, err error) {
	log, err := os.Open(file)
	if err != nil {
		return 0, fmt.Errorf("follow the tests' log: %w", err)
	}
	defer log.Close()
	type exit struct {
		status int
		err    error
	}
	ended := make(chan exit, 1)
	go func() {
		status, err := m.Wait(ctx, program)
		ended <- exit{status, err}
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		_, _ = io.Copy(os.Stderr, log) // for whoever looks on; the file is kept
		select {
		case how := <-ended:
			_, _ = io.Copy(os.Stderr, log)
			return how.status, how.err
		case <-tick.C:
		}
	}
}

// keep copies a file out of the cluster's directory, which goes with it.
func keep(from, to string) error {
	raw, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("keep what the tests have left: %w", err)
	}
	if err := os.WriteFile(to, raw, 0o644); err != nil {
		return fmt.Errorf("keep what the tests have left: %w", err)
	}
	return nil
}
