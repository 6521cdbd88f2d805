package modes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"sync"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// upstream are the plugins of the classical networks. go.mod pins their version.
var upstream = []string{
	"github.com/containernetworking/plugins/plugins/main/bridge",
	"github.com/containernetworking/plugins/plugins/main/ptp",
	"github.com/containernetworking/plugins/plugins/ipam/host-local",
	"github.com/containernetworking/plugins/plugins/meta/portmap",
}

var building sync.Mutex

// buildPlugins builds the upstream plugins as our own programs are built (static, stripped), beside them, and returns
// where they are. Where they are up to date it takes a fraction of a second.
func buildPlugins(ctx context.Context, l *lab.Lab) (string, error) {
	ours, err := l.Binary("ebpf-cni")
	if err != nil {
		return "", err
	}
	dir := filepath.Join(filepath.Dir(ours), "upstream")
	building.Lock()
	defer building.Unlock()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a directory for the upstream plugins: %w", err)
	}
	args := append([]string{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/"}, upstream...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	root, err := lab.Checkout()
	if err != nil {
		return "", err
	}
	cmd.Dir = filepath.Join(root, "tools", "bench")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the upstream plugins into %s: %w: %s", dir, err, bytes.TrimSpace(out))
	}
	return dir, nil
}

// installPlugins makes the plugins those of a node.
func installPlugins(node *lab.Node, dir string) error {
	for _, plugin := range upstream {
		name := path.Base(plugin)
		err := os.Symlink(filepath.Join(dir, name), filepath.Join(node.CNIBinDir(), name))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("install plugin %s on %s: %w", name, node.Name, err)
		}
	}
	return nil
}

// bridgeList is the list of plugins that kube-flannel.yml installs, as flannel's plugin hands it on to the bridge
// plugin: it fills in the podCIDR, the MTU, the route and ipMasq, which is off since flanneld masquerades. flannel's
// plugin itself, one more process, is left out: in the classical network's favour.
func bridgeList(node *lab.Node, mtu int) string {
	return pluginList(node, "cbr0", fmt.Sprintf(`"type": "bridge", "bridge": %q, "mtu": %d, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true`,
		bridge, mtu), clusterCIDR.String())
}

// ptpList is the list that kindnetd writes.
func ptpList(node *lab.Node, mtu int) string {
	return pluginList(node, "kindnet", fmt.Sprintf(`"type": "ptp", "mtu": %d`, mtu), "0.0.0.0/0")
}

// pluginList keeps the addresses on a tmpfs like our own plugin's store; upstream's default is on the disk.
func pluginList(node *lab.Node, name, first, route string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0", "name": %q,
  "plugins": [
    { %s, "ipMasq": false,
      "ipam": { "type": "host-local", "dataDir": %q, "ranges": [[{ "subnet": "%s" }]], "routes": [{ "dst": %q }] } },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
`, name, first, filepath.Join(node.Dir, "ipam"), node.PodCIDR, route)
}

// Ready is an error unless the machine has all that building a mode takes. It builds nothing.
func Ready(mode string) error { return ready("/proc/sys/net", mode) }

// ready asks for programs, for the kernel modules that no namespace can load for itself, and for this project's own programs. Modules change how
// the machine's own bridges and connections are treated, so they are its owner's to load.
func ready(sysctls, mode string) error {
	programs := map[string][]string{
		result.KubeProxy: {"iptables-restore", "go"}, result.IPTables: {"iptables-restore", "iptables", "go"},
		result.PTP: {"iptables-restore", "iptables", "go"}, result.NFTables: {"nft", "go"},
	}[mode]
	for _, program := range programs {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("mode %s needs %s: %w; install it (make bench does), or choose --modes without it", mode, program, err)
		}
	}
	modules := [][2]string{{"nf_conntrack", "netfilter/nf_conntrack_max"}, {"br_netfilter", "bridge/bridge-nf-call-iptables"}}
	switch mode {
	case result.Direct, result.EBPF:
		modules = nil
	case result.PTP, result.KubeProxy:
		modules = modules[:1]
	}
	for _, m := range modules {
		if _, err := os.Stat(filepath.Join(sysctls, m[1])); err != nil {
			return fmt.Errorf("mode %s: the kernel module %s is not loaded: modprobe %s, or choose --modes without it: %w", mode, m[0], m[0], err)
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
	switch mode {
	case result.Direct:
		return nil
	case result.EBPF, result.KubeProxy:
		return []string{"ebpf-cni", "ebpf-agent"}
	}
	return []string{"ebpf-cni"}
}

// Binaries are the files that the mode's plugins, and its agent, were started from.
func (n *Network) Binaries() (files []string, err error) {
	for _, name := range own(n.Mode) {
		file, err := n.lab.Binary(name)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	beside := func(name string) string { return filepath.Join(filepath.Dir(files[0]), "upstream", name) }
	switch n.Mode {
	case result.Direct, result.EBPF:
		return files, nil
	case result.KubeProxy:
		return append(files, beside("portmap")), nil
	}
	var plugins []string
	for _, plugin := range upstream {
		plugins = append(plugins, beside(path.Base(plugin)))
	}
	return plugins, nil
}
