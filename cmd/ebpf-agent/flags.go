package main

import (
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// options is what the command line says, checked.
type options struct {
	config       agent.Config
	kubeconfig   string
	registry     string
	etcd         agent.Registry
	passwordFile string // of etcd's user
	logFormat    string
	masked       []netip.Prefix // as they were given
	stay         bool           // after a cleanup
	// portmapAuto says that --portmap is auto, as manifests of earlier versions have it.
	portmapAuto bool
	// ofKubeProxy says that a cleanup is about what kube-proxy has left, and nothing else.
	ofKubeProxy bool
	// force says that it is done though nobody else would serve Services.
	force bool
}

// directoryFlags are the flags that say where things are; cleanup has these, stayFlag, kubeProxyFlag and forceFlag alone.
func (o *options) directoryFlags() []cli.Flag {
	c := &o.config
	return []cli.Flag{
		cli.BPFFS(&c.BPFFS),
		cli.StateDir(&c.State),
		{Name: "cni-conf-dir", Default: "/etc/cni/net.d", Help: "where 10-ebpf-cni.conflist is written once the node can carry pods", Value: cli.Directory(&c.Conf)},
		{Name: "cni-bin-dir", Default: "/opt/cni/bin", Help: "where the plugin is installed, from beside this executable; empty: nowhere", Value: optional(cli.Directory(&c.Bin)), EmptyCounts: true},
		{Name: "proc-sys", Default: "/proc/sys", Help: "where the host's sysctls are written", Value: existingDirectory(&c.ProcSys)},
		{Name: "log-level", Default: "info", Help: "the least severe messages that agent and plugin log", Value: cli.OneOf(&c.LogLevel, "debug", "info", "warn", "error")},
		{Name: "log-format", Default: "text", Help: "format of the agent's log, which goes to stderr", Value: cli.OneOf(&o.logFormat, "text", "json")},
	}
}

func (o *options) stayFlag() cli.Flag {
	return cli.Flag{Name: "stay", Default: "false", Help: "wait for SIGTERM afterwards, as the container of a DaemonSet must", Value: cli.Bool(&o.stay)}
}

func (o *options) kubeProxyFlag() cli.Flag {
	return cli.Flag{Name: "kube-proxy", Default: "false", Help: "remove what a kube-proxy has left, and nothing of ours; refuses while one runs on this node, or nobody else would serve Services", Value: cli.Bool(&o.ofKubeProxy)}
}

func (o *options) forceFlag() cli.Flag {
	return cli.Flag{Name: "force", Default: "false", Help: "with --kube-proxy, remove it though nobody else serves Services", Value: cli.Bool(&o.force)}
}

// flags are all flags of the agent, in the order of the help.
func (o *options) flags() []cli.Flag {
	c := &o.config
	sources := []cli.Flag{
		{Name: "node-name", Help: "name of this host's Node; default: $NODE_NAME, else the host name in lower case", Value: nodeName(&c.Node)},
		{Name: "kubeconfig", Help: "how to reach the Kubernetes API; default: as pods of the cluster do", Value: existingFile(&o.kubeconfig, "a kubeconfig file")},
		{Name: "api-server", Help: "addresses of API servers to use instead of the kubeconfig's or the Service's; any that is ready is used, until it fails", Value: apiServers(&c.APIServers)},
		{Name: "nodes-file", Help: "read Nodes from this file instead of the API, again whenever it changes: what kubectl get nodes prints with -o yaml or -o json",
			Value: existingFile(&c.NodesFile, "a file that exists: a v1 NodeList or List of Nodes, YAML or JSON")},
	}
	return slices.Concat(sources, o.registryFlags(), []cli.Flag{
		{Name: "uplink", Help: "interfaces that lead out of the node; default: all that routes lead out of, followed as routes change", Value: uplinks(&c.Uplinks)},
		{Name: "attach-bridge", Help: "bridges, such as docker0, whose containers are treated as pods: those that have addresses within this node's podCIDR; no pod is then made here by the plugin", Value: bridges(&c.Bridges)},
		{Name: "routing-mode", Default: defaultRoutingMode, Help: "how packets get to other nodes' pods: direct, to nodes on the same link; vxlan, encapsulated; auto, direct where that is possible, else encapsulated",
			Value: cli.OneOf(&c.RoutingMode, agent.RouteDirect, agent.RouteVXLAN, agent.RouteAuto)},
		{Name: "vxlan-port", Default: defaultPort, Help: "UDP port of the tunnel, the same on all nodes", Value: port(&c.VXLANPort)},
		{Name: "vxlan-vni", Default: defaultVNI, Help: "VXLAN network identifier of the tunnel, the same on all nodes", Value: cli.Number(&c.VXLANVNI, "VNI", 1, 1<<24-1)},
		{Name: "vxlan-udp-checksum", Default: "true", Help: "give outer packets a UDP checksum; false where a network card spoils it", Value: cli.Bool(&c.VXLANChecksum)},
		{Name: "masquerade", Default: "true", Help: "masquerade what pods send to the world by IPv4: it leaves with the node's address", Value: cli.Bool(&c.Masquerade[wire.IPv4])},
		{Name: "masquerade-ipv6", Default: "true", Help: "the same for IPv6", Value: cli.Bool(&c.Masquerade[wire.IPv6])},
		{Name: "non-masquerade-cidr", Help: "destinations that see pods' own addresses; podCIDRs and nodes always do and need not be listed", Value: o.prefixes(&c.NonMasquerade)},
		{Name: "cluster-cidr", Help: "the range that podCIDRs are taken from; it is never masqueraded to, even where a Node is not known yet", Value: o.prefixes(&c.Cluster)},
		{Name: "kube-proxy", Default: "auto", Help: "whether netfilter translates addresses on this node, as rules of kube-proxy, portmap and your own do; auto: find out, and follow changes",
			Value: cli.OneOf(&c.KubeProxy, agent.KubeProxyAuto, agent.KubeProxyOn, agent.KubeProxyOff)},
		{Name: "forward-accept", Default: "auto", Help: "whether packets of pods are accepted in chains of netfilter's forward hook whose policy drops: auto puts one accept for each podCIDR and direction at the head of the chain; off: ebpfctl status reports the chain",
			Value: cli.OneOf(&c.ForwardAccept, agent.ForwardAcceptAuto, agent.ForwardAcceptOff)},
		{Name: "services", Default: "auto", Help: "whether the programs serve Services: of pods, of the node's own processes and from outside; off: netfilter does, by kube-proxy's rules; auto: they do unless such rules stand on the node",
			Value: cli.OneOf(&c.Services, agent.ServicesAuto, agent.ServicesOn, agent.ServicesOff)},
		{Name: "external-ips", Default: "true", Help: "with --services on or auto, whether externalIPs that Services claim are served; anybody who may write a Service can claim any address", Value: cli.Bool(&c.ExternalIPs)},
		{Name: "nodeport-addresses", Help: "with --services on or auto, on which addresses of this node NodePorts answer, and load balancers' health checks; 127.0.0.1 and ::1 are for the node's own processes; default: all of them", Value: o.ranges(&c.NodePortAddresses)},
		{Name: "cgroup", Help: "cgroup2 directory of all of the node's processes, which reach Services and host ports by programs on it; default: where cgroup2 is mounted, if that has the node's first process",
			Value: optional(cli.Directory(&c.Cgroup))},
		{Name: "snat-ports", Default: "auto", Help: "ports of the node that masqueraded flows get: up to four ranges; auto: all from 1024 on, without those that others have reserved, and without 30000-32767 where netfilter serves Services. Of net.ipv4.ip_local_port_range the larger of one half and 8192 ports is the node's own and never used", Value: snatPorts(&c.SnatPorts)},
		{Name: "snat-address", Help: "what packets to the world are masqueraded to on an uplink, or with IFACE= left out on all others; one for each family and uplink. While the node does not have it these packets are dropped; default: the address that the kernel would choose",
			Value: optional(snatAddresses(&c.SnatAddresses))},
		{Name: "snat-entries", Default: "262144", Help: "how many flows can be masqueraded at a time: the capacity of the tables", Value: cli.Number(&c.SnatEntries, "FLOWS", 16, 1<<24)},
		{Name: "service-cidr", Help: "the range of Services' addresses; a podCIDR that overlaps it is refused", Value: o.prefixes(&c.Service)},
		{Name: "address-quarantine", Default: "60s", Help: "how long a deleted pod's address is not given to another pod", Value: cli.Duration(&c.Quarantine, 0)},
		{Name: "mtu", Default: "0", Help: "MTU of pods' interfaces; 0, the default: what fits every way to other nodes and the default route", Value: mtu(&c.MTU)},
		{Name: "attach", Default: "auto", Help: "how programs are attached; auto: by tcx where the kernel has it, else by clsact", Value: cli.OneOf(&c.Attach, agent.AttachAuto, agent.AttachTCX, agent.AttachClsact)},
		{Name: "mark", Default: "0x00800000", Help: "the bit of packets' marks that the dataplane uses, and nothing else on the node", Value: mark(&c.Mark)},
		{Name: "listen", Default: "127.0.0.1:9965", Help: "where /healthz, /readyz and /metrics are served over HTTP; empty: nowhere", Value: listener(&c.Listen), EmptyCounts: true},
		{Name: "metrics-listen", Help: "where /metrics alone is served as well, as for a Prometheus outside the node; default: nowhere", Value: listener(&c.MetricsListen)},
		{Name: "portmap", Default: "off", Help: "whether host ports are left to the portmap plugin, which is in --cni-bin-dir and chained after ours; off: the programs serve them", Value: o.portmap()},
		{Name: "cni-chain", Help: "file of plugin configurations that are chained after ours: a JSON list of objects such as {\"type\": \"tuning\"}, read at start; default: none", Value: optional(chain(&c.Chain))},
	}, o.directoryFlags())
}
