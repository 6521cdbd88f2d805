package e2e

import (
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// ipHeader is what tests read of an IP header of either family.
type ipHeader struct {
	source, destination netip.Addr
	hops, class         uint8
	dontFragment        bool // IPv6 has no other way
	payload             []byte
}

// ipHeaderOf reads a layer; false for one of another kind.
func ipHeaderOf(layer gopacket.Layer) (h ipHeader, ok bool) {
	switch l := layer.(type) {
	case *layers.IPv4:
		h = ipHeader{hops: l.TTL, class: l.TOS, dontFragment: l.Flags&layers.IPv4DontFragment != 0, payload: l.Payload}
	case *layers.IPv6:
		h = ipHeader{hops: l.HopLimit, class: l.TrafficClass, dontFragment: true, payload: l.Payload}
	default:
		return h, false
	}
	from, to := layer.(gopacket.NetworkLayer).NetworkFlow().Endpoints()
	h.source, _ = netip.AddrFromSlice(from.Raw())
	h.destination, _ = netip.AddrFromSlice(to.Raw())
	return h, true
}
