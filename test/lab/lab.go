package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

const (
	// Uplink is the name of every host's link to the fabric.
	Uplink = "eth0"
	// MaxNodes is as far as the addresses reach.
	MaxNodes = 200
)

// Options say what to build. The zero value is three nodes and an outside host on a fabric of MTU 1500, of IPv4 alone.
type Options struct {
	// Families are those of the pods, in the order of the Nodes' podCIDRs; default IPv4.
	Families []wire.Family
	// Underlay are the families of the hosts, in the order of the Nodes' InternalIPs; default Families.
	Underlay []wire.Family
	// Nodes is the number of nodes; default 3.
	Nodes int
	// FabricMTU is the MTU of the fabric's links; default 1500.
	FabricMTU int
	// FabricBits is the prefix length of the hosts' IPv4 addresses; a shorter one than the default has room for nodes in lists.
	FabricBits int
	// Router puts a router between the fabric and the outside host, so that packets to the outside lose a hop.
	Router bool
	// Links is the number of fabrics, 1 or 2; default 1. With 2, nodes of even number are on the second one, behind the
	// router, and it implies Router.
	Links int
	// OutsideMTU is the MTU of the link between the router and the outside host, and implies Router; default FabricMTU.
	OutsideMTU int
	// BinDir holds the three binaries; default $EBPF_CNI_BIN, else bin/ of the module that the working directory is in.
	BinDir string
	// AgentFlags are added to the command line of every agent.
	AgentFlags []string
}

func (o Options) withDefaults() (Options, error) {
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if o.FabricMTU == 0 {
		o.FabricMTU = 1500
	}
	if o.FabricBits == 0 {
		o.FabricBits = FabricPrefix[wire.IPv4].Bits()
	}
	if o.Families == nil {
		o.Families = []wire.Family{wire.IPv4}
	}
	if o.Underlay == nil {
		o.Underlay = o.Families
	}
	if err := errors.Join(checkFamilies("pods of", o.Families), checkFamilies("hosts of", o.Underlay)); err != nil {
		return o, err
	}
	if o.Links == 0 {
		o.Links = 1
	}
	if o.Links < 1 || o.Links > 2 {
		return o, fmt.Errorf("lab of %d links: want 1 or 2", o.Links)
	}
	o.Router = o.Router || o.Links == 2 || o.OutsideMTU != 0
	if o.OutsideMTU == 0 {
		o.OutsideMTU = o.FabricMTU
	}
	if o.Nodes < 0 || o.Nodes > MaxNodes {
		return o, fmt.Errorf("lab of %d nodes: want 1 to %d", o.Nodes, MaxNodes)
	}
	return o, nil
}

// families are all that the lab has, IPv4 first.
func (o Options) families() []wire.Family {
	all := slices.Concat(o.Families, o.Underlay)
	slices.Sort(all)
	return slices.Compact(all)
}

// fabricOf is the fabric that a node is on.
func (o Options) fabricOf(number int) int { return (number + 1) % o.Links }

// Lab is a cluster on this machine. Its methods and those of its nodes may be called from several goroutines.
type Lab struct {
	// ID tells this lab from others that run at the same time; it is part of every namespace's name.
	ID string
	// Dir holds all files of the lab.
	Dir string
	// Options are those that New was given, with the defaults filled in.
	Options Options
	// Nodes are in the order of their numbers.
	Nodes []*Node
	// Outside is the host that plays the internet.
	Outside *Namespace
	// Router is the hop before the outside host; nil without Options.Router.
	Router *Namespace

	fabric *Namespace
	lock   *os.File

	mu         sync.Mutex
	namespaces []*Namespace // every one that is still there
	told       told         // to the agents
}

// New sweeps what labs of dead owners have left, then builds the hosts and the links between them. No agent runs yet.
func New(ctx context.Context, opts Options) (l *Lab, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("a lab makes network namespaces: run as root")
	}
	if _, err := Sweep(); err != nil {
		return nil, fmt.Errorf("sweep what earlier labs left: %w", err)
	}
	if err := prepareNetnsDir(); err != nil {
		return nil, err
	}
	id, dir, lock, err := claim()
	if err != nil {
		return nil, err
	}
	l = &Lab{ID: id, Dir: dir, Options: opts, lock: lock}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
			l = nil
		}
	}()
	if err := l.build(ctx); err != nil {
		return l, fmt.Errorf("build lab %s: %w", id, err)
	}
	return l, l.WriteNodes(l.NodeSpecs()...)
}

func (l *Lab) build(ctx context.Context) error {
	var err error
	if l.fabric, err = l.newNamespace("fabric"); err != nil {
		return err
	}
	for i := range l.Options.Links {
		if err := l.fabric.addBridge(fabrics[i].bridge, l.Options.FabricMTU); err != nil {
			return err
		}
	}
	if err := l.buildOutside(); err != nil {
		return err
	}
	for i := range l.Options.Nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := l.buildNode(i + 1); err != nil {
			return err
		}
	}
	return l.settle(ctx)
}

