// Command flanneld is flannel's daemon for the tests, with Kubernetes for its registry: --kube-subnet-mgr.
package main

import (
	"context"

	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/subnet/kube"

	"github.com/ebpf-cni/ebpf-cni/test/cluster/flannel/flanneld/daemon"
)

// What flanneld takes for granted.
const (
	annotations = "flannel.alpha.coreos.com"
	netConf     = "/etc/kube-flannel/net-conf.json"
)

func main() {
	daemon.Main(daemon.SubnetFile, func(ctx context.Context) (subnet.Manager, error) {
		return kube.NewSubnetManager(ctx, "", "", annotations, netConf, true)
	})
}
