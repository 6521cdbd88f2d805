// Command play starts and ends a cluster for a person, and measures one.
//
//	play up [iptables|nftables]   starts one that stays, with that mode of kube-proxy
//	play down                     ends it
//	play programs                 only compiles what a cluster needs and is not there yet
//	play measure [FLAGS]          makes some for itself, and prints as JSON what it has measured: see play measure -h
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
	switch {
	case len(args) == 1 && args[0] == "up":
		return up(ctx, cluster.IPTables)
	case len(args) == 2 && args[0] == "up" && (args[1] == cluster.IPTables || args[1] == cluster.NFTables):
		return up(ctx, args[1])
	case len(args) == 1 && args[0] == "down":
		return cluster.Sweep(ctx, true)
	case len(args) == 1 && args[0] == "programs":
		_, err := cluster.PreparePrograms(ctx)
		return err
	case len(args) > 0 && args[0] == "measure":
		return measured(ctx, args[1:])
	}
	return errors.New("usage: play up [iptables|nftables] | down | programs | measure [FLAGS]")
}

const story = `%d nodes are ready, with ebpf-cni from tools/deploy/ebpf-cni.yaml.

kubeconfig  %s
            The API server's address is one on the cluster's own network; these go there:
kubectl     %s get pods -A
on a node   %s node-1 ebpfctl status
logs        %s/node-1/log
images      %s (imagePullPolicy: Never)
outside     %s answers HTTP on port 8080
end it      make cluster-down
`

func up(ctx context.Context, kubeProxy string) (err error) {
	if kept := cluster.Kept(); kept != "" {
		return fmt.Errorf("a cluster is there already, in %s: make cluster-down ends it", kept)
	}
	c, err := cluster.New(ctx, cluster.Options{Keep: true, KubeProxy: kubeProxy})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close(ctx))
		}
	}()
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.InstallDNS(ctx); err != nil {
		return err
	}
	kubectl, on, err := c.WriteScripts()
	if err != nil {
		return err
	}
	fmt.Printf(story, len(c.Nodes), c.Kubeconfig, kubectl, on, c.Dir, cluster.AgnhostImage, cluster.WorldAddr)
	return nil
}
