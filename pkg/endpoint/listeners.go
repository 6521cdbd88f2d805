package endpoint

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// passListeners fails with a *HostPortTakenError when a socket of the node has a host port that ADD asks for. The programs see no SCTP
// sockets, and such sockets keep nothing from a pod.
func (w *Work) passListeners(frontends *services.Map, list func(protocol byte) ([]device.Listener, error)) error {
	clients := sync.OnceValue(func() clientPorts { return readClientPorts(w.Sysctl) })
	for _, name := range []string{"tcp", "udp"} {
		asked := map[uint16][]HostPort{}
		for _, h := range w.HostPorts {
			if h.Protocol == name {
				asked[h.Port] = append(asked[h.Port], h)
			}
		}
		if len(asked) == 0 {
			continue
		}
		all, err := list(byte(HostPortProtocols[name]))
		if err != nil { // the kernel and what it allows are the administrator's choice, and pods must start on it
			w.log().Warn("the node's sockets can't be listed, so none keeps a host port from a pod", "protocol", name, "error", err)
			continue
		}
		for _, l := range all {
			for _, h := range asked[l.At.Port()] {
				has, err := hasPort(l, h, frontends)
				if err != nil {
					return err
				}
				if has && (name == "tcp" || !isClient(l, clients())) {
					return &HostPortTakenError{HostPort: h, Holder: socketName(l, name)}
				}
			}
		}
	}
	return nil
}

// hasPort reports whether a listener has a host port of the same number and protocol.
func hasPort(l device.Listener, h HostPort, frontends *services.Map) (bool, error) {
	at := l.At.Addr()
	family := wire.FamilyOf(h.Address)
	switch {
	case l.Ifindex != 0: // who comes in elsewhere never reaches it
		return false, nil
	case at.IsUnspecified():
		return wire.FamilyOf(at) == family || l.Both, nil
	case wire.FamilyOf(at) != family:
		return false, nil
	case h.Address == at:
		return true, nil
	case !h.Address.IsUnspecified() || !isPersons(l.UID):
		return false, nil
	}
	return isOwn(at, frontends)
}

// isPersons reports whether a user is a person, by the usual ranges (login.defs, systemd): neither root nor a system's user, of which
// those from 60001 are made while a daemon runs, and 65534 is nobody. A daemon on one address, such as a resolver, a virtual network's DNS
// or a load balancer, goes on to have that address, and the pod the others: the more specific one has it. A person could take an
// address of the pod's port on purpose.
func isPersons(uid uint32) bool {
	return uid >= 1000 && (uid <= 60000 || uid > 65535)
}

// clientPorts are the ports that the kernel gives to sockets that ask for any.
type clientPorts struct {
	low, high uint16
	reserved  string
}

// readClientPorts returns none where they can't be read.
func readClientPorts(sysctl device.Sysctl) (c clientPorts) {
	text, err := sysctl.Get("net/ipv4/ip_local_port_range")
	if err != nil {
		return clientPorts{}
	}
	if n, err := fmt.Sscan(text, &c.low, &c.high); n != 2 || err != nil {
		return clientPorts{}
	}
	if c.reserved, err = sysctl.Get("net/ipv4/ip_local_reserved_ports"); err != nil {
		return clientPorts{}
	}
	return c
}

// has reports whether the kernel gives a port to such a socket.
func (c clientPorts) has(port uint16) bool {
	if port == 0 || port < c.low || port > c.high {
		return false
	}
	for part := range strings.SplitSeq(c.reserved, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		low, err1 := strconv.ParseUint(first, 10, 16)
		high, err2 := strconv.ParseUint(last, 10, 16)
		if err1 == nil && err2 == nil && uint64(port) >= low && uint64(port) <= high {
			return false
		}
	}
	return true
}

// isClient reports whether a UDP socket is likely to be a daemon's that asks others, such as a resolver's: the kernel has chosen its port.
// A pod with thousands of ports would meet one each time.
func isClient(l device.Listener, c clientPorts) bool {
	return l.At.Addr().IsUnspecified() && !isPersons(l.UID) && c.has(l.At.Port())
}

// isOwn reports whether host ports of all addresses answer to others at an address of the node. A resolver's cache on loopback, on an
// address of a link or on a ClusterIP keeps no host port from a pod.
func isOwn(a netip.Addr, frontends *services.Map) (bool, error) {
	if a.IsLoopback() || a.IsLinkLocalUnicast() {
		return false, nil
	}
	if frontends == nil {
		return true, nil
	}
	v, err := lookUp(frontends, services.Key{Address: wire.AddrFrom(a)})
	return v.Flags&(services.Own|services.ClusterIP) == services.Own, err
}

// socketName describes a listener for operators.
func socketName(l device.Listener, protocol string) string {
	return fmt.Sprintf("a %s socket of the node at %s, of the user with the number %d", protocol, l.At, l.UID)
}
