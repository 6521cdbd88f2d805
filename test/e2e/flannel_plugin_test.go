package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// flannelMTU is less than ours would choose.
const flannelMTU = 1400

// The plugin flannel delegates to ours, in place of bridge: pods come, reach each other and the world, and go.
func TestFlannelPluginDelegates(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 2, Families: only4})
	for _, node := range l.Nodes {
		delegate(t, node, map[string]any{"isDefaultGateway": true, "hairpinMode": true, "ipMasq": false})
	}
	a, b := addPod(t, l.Nodes[0], "a"), addPod(t, l.Nodes[1], "b")
	meet(t, a.Namespace, b.Namespace)
	assertReaches(t, a.Namespace, serve(t, l.Outside), a.Node.Addr())

	said, err := os.ReadFile(a.Node.PluginLog())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(said), "ignored") {
		t.Errorf("what flannel asks for holds for every pod, and the plugin says:\n%s", said)
	}
	for _, pod := range []*lab.Pod{a, b} {
		if link, err := pod.Netlink().LinkByName(pod.IfName); err != nil || link.Attrs().MTU != flannelMTU {
			t.Errorf("MTU of %v, %v: want flannel's, %d", link, err, flannelMTU)
		}
		if err := pod.Check(t.Context()); err != nil {
			t.Error(err)
		}
		if err := pod.Node.DelPod(t.Context(), pod); err != nil {
			t.Error(err)
		}
		if used, err := pod.Node.Ebpfctl(t.Context(), "dump", "endpoints"); err != nil || strings.Contains(string(used), pod.Addr().String()) {
			t.Errorf("after DEL: %v\n%s", err, used)
		}
	}
}

// delegate has a node's pods be added by the plugin flannel, which delegates to ours.
func delegate(t *testing.T, node *lab.Node, fields map[string]any) {
	t.Helper()
	env := fmt.Sprintf("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=%s/24\nFLANNEL_MTU=%d\nFLANNEL_IPMASQ=true\n", inNetwork(node.PodCIDR(), 1), flannelMTU)
	delegated := map[string]any{"type": "ebpf-cni", "bpffs": node.BPFFS(), "stateDir": node.StateDir()}
	maps.Copy(delegated, fields)
	list, err := json.Marshal(map[string]any{"cniVersion": "0.4.0", "name": "cbr0", "plugins": []any{map[string]any{
		"type": "flannel", "subnetFile": node.SubnetFile(), "dataDir": filepath.Join(node.Dir, "flannel/data"), "delegate": delegated,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	node.NetworkConfig = filepath.Join(node.Dir, "10-flannel.conflist")
	if err := os.Mkdir(filepath.Dir(node.SubnetFile()), 0o700); err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{node.SubnetFile(): env, node.NetworkConfig: string(list)} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(flannelProgram(t, "flannel"), filepath.Join(node.CNIBinDir(), "flannel")); err != nil {
		t.Fatal(err)
	}
}

// flannelProgram is one of the programs of flannel's module, which go compiles once and keeps.
func flannelProgram(t *testing.T, name string) string {
	t.Helper()
	root, err := lab.Checkout()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "go", "-C", filepath.Join(root, "test/cluster/flannel"), "tool", "-n", name)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, &said)
	}
	return strings.TrimSpace(string(out))
}
