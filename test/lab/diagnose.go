package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// Diagnose writes what somebody wants to know who looks at a test that failed: per node the end of the agent's log,
// status and dumps, links and routes.
func (l *Lab) Diagnose(ctx context.Context, w io.Writer) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	fmt.Fprintf(w, "==== lab %s in %s\n", l.ID, l.Dir)
	for _, node := range l.Nodes {
		fmt.Fprintf(w, "==== node %s (%s, pods %s), agent running: %v\n", node.Name, node.Addrs(), node.PodCIDRs, node.AgentRunning())
		fmt.Fprintf(w, "-- %s\n%s\n", node.AgentLog(), node.LogTail(40))
		others, _ := filepath.Glob(filepath.Join(node.Dir, "*.log")) // the plugin's, and those of programs
		for _, path := range others {
			if said, err := os.ReadFile(path); err == nil && len(said) > 0 && path != node.AgentLog() {
				fmt.Fprintf(w, "-- %s\n%s\n", path, said)
			}
		}
		for _, args := range [][]string{{"status"}, {"dump", "all"}} {
			out, err := node.Ebpfctl(ctx, args...)
			fmt.Fprintf(w, "-- ebpfctl %q\n%s", args, out)
			if err != nil {
				fmt.Fprintf(w, "   %v\n", err)
			}
		}
		node.describe(w)
		for _, pod := range node.Pods() {
			fmt.Fprintf(w, "==== pod %s of %s\n", pod.Name, node.Name)
			pod.describe(w)
		}
	}
}

// describe writes links with their addresses and counters, and the routes of the main table.
func (ns *Namespace) describe(w io.Writer) {
	links, err := RetryInterrupted(ns.nl.LinkList)
	if err != nil {
		fmt.Fprintf(w, "   list links: %v\n", err)
	}
	for _, l := range links {
		a := l.Attrs()
		fmt.Fprintf(w, "   %d: %s %s %s mtu %d %s rx %d tx %d", a.Index, a.Name, l.Type(), a.OperState, a.MTU, a.HardwareAddr, a.Statistics.RxPackets, a.Statistics.TxPackets)
		addrs, _ := RetryInterrupted(func() ([]netlink.Addr, error) { return ns.nl.AddrList(l, netlink.FAMILY_ALL) })
		for _, addr := range addrs {
			fmt.Fprintf(w, " %s", addr.IPNet)
		}
		fmt.Fprintln(w)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	routes, err := ns.describeRoutes(names)
	if err != nil {
		fmt.Fprintf(w, "   list routes: %v\n", err)
	}
	for _, route := range routes {
		// Of the table that the kernel fills for local addresses by itself nobody learns anything.
		if strings.HasPrefix(route, "route table 254") {
			fmt.Fprintf(w, "   %s\n", route)
		}
	}
}
