// Command flanneld-etcd is flannel's daemon for the tests, with etcd for its registry. It is apart from flanneld so that those who
// need no Kubernetes compile none.
package main

import (
	"context"
	"flag"
	"strings"

	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/subnet/etcd"

	"github.com/ebpf-cni/ebpf-cni/test/cluster/flannel/flanneld/daemon"
)

// renewMargin is when a lease is renewed: that many minutes before it runs out.
const renewMargin = 60

func main() {
	endpoints := flag.String("etcd-endpoints", "http://127.0.0.1:2379", "`URL`s, separated by commas")
	prefix := flag.String("etcd-prefix", "/coreos.com/network", "`path` of the network's keys")
	file := flag.String("subnet-file", daemon.SubnetFile, "`file` to write what is leased to")
	flag.Parse()
	daemon.Main(*file, func(ctx context.Context) (subnet.Manager, error) {
		config := &etcd.EtcdConfig{Endpoints: strings.Split(*endpoints, ","), Prefix: *prefix}
		return etcd.NewLocalManager(ctx, config, ip.IP4Net{}, ip.IP6Net{}, renewMargin)
	})
}
