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
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0", "name": "cbr0",
  "plugins": [
    { "type": "bridge", "bridge": "cni0", "mtu": %d, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true, "ipMasq": false,
      "ipam": { "type": "host-local", "dataDir": %q, "ranges": [[{ "subnet": "%s" }]], "routes": [{ "dst": "%s" }] } },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
`, mtu, ipamDir(node), node.PodCIDR, clusterCIDR)
}

// ptpList is the list that kindnetd writes.
func ptpList(node *lab.Node, mtu int) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0", "name": "kindnet",
  "plugins": [
    { "type": "ptp", "mtu": %d, "ipMasq": false,
      "ipam": { "type": "host-local", "dataDir": %q, "ranges": [[{ "subnet": "%s" }]], "routes": [{ "dst": "0.0.0.0/0" }] } },
    { "type": "portmap", "capabilities": { "portMappings": true } }
  ]
}
`, mtu, ipamDir(node), node.PodCIDR)
}

// ipamDir is on a tmpfs like our own plugin's store; upstream's default is on the disk.
func ipamDir(node *lab.Node) string { return filepath.Join(node.Dir, "ipam") }