// settle waits until the kernel has made every IPv6 address usable, which it does in the background. Until then a packet
// leaves with another source, and nobody hears who looks for a neighbour.
func (l *Lab) settle(ctx context.Context) error {
	if !slices.Contains(l.Options.families(), wire.IPv6) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(5*time.Second))
	defer cancel()
	for _, ns := range l.Namespaces() {
		for {
			tentative, err := ns.tentative()
			if err != nil {
				return err
			}
			if len(tentative) == 0 {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("wait for the addresses %v of %s: %w", tentative, ns.name, ctx.Err())
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}

// buildOutside makes the outside host, on the fabric or behind a router. It knows the way to the nodes and not to any
// pod, as the internet does.
func (l *Lab) buildOutside() error {
	var err error
	if l.Outside, err = l.newNamespace("outside"); err != nil {
		return err
	}
	families := l.Options.Underlay
	l.Outside.addrs = selected(OutsideAddr, families)
	if !l.Options.Router {
		if err := l.joinFabric(l.Outside, 0, "outside", Uplink, selected(GatewayAddr, families)...); err != nil {
			return err
		}
		return l.Outside.addAddresses("lo", alone, l.Outside.addrs...)
	}

	if l.Router, err = l.newNamespace("router"); err != nil {
		return err
	}
	l.Router.addrs = selected(GatewayAddr, families)
	for i, fabric := range fabrics[:l.Options.Links] {
		if err := l.joinFabric(l.Router, i, fmt.Sprintf("router%d", i), fabric.router, selected(fabric.gateway, families)...); err != nil {
			return err
		}
	}
	if err := connect(l.Router, "eth1", l.Outside, Uplink, l.Options.OutsideMTU); err != nil {
		return err
	}
	for _, family := range families {
		if err := l.route(family); err != nil {
			return err
		}
	}
	return nil
}

// alone is the prefix length of an address that has no network around it.
func alone(family wire.Family) int { return everywhere[family].Addr().BitLen() }

func outsideBits(family wire.Family) int { return outsidePrefix[family].Bits() }

// route lets the router forward a family between the fabrics and the outside host.
func (l *Lab) route(family wire.Family) error {
	if err := l.Router.addAddresses("eth1", outsideBits, RouterOutside[family]); err != nil {
		return err
	}
	if err := l.Outside.addAddresses(Uplink, outsideBits, OutsideAddr[family]); err != nil {
		return err
	}
	for _, fabric := range fabrics[:l.Options.Links] {
		if err := l.Outside.AddRoute(fabric.prefix[family], RouterOutside[family], ""); err != nil {
			return err
		}
	}
	return l.Router.WriteSysctl(Forwarding[family], "1")
}

func (l *Lab) buildNode(number int) error {
	ns, err := l.newNamespace(fmt.Sprintf("n%d", number))
	if err != nil {
		return err
	}
	spec, fabric := l.Options.defaultSpec(number), l.Options.fabricOf(number)
	ns.addrs = spec.InternalIPs
	node := &Node{
		Namespace: ns, Name: spec.Name, PodCIDRs: spec.PodCIDRs, Number: number,
		Dir: filepath.Join(l.Dir, fmt.Sprintf("n%d", number)), lab: l,
	}
	l.Nodes = append(l.Nodes, node)
	if err := l.joinFabric(ns, fabric, fmt.Sprintf("n%d", number), Uplink, ns.addrs...); err != nil {
		return err
	}
	for _, family := range l.Options.Underlay {
		if err := ns.AddRoute(everywhere[family], fabrics[fabric].gateway[family], ""); err != nil {
			return err
		}
	}
	return errors.Join(node.makeCgroup(), node.makeDirectories())
}

// joinFabric wires a link of a namespace to the bridge of a fabric, where the port carries the host's name.
func (l *Lab) joinFabric(ns *Namespace, fabric int, port, link string, addrs ...netip.Addr) error {
	if err := connect(l.fabric, port, ns, link, l.Options.FabricMTU); err != nil {
		return err
	}
	if err := l.fabric.plug(port, fabrics[fabric].bridge); err != nil {
		return err
	}
	return ns.addAddresses(link, l.fabricBits, addrs...)
}

func (l *Lab) fabricBits(family wire.Family) int {
	if family == wire.IPv4 {
		return l.Options.FabricBits
	}
	return FabricPrefix[family].Bits()
}

// NewHost makes one more host, that nothing joins to the others, with addrs for its own.
func (l *Lab) NewHost(role string, addrs ...netip.Addr) (*Namespace, error) {
	ns, err := l.newNamespace(role)
	if err != nil {
		return nil, err
	}
	ns.addrs = addrs
	return ns, nil
}

// Wire connects two hosts by one veth pair with nothing between, named Uplink at both ends and as the fabric's links are
// otherwise, and gives each end the host's own address, in the network of the given prefix length.
func (l *Lab) Wire(a, b *Namespace, bits int) error {
	if err := connect(a, Uplink, b, Uplink, l.Options.FabricMTU); err != nil {
		return err
	}
	same := func(wire.Family) int { return bits }
	if err := a.addAddresses(Uplink, same, a.addrs...); err != nil {
		return err
	}
	return b.addAddresses(Uplink, same, b.addrs...)
}

// Close ends the lab: agents, namespaces, mounts, pins, files. Nothing is left behind.
func (l *Lab) Close() error {
	var failed []error
	for _, node := range l.Nodes {
		node.signalAgent(os.Interrupt)
	}
	for _, node := range l.Nodes {
		failed = append(failed, node.endAgent())
	}
	l.release()
	if err := demolish(l.ID); err != nil {
		return errors.Join(append(failed, err, l.lock.Close())...)
	}
	guard, err := lockRegistry()
	if err == nil {
		err = removeFiles(l.ID)
		guard.Close()
	}
	return errors.Join(append(failed, err, l.lock.Close())...)
}

// Keep lets the lab run on after this process has ended; SweepKept from the same checkout, or End, ends it. Servers of
// this process end with it.
func (l *Lab) Keep() error {
	if err := os.WriteFile(filepath.Join(l.Dir, keptFile), []byte(checkout()), 0o600); err != nil {
		return fmt.Errorf("mark lab %s as kept: %w", l.ID, err)
	}
	l.release()
	return l.lock.Close()
}

// release closes what this process holds of the lab, and leaves the lab as it is.
func (l *Lab) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ns := range l.namespaces {
		ns.close()
	}
	l.namespaces = nil
}
