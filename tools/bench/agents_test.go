package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
)

// A probe is known by its number, and its sender seen, whether it comes as it is or in a tunnel; nothing else is taken for one.
func TestProbed(t *testing.T) {
	node, pod := netip.MustParseAddr("172.18.0.11"), netip.MustParseAddr("10.244.0.2")
	udp := func(port uint16, payload ...byte) []byte {
		header := binary.BigEndian.AppendUint16([]byte{0, 9}, port)
		return append(append(header, 0, 0, 0, 0), payload...)
	}
	plain := udp(probePort, binary.BigEndian.AppendUint64(nil, 7)...)
	ipv4 := append(make([]byte, 12), 10, 244, 0, 2, 10, 193, 0, 2)
	inTunnel := udp(tunnelPort, append(append(make([]byte, 8+14), ipv4...), plain...)...)
	for name, c := range map[string]struct {
		datagram []byte
		source   netip.Addr
		tunnel   bool
		number   uint64
	}{
		"plain":            {plain, node, false, 7},
		"in a tunnel":      {inTunnel, pod, true, 7},
		"cut in a tunnel":  {inTunnel[:len(inTunnel)-1], pod, true, 0},
		"an empty tunnel":  {udp(tunnelPort), node, false, 0},
		"another datagram": {udp(53, 1, 2, 3), node, false, 0},
		"nothing":          {nil, node, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			source, tunnel, number := probed(&net.IPAddr{IP: node.AsSlice()}, c.datagram)
			if source != c.source || tunnel != c.tunnel || number != c.number {
				t.Errorf("number %d from %s, in a tunnel: %v; want %d, %s, %v", number, source, tunnel, c.number, c.source, c.tunnel)
			}
		})
	}
}
