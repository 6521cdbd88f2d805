package modes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// upstream are the plugins of the classical networks, the tools of this module: go.mod pins their version.
var upstream = []string{"bridge", "ptp", "host-local", "portmap"}

const bridge = "cni0"

var building sync.Mutex

// installPlugins builds the upstream plugins as our own programs are built (static, stripped), beside them, and makes them those of each node. Where
// they are up to date it takes a fraction of a second.
func (n *Network) installPlugins(ctx context.Context) error {
	dir, err := n.upstreamDir()
	if err != nil {
		return err
	}
	building.Lock()
	defer building.Unlock()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make a directory for the upstream plugins: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/", "tool")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	root, err := lab.Checkout()
	if err != nil {
		return err
	}
	cmd.Dir = filepath.Join(root, "tools", "bench")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the upstream plugins into %s: %w: %s", dir, err, bytes.TrimSpace(out))
	}
	for _, node := range n.lab.Nodes {
		for _, name := range upstream {
			if err := os.Symlink(filepath.Join(dir, name), filepath.Join(node.CNIBinDir(), name)); err != nil {
				return fmt.Errorf("install plugin %s on %s: %w", name, node.Name, err)
			}
		}
	}
	return nil
}

// upstreamDir is where the plugins are.
func (n *Network) upstreamDir() (string, error) {
	ours, err := n.lab.Binary("ebpf-cni")
	return filepath.Join(filepath.Dir(ours), "upstream"), err
}

// configure sets the nodes up for the mode's plugins and for kube-proxy.
func (n *Network) configure() error {
	for i, node := range n.lab.Nodes {
		if err := n.writeSysctls(node); err != nil {
			return err
		}
		if n.setup.plugin == "" {
			continue
		}
		node.NetworkConfig = filepath.Join(node.ConfDir(), "10-classical.conflist")
		if err := os.WriteFile(node.NetworkConfig, []byte(n.pluginList(node)), 0o600); err != nil {
			return fmt.Errorf("write the network configuration of %s: %w", node.Name, err)
		}
		if n.setup.tunnel != "" {
			if err := addFlannelDevice(node, n.podMTU()); err != nil {
				return err
			}
		}
		if err := n.addPeer(node, n.lab.NodeSpecs()[1-i]); err != nil {
			return err
		}
	}
	return nil
}

func (n *Network) writeSysctls(node *lab.Node) error {
	var settings [][2]string
	if n.setup.rules != "" {
		// What kube-proxy sets, beside nf_conntrack_max, which only the machine's own namespace can.
		settings = append(settings, [2]string{"net/netfilter/nf_conntrack_tcp_timeout_established", "86400"},
			[2]string{"net/netfilter/nf_conntrack_tcp_timeout_close_wait", "3600"})
		limit, err := node.ReadSysctl("net/netfilter/nf_conntrack_max")
		if err != nil {
			return err
		}
		if k, err := strconv.Atoi(limit); err == nil && k < 131072 {
			n.log.Warn("the machine's limit of connections is below what kube-proxy sets (131072)", "nf_conntrack_max", k, "mode", n.Mode)
		}
	}
	if n.setup.plugin != "" { // kubeadm's preflight check wants forwarding
		settings = append(settings, [2]string{lab.Forwarding[n.setup.family], "1"})
	}
	if n.setup.bridged() {
		// kubeadm's check and flannel's documentation: without them a Service's backend on the client's own node
		// answers past the translation.
		settings = append(settings, [2]string{"net/bridge/bridge-nf-call-iptables", "1"}, [2]string{"net/bridge/bridge-nf-call-ip6tables", "1"})
	}
	for _, setting := range settings {
		if err := node.WriteSysctl(setting[0], setting[1]); err != nil {
			return err
		}
	}
	return nil
}

