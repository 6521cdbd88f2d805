package lease

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Kind is a backend as flannel names it: how packets get from node to node.
type Kind string

// The backends that are served, and that of flannel's where none is named.
const (
	HostGW Kind = "host-gw"
	VXLAN  Kind = "vxlan"
	udp    Kind = "udp"
)

// Backend says how packets get from node to node.
type Backend struct {
	Kind Kind
	// Absent says that the network names none.
	Absent bool
	// VNI and Port are those of the tunnel.
	VNI  uint32
	Port uint16
	// Direct says that nodes on one link have no need of the tunnel.
	Direct bool
	// MTU is the underlay's, in bytes of IP packet; 0: as found.
	MTU int
}

// The tunnel's, where the network does not say: the number of flannel's, and the port of Linux before there was one of IANA's.
const (
	usualVNI  = 1
	usualPort = 8472
)

// leastUnderlay is less than any underlay that carries IP.
const leastUnderlay = 576

// parseBackend reads the value Backend; none at all: flannel means udp.
func parseBackend(text json.RawMessage) (Backend, error) {
	w := struct {
		Type               Kind
		VNI, Port, MTU     int
		GBP, DirectRouting bool
	}{VNI: usualVNI}
	if len(text) == 0 {
		return Backend{Kind: VXLAN, Absent: true, VNI: usualVNI, Port: usualPort}, nil
	}
	if err := unmarshal(text, &w); err != nil {
		return Backend{}, fmt.Errorf("Backend: %w", err)
	}
	switch {
	case w.Type != HostGW && w.Type != VXLAN:
		return Backend{}, fmt.Errorf("Backend: Type: %q is not served here; %s or %s", w.Type, VXLAN, HostGW)
	case w.Type == HostGW:
		return Backend{Kind: HostGW, VNI: usualVNI, Port: usualPort}, nil
	case w.VNI < 1 || w.VNI >= 1<<24:
		return Backend{}, fmt.Errorf("Backend: VNI: is %d; from 1 to %d", w.VNI, 1<<24-1)
	case w.Port < 0 || w.Port >= 1<<16:
		return Backend{}, fmt.Errorf("Backend: Port: is %d; at most %d", w.Port, 1<<16-1)
	case w.MTU != 0 && (w.MTU < leastUnderlay || w.MTU >= 1<<16):
		return Backend{}, fmt.Errorf("Backend: MTU: is %d; from %d to %d", w.MTU, leastUnderlay, 1<<16-1)
	case w.GBP:
		return Backend{}, errors.New("Backend: GBP: group policies of VXLAN are not served here")
	}
	b := Backend{Kind: VXLAN, VNI: uint32(w.VNI), Port: uint16(w.Port), Direct: w.DirectRouting, MTU: w.MTU}
	if b.Port == 0 {
		b.Port = usualPort
	}
	return b, nil
}
