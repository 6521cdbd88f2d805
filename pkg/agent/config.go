package agent

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// Plugin is the file name of the plugin's executable.
const Plugin = install.Plugin

// Attach says how programs are attached.
type Attach = attach.Mode

// The ways to attach.
const (
	AttachAuto   = attach.Auto
	AttachTCX    = attach.TCX
	AttachClsact = attach.Clsact
)

// KubeProxyMode says whether netfilter translates addresses on this node.
type KubeProxyMode string

// The ways to know: the agent finds out, again and again; it does; it does not.
const (
	KubeProxyAuto KubeProxyMode = "auto"
	KubeProxyOn   KubeProxyMode = "on"
	KubeProxyOff  KubeProxyMode = "off"
)

// ForwardAcceptMode says whether accepts are put into forward chains whose policy drops.
type ForwardAcceptMode string

// The modes: they are where packets of pods would be dropped; they never are.
const (
	ForwardAcceptAuto ForwardAcceptMode = "auto"
	ForwardAcceptOff  ForwardAcceptMode = "off"
)

// ServicesMode says whether the programs serve Services.
type ServicesMode string

// The modes: they do, but for what rules of kube-proxy's that stand on the node translate; they always do; they never do.
const (
	ServicesAuto ServicesMode = "auto"
	ServicesOn   ServicesMode = "on"
	ServicesOff  ServicesMode = "off"
)

// RoutingMode says how packets get to the pods of other nodes.
type RoutingMode = plan.RoutingMode

// The routing modes.
const (
	RouteDirect = plan.RouteDirect
	RouteVXLAN  = plan.RouteVXLAN
	RouteAuto   = plan.RouteAuto
)

// SnatAddress is an address that --snat-address names.
type SnatAddress = plan.SnatAddress

// Registry says how flannel's registry in etcd is reached.
type Registry = lease.Options

// DefaultRegistryPrefix is what its keys begin with.
const DefaultRegistryPrefix = lease.DefaultPrefix

// ErrNotInCluster is returned by LoadAPI outside a cluster without a kubeconfig.
var ErrNotInCluster = source.ErrNotInCluster

// LoadAPI reads how to reach the Kubernetes API: from a kubeconfig or, with an
// empty path, from what a pod is given.
func LoadAPI(kubeconfig string) (*rest.Config, error) { return source.LoadConfig(kubeconfig) }

// LoadChain reads a file with the configurations of plugins that are to be chained after ours: a JSON list of objects, as they stand in
// "plugins" of a network configuration list.
func LoadChain(path string) ([]install.Entry, error) {
	content, err := os.ReadFile(path) //nolint:gosec // the administrator's
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	return install.ParseChain(content)
}

// Directories are where the agent keeps and puts things.
type Directories struct {
	// BPFFS is the pin directory.
	BPFFS bpffs.Dir
	// State is the state directory.
	State string
	// Conf is where the runtime looks for network configuration lists.
	Conf string
	// Bin is where the runtime looks for plugins; empty: the plugin is not installed.
	Bin string
	// ProcSys is where sysctls are written.
	ProcSys string
	// Plugin is the executable that is installed into Bin.
	Plugin string
}

