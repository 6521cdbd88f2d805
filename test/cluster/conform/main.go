// Command conform runs Kubernetes' own tests of the network on clusters of its own without kube-proxy, one for each choice of
// families: all of [sig-network] but what left-out.yaml names with its reason.
//
//	conform [-families=ipv4,dual] [-nodes=6] [-procs=4] [-focus=REGEXP] [-out=DIR] [-publish]
//
// It prints what passed and what did not, and leaves the tests' own log and report in DIR. With -publish a whole run becomes
// test/cluster/CONFORMANCE.md.
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
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

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

// wholeFamilies and wholeNodes are what a whole run has: tests of zones want three, with two nodes each.
var wholeFamilies = []string{"ipv4", "dual"}

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
	out, version string
	publish      bool
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("conform", flag.ContinueOnError)
	list := flags.String("families", strings.Join(wholeFamilies, ","), "the clusters to test, one after the other: ipv4, ipv6, dual")
	focus := flags.String("focus", "", "only the tests whose names match this regular expression")
	flags.IntVar(&o.nodes, "nodes", wholeNodes, "nodes of each cluster")
	flags.IntVar(&o.procs, "procs", 4, "tests at a time")
	flags.StringVar(&o.out, "out", "../../bin/conformance", "directory for the tests' own logs and reports")
	flags.StringVar(&o.version, "version", "unknown", "this project's version, for the page")
	flags.BoolVar(&o.publish, "publish", false, "write test/cluster/"+page+", from a whole run")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.families = strings.Split(*list, ",")
	if o.focus, err = regexp.Compile(*focus); err != nil {
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
	case o.nodes < 1 || o.procs < 1:
		return o, errors.New("nodes and procs: at least one")
	case o.publish && !o.whole():
		return o, fmt.Errorf("publish: only a whole run is published, without -focus, with -families=%s and at least %d nodes",
			strings.Join(wholeFamilies, ","), wholeNodes)
	}
	return o, nil
}

// whole says whether nothing that could run is left out.
func (o options) whole() bool {
	return o.focus.String() == "" && o.nodes >= wholeNodes && slices.Equal(o.families, wholeFamilies)
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("needs root, for namespaces and cgroups")
	}
	if err := enoughInotify(o.nodes); err != nil {
		return err
	}
	if o.out, err = filepath.Abs(o.out); err != nil {
		return fmt.Errorf("find -out: %w", err)
	}
	s, err := prepare(ctx, o.out)
	if err != nil {
		return err
	}
	var runs []runOf
	for _, family := range o.families {
		one, err := s.run(ctx, o, family)
		if err != nil {
			return fmt.Errorf("%s: %w", family, err)
		}
		runs = append(runs, one)
	}
	fmt.Print(table(runs))
	if o.publish {
		if err := publish(o, runs); err != nil {
			return err
		}
	}
	return judge(runs, o.out)
}

// publish writes the page of runs that came to their end.
func publish(o options, runs []runOf) error {
	for _, one := range runs {
		if n := one.count(notRun); n > 0 {
			return fmt.Errorf("publish: %d tests of %s did not run: see %s/%s/%s", n, one.family, o.out, one.family, logFile)
		}
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("read the kernel's release: %w", err)
	}
	about := subject{version: o.version, kubernetes: cluster.KubernetesVersion, kernel: unix.ByteSliceToString(name.Release[:]), nodes: o.nodes}
	if err := os.WriteFile(page, []byte(document(about, runs)), 0o644); err != nil {
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
