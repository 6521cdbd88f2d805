package modes

import (
	"fmt"
	"net"
	"net/netip"
)

// The addresses of the whole cluster. They are one network (flannel's Network, kube-proxy's --cluster-cidr), wide enough
// for the podCIDRs of maxNodes nodes.
var (
	clusterCIDR = netip.MustParsePrefix("10.192.0.0/10")
	serviceCIDR = netip.MustParsePrefix("10.96.0.0/12")
)

const (
	maxNodes    = 10_000
	maxServices = 50_000
)

// aFarNode is a node that exists in lists, tables and maps only. Its address is on the fabric's link, where nobody has it.
type aFarNode struct {
	name    string
	addr    netip.Addr
	podCIDR netip.Prefix
	// vtep is the Ethernet address of its VXLAN device.
	vtep net.HardwareAddr
}

// farNode is number i, from 0.
func farNode(i int) aFarNode {
	return aFarNode{
		name:    fmt.Sprintf("far-%d", i),
		addr:    netip.AddrFrom4([4]byte{172, 18, byte(1 + i/250), byte(1 + i%250)}),
		podCIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(192 + i/256), byte(i), 0}), 24),
		vtep:    net.HardwareAddr{0x0e, 0, 0, 1, byte(i >> 8), byte(i)},
	}
}
