package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster/measure"
)

// measured measures, and prints to stdout what it finds, to stderr what it does.
func measured(ctx context.Context, args []string) error {
	o, err := measureOptions(args)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	return measure.Run(ctx, o, os.Stdout, os.Stderr)
}

func measureOptions(args []string) (o measure.Options, err error) {
	flags := flag.NewFlagSet("measure", flag.ContinueOnError)
	only := flags.String("only", strings.Join(measure.Workloads(), ","), "what to measure")
	nodes := flags.String("nodes", "2,500,5000", "at how many Node objects agents are measured, in ascending order")
	flags.IntVar(&o.Rounds, "rounds", 6, "rounds of pods, an even number")
	flags.IntVar(&o.Pods, "pods", 20, "pods of each network in a round, one after the other")
	flags.IntVar(&o.Burst, "burst", 10, "pods created at once, of each network in a round")
	flags.IntVar(&o.Rollouts, "rollouts", 5, "rollouts of the DaemonSet")
	flags.IntVar(&o.Starts, "starts", 10, "starts of the agent at each number of Nodes")
	flags.DurationVar(&o.Rest, "rest", time.Minute, "how long agents are watched at rest")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("measure: unexpected argument %q", flags.Arg(0))
	}
	for name := range strings.SplitSeq(*only, ",") {
		if !slices.Contains(measure.Workloads(), name) {
			return o, fmt.Errorf("measure -only %q: there are %s", name, strings.Join(measure.Workloads(), ", "))
		}
		o.Only = append(o.Only, name)
	}
	for text := range strings.SplitSeq(*nodes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 2 || n > 5000 || len(o.Nodes) > 0 && n <= o.Nodes[len(o.Nodes)-1] {
			return o, fmt.Errorf("measure -nodes %q: want numbers from 2 to 5000 in ascending order, such as 2,500", *nodes)
		}
		o.Nodes = append(o.Nodes, n)
	}
	if o.Rounds < 2 || o.Rounds%2 != 0 || min(o.Pods, o.Burst, o.Rollouts, o.Starts) < 1 || o.Rest <= 0 {
		return o, fmt.Errorf("measure: %q: want an even number of rounds, and no less than one of anything", args)
	}
	return o, nil
}
