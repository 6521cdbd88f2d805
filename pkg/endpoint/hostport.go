package endpoint

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

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
var HostPortProtocols = map[string]wire.Protocol{"tcp": wire.TCP, "udp": wire.UDP, "sctp": unix.IPPROTO_SCTP}

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

// HostPorts finds among host ports of one pod, which may be thousands, those that another one meets: of the same port, at
// an address that both have.
type HostPorts struct {
	at map[hostports.Key]HostPort
	// of has, by the key of all addresses, those of a port: of each that leads to the same port of the pod the first, and
	// no more than two.
	of map[hostports.Key][]HostPort
}

// NewHostPorts is of these.
func NewHostPorts(all ...HostPort) HostPorts {
	p := HostPorts{make(map[hostports.Key]HostPort, len(all)), make(map[hostports.Key][]HostPort, len(all))}
	for _, h := range all {
		p.Add(h)
	}
	return p
}

// Add adds another one.
func (p HostPorts) Add(h HostPort) {
	key, port := h.Key(), h.Key().Everywhere()
	p.at[key] = h
	if of := p.of[port]; len(of) == 0 || len(of) == 1 && of[0].PodPort != h.PodPort {
		p.of[port] = append(of, h)
	}
}

// Has reports whether it is one of them.
func (p HostPorts) Has(h HostPort) bool { return p.at[h.Key()] == h }

// Meeting are those that one with this key meets: none, or as many as tell whether all lead to the same port of the pod.
func (p HostPorts) Meeting(key hostports.Key) (met []HostPort) {
	if key == key.Everywhere() {
		return p.of[key]
	}
	for _, k := range []hostports.Key{key, key.Everywhere()} {
		if h, there := p.at[k]; there {
			met = append(met, h)
		}
	}
	return met
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
