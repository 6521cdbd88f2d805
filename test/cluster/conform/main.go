// Command conform runs Kubernetes' own tests of the network on clusters of its own without kube-proxy, one for each choice of
// families: all of [sig-network] but what left-out.yaml names with its reason.
//
//	conform [-families=ipv4,dual] [-nodes=6] [-procs=8] [-focus=REGEXP | -tests=FILE] [-out=DIR] [-kept] [-publish]
//
// It prints what passed and what did not, and leaves that in DIR, beside the tests' own log and report. With -kept nothing runs:
// it prints what earlier runs have left there. With -publish whole runs become test/cluster/CONFORMANCE.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func main() {
	cluster.Init()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conform:", err)
		os.Exit(1)
	}
}

// usual are the clusters that are tested unless others are named.
const usual = "ipv4,dual"

// wholeNodes are those of a whole run: tests of zones want three, with two nodes each.
const (
	wholeNodes = 6
	zones      = 3
)

// page is the file that a whole run becomes, seen from test/cluster, where this program runs.
const page = "CONFORMANCE.md"

// options are what the flags say.
type options struct {
	families     []string
	nodes, procs int
	focus        *regexp.Regexp
	chosen       chosen // what focus is made of; none: it is what the flag says
	out, version string
	kept         bool
	prepare      bool
	publish      bool
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("conform", flag.ContinueOnError)
	list := flags.String("families", usual, "the clusters to test, one after the other: ipv4, ipv6, dual")
	focus := flags.String("focus", "", "only the tests whose names match this regular expression")
	file := flags.String("tests", "", "only the tests that this file names, by regular expressions, one a line")
	flags.IntVar(&o.nodes, "nodes", wholeNodes, "nodes of each cluster")
	flags.IntVar(&o.procs, "procs", 8, "tests at a time")
	flags.StringVar(&o.out, "out", "../../bin/conformance", "directory for the tests' own logs and reports")
	flags.StringVar(&o.version, "version", "unknown", "this project's version, for the page")
	flags.BoolVar(&o.kept, "kept", false, "run nothing: read what earlier runs have left in -out")
	flags.BoolVar(&o.prepare, "prepare", false, "run nothing: only compile what is not there yet")
	flags.BoolVar(&o.publish, "publish", false, "write test/cluster/"+page+", from whole runs")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.families = strings.Split(*list, ",")
	if o.chosen, err = readChosen(*file); err != nil {
		return o, err
	}
	if o.focus, err = regexp.Compile(*focus + o.chosen.expression()); err != nil {
		return o, fmt.Errorf("read -focus: %w", err)
	}
	for _, name := range o.families {
		if cluster.FamilyChoices[name] == nil {
			return o, fmt.Errorf("families %q: takes ipv4, ipv6 and dual, with commas between them", *list)
		}
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case *focus != "" && *file != "":
		return o, errors.New("focus and tests: one or the other")
	case o.nodes < 1 || o.procs < 1:
		return o, errors.New("nodes and procs: at least one")
	// Said before hours have passed, and not only when the page is written.
	case o.publish && !o.kept:
		return o, subject{Nodes: o.nodes, Focus: o.focus.String()}.whole()
	}
	return o, nil
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if o.out, err = filepath.Abs(o.out); err != nil {
		return fmt.Errorf("find -out: %w", err)
	}
	if o.prepare {
		_, err := prepare(ctx, o)
		return err
	}
	test := testAll
	if o.kept {
		test = keptRuns
	}
	runs, err := test(ctx, o)
	if err != nil {
		return err
	}
	fmt.Print(table(runs))
	if o.publish {
		if err := publish(runs); err != nil {
			return err
		}
	}
	return judge(runs, o.out)
}

// testAll runs the tests on one cluster after the other, and keeps what came of each at once.
func testAll(ctx context.Context, o options) (runs []runOf, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("needs root, for namespaces and cgroups")
	}
	if err := enoughInotify(o.nodes); err != nil {
		return nil, err
	}
	s, err := prepare(ctx, o)
	if err != nil {
		return nil, err
	}
	for _, family := range o.families {
		one, err := s.run(ctx, o, family)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", family, err)
		}
		if err := one.keep(o.out); err != nil {
			return nil, err
		}
		runs = append(runs, one)
	}
	return runs, nil
}

// publish writes the page of whole runs that came to their end.
func publish(runs []runOf) error {
	for _, one := range runs {
		if err := one.whole(); err != nil {
			return fmt.Errorf("%s: %w", one.Family, err)
		}
	}
	if err := os.WriteFile(page, []byte(document(runs)), 0o644); err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

// judge is an error when a test failed, or one that was to run did not.
func judge(runs []runOf, out string) error {
	failures := 0
	for _, one := range runs {
		failures += one.count(failed) + one.count(notRun)
	}
	if failures > 0 {
		return fmt.Errorf("%d tests failed or did not run; what they said is in %s/FAMILY/%s", failures, out, logFile)
	}
	return nil
}

// enoughInotify keeps a run of many nodes from failing for a limit of the whole machine, which is its owner's to set.
func enoughInotify(nodes int) error {
	const file, few, want = "/proc/sys/fs/inotify/max_user_instances", 5, 1024
	raw, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read how many inotify instances there may be: %w", err)
	}
	var limit int
	if _, err := fmt.Sscan(string(raw), &limit); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	if nodes > few && limit < want {
		return fmt.Errorf("this machine allows %d inotify instances, and the kubelets of %d nodes want more: "+
			"sysctl fs.inotify.max_user_instances=%d, and afterwards sysctl fs.inotify.max_user_instances=%d", limit, nodes, want, limit)
	}
	return nil
}
