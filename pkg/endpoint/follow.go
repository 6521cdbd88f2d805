package endpoint

import (
	"context"
	"errors"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// What runs after our ADD, such as the plugin tuning, may give the pod's interface another Ethernet address. The pod's
// kernel drops what is sent to the old one. Nobody tells the host: it sees the new address at the agent's next look or at
// a CHECK.

// ChangedMAC is the Ethernet address that the pod's interface has instead of PodMAC, as the host sees it through Link; false: it
// has none other, or that can't be seen. The address of a port of a bridge in the pod, which a virtual machine has behind it,
// is not the pod's.
func (w *Work) ChangedMAC() (mac wire.MAC, changed bool) {
	pod, err := w.Host.Peer(w.Link)
	if err != nil || pod.Name != w.IfName || !pod.Up() || pod.Master != 0 || len(pod.MAC) != len(mac) {
		return mac, false
	}
	mac = wire.MAC(pod.MAC)
	return mac, mac != w.PodMAC
}

// Follow sends packets for the pod to another Ethernet address from now on. The caller holds the endpoint's lock. After an error
// part of it may be done; the agent's repair does the rest.
func (w *Work) Follow(ctx context.Context, mac wire.MAC) error {
	w.ctx, w.PodMAC, w.MACChanged = ctx, mac, true
	if err := Write(w.StateDir, w.Endpoint); err != nil {
		return err
	}
	return errors.Join(w.writeDevice(), w.writeNeighbours(), w.writeEntries())
}