// Config is what an agent is started with.
type Config struct {
	Directories
	// Node is the name of this node.
	Node string
	// API is how to reach the Kubernetes API; nil with a NodesFile or a Registry.
	API *rest.Config
	// APIServers are addresses of API servers to use instead of that of API, as ParseAPIServer returns them. APIOfService says that
	// that is the address of a Service.
	APIServers   []string
	APIOfService bool
	// NodesFile is read instead of the API.
	NodesFile string
	// Registry is flannel's registry in etcd, where this node leases its subnet, instead of the API; it says what RoutingMode,
	// VXLANPort and VXLANVNI are. Services are not known there: they are ServicesOff. nil: another source is used.
	Registry *Registry
	// RoutingMode says how packets get to other nodes' pods.
	RoutingMode RoutingMode
	// VXLANPort is the UDP port of the tunnel, VXLANVNI its network identifier of 24 bits; they are the same on all nodes.
	VXLANPort uint16
	VXLANVNI  uint32
	// VXLANChecksum says whether outer packets over IPv4 have a UDP checksum.
	VXLANChecksum bool
	// Uplinks are the names of the interfaces that lead out; none: found by routes.
	Uplinks []string
	// Bridges are the names of bridges whose containers are treated as pods, whether or not they exist yet.
	Bridges []string
	// Services says whether the programs serve Services.
	Services ServicesMode
	// ExternalIPs says whether that includes Services' externalIPs.
	ExternalIPs bool
	// NodePortAddresses narrow the node's addresses on which NodePorts answer; none: all do.
	NodePortAddresses []netip.Prefix
	// Cgroup is the directory of the cgroup of all of the node's processes, which reach Services and host ports by programs on it; empty: they do not.
	Cgroup string
	// NoCgroup is why Cgroup is empty.
	NoCgroup error
	// Masquerade says of each family whether what pods send to the world is masqueraded.
	Masquerade [wire.Families]bool
	// NonMasquerade and Cluster are never masqueraded; no podCIDR may overlap Service.
	NonMasquerade, Cluster, Service []netip.Prefix
	// SnatPorts are the ports to masquerade to, as far as the host can spare them, as ParsePortRanges returns them; none: all that need no
	// privilege.
	SnatPorts []PortRange
	// SnatAddresses are the addresses to masquerade to that the administrator has chosen.
	SnatAddresses []SnatAddress
	// SnatEntries is the capacity of the masquerading tables, in entries.
	SnatEntries uint32
	// Quarantine is how long a freed pod address is not given to another pod.
	Quarantine time.Duration
	// KubeProxy says whether netfilter translates addresses on this node.
	KubeProxy KubeProxyMode
	// ForwardAccept says whether accepts are put into forward chains whose policy drops.
	ForwardAccept ForwardAcceptMode
	// Portmap says whether the portmap plugin, in Directories.Bin, is chained after ours and opens host ports in our place.
	Portmap bool
	// Chain are the administrator's plugins, chained after ours, as LoadChain returns them.
	Chain []install.Entry
	// MTU of pods, in bytes; 0: the uplinks'.
	MTU int
	// Attach is how programs are attached to interfaces.
	Attach Attach
	// Mark is the one bit of the skb mark that is ours.
	Mark uint32
	// Listen serves health and metrics, MetricsListen metrics alone; empty: not served.
	Listen, MetricsListen string
	// NotifySocket is where a service manager waits to hear that the node is ready, as systemd gives it to a unit of Type=notify; empty:
	// nobody does.
	NotifySocket string
	// LogLevel is the plugin's; Log is the agent's own.
	LogLevel string
	Log      *slog.Logger
	// Version of the build.
	Version string
}

// servesServices says whether the programs can serve Services at all, though they may leave them to kube-proxy.
func (c Config) servesServices() bool { return c.Services == ServicesOn || c.Services == ServicesAuto }

// nodeConfig is for programs of that mode. frontends says that they translate to backends.
func (c Config) nodeConfig(m programMode, frontends bool) config.NodeConfig {
	n := config.NodeConfig{
		Mark: c.Mark, SnatHeld: c.snatHeld().constant(), TunnelPort: uint32(c.VXLANPort), TunnelVNI: c.VXLANVNI,
	}
	for i, r := range m.snat.ranges() {
		n.SnatPorts[i] = r.constant()
	}
	for _, r := range m.privileged.ranges() {
		n.SnatPrivileged = r.constant()
	}
	for f, on := range c.Masquerade {
		if on {
			n.Masquerade |= 1 << f
		}
	}
	switch m.level {
	case netfilter.Nothing:
	case netfilter.Masquerades:
		n.NetfilterNat = config.Masquerades
	case netfilter.Translates:
		n.NetfilterNat = config.Translates
	}
	if frontends {
		n.Services = 1
	}
	for f, loopback := range [wire.Families]netip.Addr{wire.IPv4: netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.IPv6: netip.IPv6Loopback()} {
		if len(c.NodePortAddresses) == 0 || c.narrows(loopback) {
			n.Loopback |= 1 << f
		}
	}
	if len(c.Bridges) > 0 {
		n.Bridges = 1
	}
	if c.VXLANChecksum {
		n.TunnelChecksum = 1
	}
	return n
}
