// The demo builds a cluster of three nodes and a host outside on this machine, has every pod talk to everybody, and
// says what it saw. It ends with status 0 only if everything held.
//
//	make demo                           build, show, clean up
//	make demo MODE=vxlan                with VXLAN between all nodes (or MODE=direct; auto is the default)
//	make demo MODE=docker               without Kubernetes: Docker on the nodes, subnets from etcd, flannel's daemon on one node
//	make demo FAMILY=dual               both families, each with a table of its own (or FAMILY=ipv6; ipv4 is the default)
//	make demo LINKS=2                   nodes on two links, with a router between them
//	make demo KEEP=1                    leave the cluster running, and say how to look around
//	go -C tools/demo run . -clean ID    end that cluster
//	go -C tools/demo run . -clean       end all that were kept from this checkout, or that a killed demo left
//
// It needs root, Linux 6.1 or newer and the binaries in bin/; with MODE=docker what tools/setup.sh docker gets, otherwise no other
// program.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	status := run(ctx, env{args: os.Args[1:], getenv: os.Getenv, stdout: os.Stdout, stderr: os.Stderr, colour: wantColour(os.Stdout)})
	stop()
	os.Exit(status)
}

// env is all that the demo takes from its process.
type env struct {
	args           []string
	getenv         func(string) string
	stdout, stderr io.Writer
	colour         bool
}

func run(ctx context.Context, e env) int {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(e.stderr)
	clean := flags.Bool("clean", false,
		"end the clusters given by id; without one, those that were kept from this checkout or that a killed process left")
	keep := flags.Bool("keep", e.getenv("KEEP") == "1", "leave the cluster running (or KEEP=1)")
	var between setting
	flags.StringVar(&between.family, "family", cmp.Or(e.getenv("FAMILY"), "ipv4"), "the pods' addresses: ipv4, ipv6 or dual (or FAMILY=...)")
	flags.StringVar(&between.mode, "mode", cmp.Or(e.getenv("MODE"), "auto"), "routing mode of the agents: auto, direct or vxlan; or docker (or MODE=...)")
	flags.StringVar(&between.links, "links", cmp.Or(e.getenv("LINKS"), "1"), "on how many links the nodes are: 1 or 2 (or LINKS=...)")
	if err := flags.Parse(e.args); err != nil {
		return 2
	}
	if flags.NArg() > 0 && !*clean {
		fmt.Fprintf(e.stderr, "demo: unexpected argument %q; only -clean takes some, the ids of clusters\n", flags.Arg(0))
		return 2
	}
	if err := between.check(); err != nil {
		fmt.Fprintln(e.stderr, "demo:", err)
		return 2
	}
	if err := checkMachine(); err != nil {
		fmt.Fprintln(e.stderr, "demo:", err)
		return 1
	}
	if *clean {
		return end(e, flags.Args())
	}
	return newDemo(e, between, *keep).run(ctx)
}

// end ends the clusters named; without a name, all that are this checkout's or nobody's.
func end(e env, ids []string) int {
	var ended []string
	var err error
	if len(ids) > 0 {
		ended, err = endEach(ids)
	} else if ended, err = lab.SweepKept(); err == nil {
		err = tellKept(e)
	}
	for _, id := range ended {
		fmt.Fprintf(e.stdout, "ended cluster %s\n", id)
	}
	if err != nil {
		fmt.Fprintln(e.stderr, "demo:", err)
		return 1
	}
	return 0
}

func endEach(ids []string) (ended []string, err error) {
	for _, id := range ids {
		if failed := lab.End(id); failed != nil {
			err = errors.Join(err, failed)
		} else {
			ended = append(ended, id)
		}
	}
	return ended, err
}

// tellKept names the clusters that stay because they were kept from another checkout.
func tellKept(e env) error {
	kept, err := lab.Kept()
	for _, k := range kept {
		fmt.Fprintf(e.stdout, "left cluster %s, kept from %s; to end it: go -C tools/demo run . -clean %s\n", k.ID, k.From, k.ID)
	}
	return err
}

// checkMachine says what is missing before anything is built.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("needs root to make network namespaces and load programs; run it with sudo, or as root")
	}
	release, err := kernelRelease()
	if err != nil {
		return err
	}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return fmt.Errorf("read the kernel's version from %q: %w", release, err)
	}
	if major < 6 || (major == 6 && minor < 1) {
		return fmt.Errorf("the kernel is Linux %s; the programs need 6.1 or newer", release)
	}
	return nil
}

func kernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("read the kernel's version: %w", err)
	}
	return strings.TrimRight(string(name.Release[:]), "\x00"), nil
}

// wantColour is true for a terminal, unless its user has asked for none.
func wantColour(file *os.File) bool {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
