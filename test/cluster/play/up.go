package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

const story = `%d nodes are ready, with ebpf-cni from %s.

kubeconfig  %s
            The API server's address is one on the cluster's own network; these go there:
kubectl     %s get pods -A
on a node   %s node-1 ebpfctl status
logs        %s/node-1/log
images      %s (imagePullPolicy: Never)
outside     %s answers HTTP on port 8080
end it      make cluster-down
`

// upOptions are the cluster that the arguments ask for, and the routing mode of its agents.
func upOptions(args []string) (o cluster.Options, mode string, err error) {
	flags := flag.NewFlagSet("up", flag.ContinueOnError)
	family := flags.String("family", "ipv4", "the addresses of nodes, pods and Services: ipv4, ipv6 or dual")
	flags.StringVar(&mode, "mode", "auto", "routing mode of the agents: auto, direct or vxlan")
	flags.StringVar(&o.KubeProxy, "proxy", cluster.IPTables, "mode of kube-proxy: iptables or nftables; none: there is none, and the agents serve Services")
	if err := flags.Parse(args); err != nil {
		return o, "", err
	}
	o.Keep, o.Families = true, cluster.FamilyChoices[*family]
	switch {
	case flags.NArg() > 0:
		err = fmt.Errorf("up: unexpected argument %q", flags.Arg(0))
	case o.Families == nil:
		err = fmt.Errorf("up: family %q: takes ipv4, ipv6 or dual", *family)
	case !slices.Contains([]string{"auto", "direct", "vxlan"}, mode):
		err = fmt.Errorf("up: mode %q: takes auto, direct or vxlan", mode)
	case !slices.Contains([]string{cluster.IPTables, cluster.NFTables, cluster.NoProxy}, o.KubeProxy):
		err = fmt.Errorf("up: proxy %q: takes iptables, nftables or none", o.KubeProxy)
	}
	return o, mode, err
}

func up(ctx context.Context, args []string) (err error) {
	options, mode, err := upOptions(args)
	if err != nil {
		return err
	}
	if kept := cluster.Kept(); kept != "" {
		return fmt.Errorf("a cluster is there already, in %s: make cluster-down ends it", kept)
	}
	c, err := cluster.New(ctx, options)
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
	if mode != "auto" {
		if err := c.SetRoutingMode(ctx, mode); err != nil {
			return err
		}
	}
	if err := c.InstallDNS(ctx); err != nil {
		return err
	}
	kubectl, on, err := c.WriteScripts()
	if err != nil {
		return err
	}
	fmt.Printf(story, len(c.Nodes), source(options), c.Kubeconfig, kubectl, on, c.Dir, cluster.AgnhostImage, outside(c))
	return nil
}

// source is what the network has been installed from, and what that means for Services.
func source(options cluster.Options) string {
	if options.KubeProxy == cluster.NoProxy {
		return "tools/deploy/chart: it serves Services, without kube-proxy"
	}
	return "tools/deploy/ebpf-cni.yaml"
}

// outside are the addresses of the world, by which all families are seen.
func outside(c *cluster.Cluster) (all string) {
	for i, family := range c.Options.Families {
		if i > 0 {
			all += " and "
		}
		all += c.In(family).World().String()
	}
	return all
}
