package modes

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// The addresses of the whole cluster. They are one network (flannel's Network, kube-proxy's --cluster-cidr), wide enough
// for the podCIDRs of maxNodes nodes.
var (
	clusterCIDR = netip.MustParsePrefix("10.192.0.0/10")
	serviceCIDR = netip.MustParsePrefix("10.96.0.0/12")
)

const maxNodes = 10_000

// aFarNode is a node that exists in lists, tables and maps only. Its address is on the fabric's link, where nobody has it.
type aFarNode struct {
	name    string
	addr    netip.Addr
	podCIDR netip.Prefix
}

// farNode is number i, from 0.
func farNode(i int) aFarNode {
	return aFarNode{
		name:    fmt.Sprintf("far-%d", i),
		addr:    netip.AddrFrom4([4]byte{172, 18, byte(1 + i/250), byte(1 + i%250)}),
		podCIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(192 + i/256), byte(i), 0}), 24),
	}
}

// FarNodes adds nodes that do not exist, until there are k.
func FarNodes(specs []lab.NodeSpec, k int) []lab.NodeSpec {
	for i := range k - len(specs) {
		node := farNode(i)
		specs = append(specs, lab.NodeSpec{Name: node.name, InternalIPs: []netip.Addr{node.addr}, PodCIDRs: []netip.Prefix{node.podCIDR}})
	}
	return specs
}

// service is a Service with one ready endpoint. What a packet that is for none of them costs does not depend on the
// number of endpoints.
type service struct {
	name              string // namespace/name
	cluster, endpoint netip.Addr
}

const (
	servicePort  = 80
	endpointPort = 8080
)

// services are k of them; their endpoints are on far nodes.
func services(k int) []service {
	plus := func(a netip.Addr, n int) netip.Addr {
		raw := a.As4()
		binary.BigEndian.PutUint32(raw[:], binary.BigEndian.Uint32(raw[:])+uint32(n))
		return netip.AddrFrom4(raw)
	}
	all := make([]service, k)
	for i := range all {
		all[i] = service{fmt.Sprintf("default/service-%d", i), plus(serviceCIDR.Addr(), i+10), plus(clusterCIDR.Addr(), i+10)}
	}
	return all
}
