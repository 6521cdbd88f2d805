package endpoint

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// HostPort is a port of the node that leads to one of the pod.
type HostPort struct {
	// Address is the node's, or the unspecified one for all of its family.
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
	// Protocol is one of HostPortProtocols.
	Protocol string `json:"protocol"`
	PodPort  uint16 `json:"pod_port"`
}

// HostPortProtocols are the protocols of host ports, by name.
var HostPortProtocols = map[string]wire.Protocol{"tcp": wire.TCP, "udp": wire.UDP, "sctp": 132}

// Key is the host port's key in the map hostports.
func (h HostPort) Key() hostports.Key {
	return hostports.KeyFrom(h.Address, h.Port, HostPortProtocols[h.Protocol])
}

// String is such as "host port 8080/tcp of 192.0.2.1".
func (h HostPort) String() string {
	where := h.Address.String()
	if h.Address.IsUnspecified() {
		where = "all " + wire.FamilyOf(h.Address).Name() + " addresses"
	}
	return fmt.Sprintf("host port %d/%s of %s", h.Port, h.Protocol, where)
}

func (h HostPort) validate() error {
	switch {
	case !h.Address.IsValid() || h.Address.Zone() != "":
		return fmt.Errorf("address %q of a host port is not an address", h.Address)
	case h.Port == 0 || h.PodPort == 0:
		return errors.New("a host port has no port")
	case HostPortProtocols[h.Protocol] == 0:
		return fmt.Errorf("protocol %q of a host port is none", h.Protocol)
	}
	return nil
}

// HostPortEntry is the host port's value in the map hostports.
func (e Endpoint) HostPortEntry(h HostPort) hostports.Value {
	return hostports.Value{
		PodAddress: wire.AddressesFrom(e.Addresses...)[wire.FamilyOf(h.Address)],
		PodPort:    wire.PortFrom(h.PodPort), Ifindex: uint32(e.HostIndex),
	}
}
