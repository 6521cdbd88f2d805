package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// upstreamPlugins are containernetworking's, by name. The benchmark's go.mod pins their version.
var upstreamPlugins = map[string]string{
	"bridge":     "github.com/containernetworking/plugins/plugins/main/bridge",
	"host-local": "github.com/containernetworking/plugins/plugins/ipam/host-local",
	"portmap":    "github.com/containernetworking/plugins/plugins/meta/portmap",
}

// bridgeConfig is what kube-flannel.yml and flannel's plugin come to: bridge, host-local and portmap. The MTU is the bridge's own choice, as
// there is no tunnel.
const bridgeConfig = `{
  "cniVersion": "1.0.0", "name": "cbr0",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
      "ipam": { "type": "host-local", "ranges": [[{ "subnet": %q }]], "routes": [{ "dst": "10.244.0.0/16" }] }
    },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
`

// bridgeRules are flanneld's with --ip-masq and --iptables-forward-rules: nothing between pods is translated, everything else of theirs
// but multicast is.
const bridgeRules = `*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.244.0.0/16 -j ACCEPT
-A FLANNEL-FWD -d 10.244.0.0/16 -j ACCEPT
COMMIT
*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A FLANNEL-POSTRTG -s PODCIDR -d 10.244.0.0/16 -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d PODCIDR -j RETURN
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d PODCIDR -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE --random-fully
COMMIT
`

// ownLabel marks the nodes that are this project's, in a cluster where others are not.
const ownLabel = "ebpf-cni.test/network"

// everyNode is what the project's DaemonSet selects nodes by.
const everyNode = "        kubernetes.io/os: linux\n"

// InstallClassical gives a node that has no network the classical one, as flannel's host-gw makes it: the plugins bridge, host-local and
// portmap, a route to each other node, masquerading by iptables. Install then leaves that node out; it comes after.
func (c *Cluster) InstallClassical(ctx context.Context, m *Machine) error {
	if err := c.leaveOut(ctx, m); err != nil {
		return err
	}
	if err := c.installPlugins(ctx, m, "bridge", "host-local", "portmap"); err != nil {
		return err
	}
	for _, name := range []string{"net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"} {
		if _, err := m.Run(ctx, "sh", "-c", "echo 1 > /proc/sys/"+name); err != nil {
			return fmt.Errorf("%w; modprobe br_netfilter, where it is that", err)
		}
	}
	podCIDR, err := c.routeClassically(ctx, m)
	if err != nil {
		return err
	}
	if err := m.write("classical.rules", strings.ReplaceAll(bridgeRules, "PODCIDR", podCIDR)); err != nil {
		return err
	}
	if _, err := m.Run(ctx, "iptables-restore", "--noflush", "-w", "10", m.path("classical.rules")); err != nil {
		return err
	}
	// Last: the node is ready from then on.
	if err := m.write("classical.conflist", fmt.Sprintf(bridgeConfig, podCIDR)); err != nil {
		return err
	}
	_, err = m.Run(ctx, "install", "-D", "-m", "600", m.path("classical.conflist"), "/etc/cni/net.d/10-classical.conflist")
	return err
}

// leaveOut has the cluster's copy of the manifest select all nodes but one.
func (c *Cluster) leaveOut(ctx context.Context, m *Machine) error {
	path, err := c.manifest(ctx)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.Count(string(text), everyNode) != 1 {
		return fmt.Errorf("%s has no single line %q to select nodes by", path, everyNode)
	}
	text = []byte(strings.Replace(string(text), everyNode, everyNode+"        "+ownLabel+": ours\n", 1))
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return err
	}
	for _, other := range c.Nodes {
		if other == m {
			continue
		}
		if _, err := c.Kubectl(ctx, "label", "node", other.Name, ownLabel+"=ours"); err != nil {
			return err
		}
	}
	return nil
}

// routeClassically gives a node its routes to all others, and returns its podCIDR.
func (c *Cluster) routeClassically(ctx context.Context, m *Machine) (own string, err error) {
	client, err := c.Client()
	if err != nil {
		return "", err
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	for _, node := range nodes.Items {
		other := c.Node(node.Name)
		if other == m {
			own = node.Spec.PodCIDR
			continue
		}
		if other == nil {
			return "", fmt.Errorf("node %s has no machine to route to", node.Name)
		}
		if _, err := m.Run(ctx, "ip", "route", "replace", node.Spec.PodCIDR, "via", other.Addr.String()); err != nil {
			return "", err
		}
	}
	if own == "" {
		return "", errors.New(m.Name + " has no podCIDR")
	}
	return own, nil
}

// installPlugins gives a node some of containernetworking's plugins, as the package kubernetes-cni would.
func (c *Cluster) installPlugins(ctx context.Context, m *Machine, names ...string) error {
	dir, err := buildUpstream(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := m.Run(ctx, "install", "-D", filepath.Join(dir, name), "/opt/cni/bin/"+name); err != nil {
			return err
		}
	}
	return nil
}

// buildUpstream makes the cache hold the plugins, and returns where they are. They are built in the project's own module, whose version of
// them the rest of the benchmark has too.
func buildUpstream(ctx context.Context) (string, error) {
	root, err := checkout()
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache for upstream's plugins: %w", err)
	}
	cache = filepath.Join(cache, "ebpf-cni")
	dir := filepath.Join(cache, "plugins-"+runtime.GOARCH)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the cache for upstream's plugins: %w", err)
	}
	unlock, err := lockCache(cache)
	if err != nil {
		return "", err
	}
	defer unlock()
	return dir, build(ctx, filepath.Join(root, "tools", "bench"), dir, upstreamPlugins)
}
