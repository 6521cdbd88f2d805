package endpoint

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// passListeners fails with a *HostPortTakenError when a socket of the node has a host port that ADD asks for. The programs see no SCTP
// sockets, and such sockets keep nothing from a pod.
func (w *Work) passListeners(frontends *services.Map) error {
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
		all, err := device.Listeners(byte(HostPortProtocols[name]))
		if errors.Is(err, device.ErrNoSocketDiag) { // the kernel is the administrator's choice, and pods must start on it
			w.log().Warn("sockets of the node that have a host port can't be found", "protocol", name, "error", err)
			continue
		}
		if err != nil {
			return err
		}
		for _, l := range all {
			for _, h := range asked[l.At.Port()] {
				has, err := w.hasPort(l, h, frontends)
				if err != nil {
					return err
				}
				if has {
					return &HostPortTakenError{HostPort: h, Holder: socketName(l, name)}
				}
			}
		}
	}
	return nil
}

// hasPort reports whether a listener has a host port of the same number and protocol.
func (w *Work) hasPort(l device.Listener, h HostPort, frontends *services.Map) (bool, error) {
	at := l.At.Addr()
	family := wire.FamilyOf(h.Address)
	switch {
	case at.IsUnspecified():
		return wire.FamilyOf(at) == family || l.Both, nil
	case wire.FamilyOf(at) != family:
		return false, nil
	case h.Address == at:
		return true, nil
	case !h.Address.IsUnspecified():
		return false, nil
	}
	return isOwn(at, frontends)
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