// pluginList is the list of plugins that kindnetd writes, or for the bridge the one that kube-flannel.yml installs, as flannel's plugin hands it on: it
// fills in the podCIDR, the MTU, the route and ipMasq, which is off since flanneld masquerades. flannel's plugin itself, one more process, is left out:
// in the classical network's favour. The addresses are on a tmpfs like our own plugin's store; upstream's default is on the disk.
func (n *Network) pluginList(node *lab.Node) string {
	first, route := "", [wire.Families]string{"0.0.0.0/0", "::/0"}[n.setup.family]
	if n.setup.bridged() {
		first, route = fmt.Sprintf(`"bridge": %q, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, `, bridge), clusterCIDR[n.setup.family].String()
	}
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0", "name": "classical",
  "plugins": [
    { "type": %q, %s"mtu": %d, "ipMasq": false,
      "ipam": { "type": "host-local", "dataDir": %q, "ranges": [[{ "subnet": "%s" }]], "routes": [{ "dst": %q }] } },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
`, n.setup.plugin, first, n.podMTU(), filepath.Join(node.Dir, "ipam"), node.PodCIDR(), route)
}

// podMTU is the MTU of the classical networks' pods.
func (n *Network) podMTU() int {
	if n.setup.tunnel != "" {
		return plan.InnerMTU(uint32(n.lab.Options.FabricMTU), n.setup.family)
	}
	return n.lab.Options.FabricMTU
}

// addPeer tells a node of another one as flanneld does for each lease, and kindnetd for each Node; delPeer has it forget that.
func (n *Network) addPeer(node *lab.Node, peer lab.NodeSpec) error {
	if n.setup.tunnel != "" {
		return addFlannelPeer(node, peer)
	}
	return node.AddRoute(peer.PodCIDRs[0], peer.InternalIPs[0], "")
}

func (n *Network) delPeer(node *lab.Node, peer lab.NodeSpec) error {
	if n.setup.tunnel != "" {
		return delFlannelPeer(node, peer)
	}
	if err := node.Netlink().RouteDel(&netlink.Route{Dst: ipNet(peer.PodCIDRs[0])}); err != nil {
		return fmt.Errorf("delete the route to %s on %s: %w", peer.PodCIDRs[0], node.Name, err)
	}
	return nil
}

// setRoutes tells each node of k nodes. What it has done when an error comes is remembered.
func (n *Network) setRoutes(ctx context.Context, k int) error {
	for ; n.nodes < k && ctx.Err() == nil; n.nodes++ {
		for _, node := range n.lab.Nodes {
			if err := n.addPeer(node, farNode(n.nodes-len(n.lab.Nodes), n.setup.family)); err != nil {
				return err
			}
		}
	}
	for ; n.nodes > k && ctx.Err() == nil; n.nodes-- {
		for _, node := range n.lab.Nodes {
			if err := n.delPeer(node, farNode(n.nodes-1-len(n.lab.Nodes), n.setup.family)); err != nil {
				return err
			}
		}
	}
	return context.Cause(ctx)
}

// Ready is an error unless the machine has all that building a mode takes. It builds nothing.
func Ready(mode string) error { return ready("/proc/sys/net", mode) }

// ready asks for programs, for the kernel modules that no namespace can load for itself, and for this project's own programs. Modules change how
// the machine's own bridges and connections are treated, so they are its owner's to load.
func ready(sysctls, mode string) error {
	s := setups[mode]
	wanted := map[string][]string{iptables: {programs[s.family].restore, programs[s.family].list, "go"}, nftables: {"nft", "go"}}[s.rules]
	for _, program := range wanted {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("mode %s needs %s: %w; install it (make bench does), or choose --modes without it", mode, program, err)
		}
	}
	for _, m := range []struct {
		needed       bool
		name, sysctl string
	}{{s.rules != "", "nf_conntrack", "netfilter/nf_conntrack_max"}, {s.bridged(), "br_netfilter", "bridge/bridge-nf-call-iptables"}} {
		if _, err := os.Stat(filepath.Join(sysctls, m.sysctl)); m.needed && err != nil {
			return fmt.Errorf("mode %s: the kernel module %s is not loaded: modprobe %s, or choose --modes without it: %w", mode, m.name, m.name, err)
		}
	}
	for _, name := range own(mode) {
		if _, err := new(lab.Lab).Binary(name); err != nil {
			return fmt.Errorf("mode %s: %w", mode, err)
		}
	}
	return nil
}

// own are the project's programs that a mode is built with. The classical ones keep upstream's plugins beside ours.
func own(mode string) []string {
	switch {
	case mode == result.Direct:
		return nil
	case setups[mode].agent:
		return []string{"ebpf-cni", "ebpf-agent"}
	}
	return []string{"ebpf-cni"}
}

// Binaries are the files that the mode's plugins, and its agent, were started from.
func (n *Network) Binaries() (files []string, err error) {
	var plugins []string
	if n.setup.plugin != "" {
		plugins = upstream
	}
	if n.setup.agent {
		for _, name := range own(n.Mode) {
			file, missing := n.lab.Binary(name)
			files, err = append(files, file), errors.Join(err, missing)
		}
		if n.setup.rules != "" {
			plugins = []string{"portmap"}
		}
	}
	for _, name := range plugins {
		dir, missing := n.upstreamDir()
		files, err = append(files, filepath.Join(dir, name)), errors.Join(err, missing)
	}
	return files, err
}
