// Command play starts and ends a cluster for a person, and measures one.
//
//	play up [FLAGS]        starts one that stays: see play up -h
//	play down              ends it
//	play programs          only compiles what a cluster needs and is not there yet
//	play measure [FLAGS]   makes some for itself, and prints as JSON what it has measured: see play measure -h
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func main() {
	cluster.Init()
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root, for namespaces and cgroups")
	}
	if len(args) == 0 {
		return errUsage
	}
	switch rest := args[1:]; {
	case args[0] == "up":
		return up(ctx, rest)
	case args[0] == "measure":
		return measured(ctx, rest)
	case args[0] == "down" && len(rest) == 0:
		return cluster.Sweep(ctx, true)
	case args[0] == "programs" && len(rest) == 0:
		_, err := cluster.PreparePrograms(ctx)
		return err
	}
	return errUsage
}

var errUsage = errors.New("usage: play up [FLAGS] | down | programs | measure [FLAGS]")
