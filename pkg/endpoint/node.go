package endpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// ErrNoDataplane is returned (wrapped) when the agent has not pinned a dataplane that this build can use.
var ErrNoDataplane = errors.New("the dataplane is not ready (is the agent running?)")

// Node is the host side of endpoints, in the network namespace of the calling goroutine's thread.
type Node struct {
	Releaser
	Host *device.Handle
	Tables
	// Config is the agent's record of this node.
	Config config.Value
	// Sources are the source addresses of the host's own packets to pods; zero: the kernel's choice.
	Sources wire.Addresses
	// Programs attaches programs to pods' links.
	Programs Programs
	Sysctl   device.Sysctl

	pins []io.Closer
}

// Programs attaches programs to links.
type Programs interface {
	Attach(ifindex int, hook attach.Hook) error
	Attached(ifindex int, hook attach.Hook) (bool, error)
}

// Tables are the maps that have entries of endpoints. A nil one is not pinned.
type Tables struct {
	Endpoints    *endpoints.Map
	Devices      *devices.Map
	Destinations *destinations.Map
	// HostPorts is not pinned by agents of earlier versions.
	HostPorts *hostports.Map
}

// Open opens the host's network; Ready opens the rest.
func (r Releaser) Open() (n *Node, err error) {
	n = &Node{Releaser: r}
	n.Host, err = device.Open()
	return n, err
}

// Close closes what Open and Ready have opened.
func (n *Node) Close() {
	n.closePins()
	if n.Host != nil {
		n.Host.Close()
	}
}

// Ready opens the pins that an endpoint needs, again if they are open, since an upgrade may have replaced them. The
// caller holds the node's lock. The error matches ErrNoDataplane when they are not there.
func (n *Node) Ready(mode attach.Mode) error {
	n.closePins()
	err := n.readConfig()
	if err == nil {
		err = n.openTables(true)
	}
	if err == nil {
		err = n.openPrograms(mode)
	}
	return noDataplane(err)
}

// noDataplane is ErrNoDataplane for a pin that is not there.
func noDataplane(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrNoDataplane, err)
	}
	return err
}

func (n *Node) readConfig() error {
	m, err := config.Open(n.Pins.Map(config.Name))
	if err != nil {
		return err
	}
	defer m.Close()
	if n.Config, err = m.Get(config.Key{}); err != nil { // the record has another size
		return fmt.Errorf("%w: %w", ErrNoDataplane, err)
	}
	if n.Config.Layout != wire.LayoutVersion {
		return fmt.Errorf("%w: the maps below %s have layout %d, this plugin writes layout %d",
			ErrNoDataplane, n.Pins.Maps(), n.Config.Layout, wire.LayoutVersion)
	}
	n.Sources = n.Config.NodeAddresses
	return nil
}

// servesServices reports whether pods' links carry the program for what is sent to pods as well.
func (n *Node) servesServices() bool { return n.Config.Flags&config.Services != 0 }

func (n *Node) openPrograms(mode attach.Mode) error {
	programs := pinned{attach.Attacher{Dir: n.Pins, Mode: mode, New: true}, map[attach.Hook]*ebpf.Program{}}
	for _, hook := range attach.PodHooks() {
		if hook == attach.ToPod && !n.servesServices() {
			continue
		}
		path := n.Pins.Program(hook.Program())
		program, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return fmt.Errorf("open pinned program %s: %w", path, err)
		}
		n.pins = append(n.pins, program)
		programs.programs[hook] = program
	}
	n.Programs = programs
	return nil
}

// pinned attaches the programs that the agent has pinned to links that have just been made.
type pinned struct {
	attacher attach.Attacher
	programs map[attach.Hook]*ebpf.Program
}

func (p pinned) Attach(ifindex int, hook attach.Hook) error {
	_, err := p.attacher.Attach(ifindex, hook, p.programs[hook])
	return err
}

func (p pinned) Attached(ifindex int, hook attach.Hook) (bool, error) {
	s, err := p.attacher.Attached(ifindex, hook)
	return s.Mode != "", err
}

// openTables opens the maps: all that every endpoint needs, or those that are pinned.
func (n *Node) openTables(all bool) error {
	return errors.Join(
		openMap(n, &n.Endpoints, endpoints.Open, n.Pins.Map(endpoints.Name), all),
		openMap(n, &n.Devices, devices.Open, n.Pins.Map(devices.Name), all),
		openMap(n, &n.Destinations, destinations.Open, n.Pins.Map(destinations.Name), all),
		openMap(n, &n.Tables.HostPorts, hostports.Open, n.Pins.Map(hostports.Name), false),
	)
}

func openMap[K comparable, V any](n *Node, into **typed.Map[K, V], open func(string) (*typed.Map[K, V], error), path string, must bool) error {
	m, err := open(path)
	switch {
	case err == nil:
		*into, n.pins = m, append(n.pins, m)
	case !must && errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

// lookUp returns an entry, the zero value where there is none.
func lookUp[K comparable, V any](m *typed.Map[K, V], key K) (V, error) {
	if m == nil {
		return *new(V), nil
	}
	v, err := m.Get(key)
	if errors.Is(err, typed.ErrKeyNotExist) {
		return *new(V), nil
	}
	return v, err
}

func (n *Node) closePins() {
	for _, p := range n.pins {
		p.Close()
	}
	n.Tables, n.pins = Tables{}, nil
}

// ByLink returns the addresses of the endpoints map by the link that they lead to.
func (t Tables) ByLink() (map[int][]netip.Addr, error) {
	found := map[int][]netip.Addr{}
	if t.Endpoints == nil {
		return found, nil
	}
	for e, err := range t.Endpoints.All() {
		if err != nil {
			return nil, err
		}
		index := int(e.Value.Ifindex)
		found[index] = append(found[index], e.Key.Address.Netip())
	}
	return found, nil
}
