// Package daemon is what flanneld does for the tests, whatever registry it has: flannel's own packages, put together as its main does
// with --ip-masq. That main itself needs cgo and a cloud's library for backends that no test has.
package daemon

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/hostgw" // registers itself
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"  // registers itself
	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
)

// SubnetFile is where flanneld writes what it has leased, unless it is told otherwise.
const SubnetFile = "/run/flannel/subnet.env"

const (
	resync     = 5 // seconds
	configWait = time.Second
)

// Main makes a registry's manager of subnets, and runs a daemon with it until a signal or an error ends the process.
func Main(subnetFile string, manager func(context.Context) (subnet.Manager, error)) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	leases, err := manager(ctx)
	if err == nil {
		err = run(ctx, leases, subnetFile)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "flanneld:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, leases subnet.Manager, subnetFile string) error {
	config, err := awaitConfig(ctx, leases)
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

// awaitConfig asks for the network's configuration until there is one.
func awaitConfig(ctx context.Context, leases subnet.Manager) (*subnet.Config, error) {
	for {
		config, err := leases.GetNetworkConfig(ctx)
		if err == nil {
			return config, nil
		}
		fmt.Fprintln(os.Stderr, "flanneld: wait for the configuration:", err)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(configWait):
		}
	}
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
	err := rules.SetupAndEnsureMasqRules(ctx, config.Network, ip.IP4Net{}, ip.IP4Net{}, config.IPv6Network, ip.IP6Net{}, ip.IP6Net{},
		network.Lease(), resync, false)
	rules.SetupAndEnsureForwardRules(ctx, config.Network, config.IPv6Network, resync)
	return err
}
