package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/cilium/ebpf"

	mapconfig "github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// errNoDataplane is returned (wrapped) when the agent has not pinned a dataplane that this plugin can use.
var errNoDataplane = errors.New("the dataplane is not ready (is the agent running?)")

// dataplane is what the agent has pinned and a pod needs.
type dataplane struct {
	node         mapconfig.Value
	endpoints    *endpoints.Map
	devices      *devices.Map
	destinations *destinations.Map
	fromPod      *ebpf.Program
}

// openDataplane opens the pins. The caller holds the node's lock: an upgrade may have changed the layout before.
func openDataplane(pins bpffs.Dir) (d *dataplane, err error) {
	d = &dataplane{}
	defer func() {
		if err != nil {
			d.close()
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errNoDataplane, err)
		}
	}()
	if err = d.readConfig(pins); err != nil {
		return d, err
	}
	if d.endpoints, err = endpoints.Open(pins.Map(endpoints.Name)); err != nil {
		return d, err
	}
	if d.devices, err = devices.Open(pins.Map(devices.Name)); err != nil {
		return d, err
	}
	if d.destinations, err = destinations.Open(pins.Map(destinations.Name)); err != nil {
		return d, err
	}
	path := pins.Program(attach.FromPod.Program())
	if d.fromPod, err = ebpf.LoadPinnedProgram(path, nil); err != nil {
		return d, fmt.Errorf("open pinned program %s: %w", path, err)
	}
	return d, nil
}

func (d *dataplane) readConfig(pins bpffs.Dir) error {
	path := pins.Map(mapconfig.Name)
	m, err := mapconfig.Open(path)
	if err != nil {
		return err
	}
	defer m.Close()
	if d.node, err = m.Get(mapconfig.Key{}); err != nil { // of another size: another layout
		return fmt.Errorf("%w: %w", errNoDataplane, err)
	}
	if d.node.Layout != wire.LayoutVersion {
		return fmt.Errorf("%w: the maps below %s have layout %d, this plugin writes layout %d",
			errNoDataplane, pins.Maps(), d.node.Layout, wire.LayoutVersion)
	}
	return nil
}

func (d *dataplane) close() {
	if d.endpoints != nil {
		d.endpoints.Close()
	}
	if d.devices != nil {
		d.devices.Close()
	}
	if d.destinations != nil {
		d.destinations.Close()
	}
	if d.fromPod != nil {
		d.fromPod.Close()
	}
}

// leadsTo says whether an address leads to the link. A complete endpoint has such an entry.
func (d *dataplane) leadsTo(index int) (bool, error) {
	for e, err := range d.endpoints.All() {
		if err != nil || int(e.Value.Ifindex) == index {
			return err == nil, err
		}
	}
	return false, nil
}

// inPodCIDR says whether the node's podCIDRs lead to the address already.
func (d *dataplane) inPodCIDR(a netip.Addr) bool {
	for _, p := range d.node.PodCIDRs() {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// nodeAddress is this node's address of a's family, invalid where there is none.
func (d *dataplane) nodeAddress(a netip.Addr) netip.Addr {
	if a.Is4() {
		return d.node.NodeIPv4.Netip()
	}
	return d.node.NodeIPv6.Netip()
}
