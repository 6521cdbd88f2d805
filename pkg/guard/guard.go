// Package guard lists the TCP ports of a node that belong to the node's own processes. No pod gets such a port as a host port,
// and no Service by an external address that the node has.
package guard

import "net/netip"

// Port is a TCP port of the node that is the node's own.
type Port struct {
	// Address is the address of the node at which the port is guarded; invalid: all addresses.
	Address netip.Addr `json:"address"`
	Number  uint16     `json:"port"`
	// Owner is the server that answers there, in words.
	Owner string `json:"owner"`
}

// Ports is a list of guarded ports.
type Ports []Port

// Fixed are the ports that every node guards, with or without an agent.
func Fixed() Ports {
	return Ports{
		{Number: 10250, Owner: "the kubelet"},
		{Number: 10256, Owner: "the node's health checks (kube-proxy's, or the agent's in its place)"},
		{Number: 10249, Owner: "kube-proxy's metrics, or the agent's in their place"},
		{Number: 9965, Owner: "the agent of ebpf-cni"},
	}
}

// Find returns the guarded port that a TCP port at an address meets. The unspecified address stands for all addresses of a family.
func (all Ports) Find(address netip.Addr, port uint16) (Port, bool) {
	for _, p := range all {
		if p.Number == port && p.meets(address) {
			return p, true
		}
	}
	return Port{}, false
}

func (p Port) meets(address netip.Addr) bool {
	if !p.Address.IsValid() || p.Address == address {
		return true
	}
	return address.IsUnspecified() && address.Is4() == p.Address.Is4()
}
