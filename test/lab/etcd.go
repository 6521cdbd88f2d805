package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

// EtcdAddr is where agents and others find the lab's etcd-server.
var EtcdAddr = netip.MustParseAddrPort("172.18.0.2:2379")

// StartEtcd adds a host to the fabric on which a real etcd-server runs, until the lab ends: also that of a lab that is kept.
func (l *Lab) StartEtcd(ctx context.Context) (*etcd.Process, error) {
	host, err := l.NewHost("etcd", EtcdAddr.Addr())
	if err != nil {
		return nil, err
	}
	if err := l.joinFabric(host, 0, "etcd", Uplink, host.addrs...); err != nil {
		return nil, err
	}
	if err := host.AddRoute(everywhere[wire.IPv4], GatewayAddr[wire.IPv4], ""); err != nil {
		return nil, err
	}
	dir := filepath.Join(l.Dir, "etcd")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make etcd's directory: %w", err)
	}
	server := etcd.New(dir, EtcdAddr, host.Do)
	server.Stays = true
	return server, server.Start(ctx)
}
