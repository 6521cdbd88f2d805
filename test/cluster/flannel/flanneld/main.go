// Command flanneld is flannel's daemon for the tests: flannel's own packages, put together as its main does with
// --ip-masq --kube-subnet-mgr. Its main itself needs cgo and a cloud's library for backends that no test has.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/hostgw" // registers itself
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"  // registers itself
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/subnet/kube"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
)

// What flanneld takes for granted.
const (
	annotations = "flannel.alpha.coreos.com"
	netConf     = "/etc/kube-flannel/net-conf.json"
	subnetFile  = "/run/flannel/subnet.env"
	resync      = 5 // seconds
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "flanneld:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	leases, err := kube.NewSubnetManager(ctx, "", "", annotations, netConf, true)
	if err != nil {
		return err
	}
	config, err := leases.GetNetworkConfig(ctx)
	if err != nil {
		return err
	}
	family, err := ipmatch.GetIPFamily(config.EnableIPv4, config.EnableIPv6)
	if err != nil {
		return err
	}
	uplink, err := ipmatch.LookupExtIface("", "", "", family, ipmatch.PublicIPOpts{})
	if err != nil {
		return err
	}
	network, err := register(ctx, leases, config, uplink)
	if err != nil {
		return err
	}
	if err := writeRules(ctx, config, network); err != nil {
		return err
	}
	lease := network.Lease()
	if err := leases.HandleSubnetFile(subnetFile, config, true, lease.Subnet, lease.IPv6Subnet, network.MTU()); err != nil {
		return err
	}
	var group sync.WaitGroup
	group.Go(func() { network.Run(ctx) })
	defer group.Wait()
	return leases.CompleteLease(ctx, lease, &group)
}

func register(ctx context.Context, leases subnet.Manager, config *subnet.Config, uplink *backend.ExternalInterface) (backend.Network, error) {
	chosen, err := backend.NewManager(ctx, leases, uplink).GetBackend(config.BackendType)
	if err != nil {
		return nil, err
	}
	return chosen.RegisterNetwork(ctx, &sync.WaitGroup{}, config)
}

func writeRules(ctx context.Context, config *subnet.Config, network backend.Network) error {
	rules := &iptables.IPTablesManager{}
	if err := rules.Init(ctx); err != nil {
		return err
	}
	err := rules.SetupAndEnsureMasqRules(ctx, config.Network, ip.IP4Net{}, ip.IP4Net{}, ip.IP6Net{}, ip.IP6Net{}, ip.IP6Net{},
		network.Lease(), resync, false)
	rules.SetupAndEnsureForwardRules(ctx, config.Network, ip.IP6Net{}, resync)
	return err
}
