package modes

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Beside kube-proxy a pod comes and goes by the same chain as in the classical networks: portmap is in it, and what ran is recorded.
func TestPortmapIsChainedBesideKubeProxy(t *testing.T) {
	n := built(t, EBPFKubeProxy)
	lists, err := filepath.Glob(filepath.Join(n.lab.Nodes[0].ConfDir(), "*.conflist"))
	if err != nil || len(lists) != 1 {
		t.Fatalf("lists of plugins: %v, %v", lists, err)
	}
	if content, err := os.ReadFile(lists[0]); err != nil || !bytes.Contains(content, []byte(`"portmap"`)) {
		t.Errorf("no portmap: %v in\n%s", err, content)
	}
	if _, err := n.Add(t.Context(), 1); err != nil {
		t.Error(err)
	}
	if _, err := n.Del(t.Context(), 1); err != nil {
		t.Error(err)
	}
	files, err := n.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
		names = append(names, filepath.Base(file))
	}
	if !slices.Equal(names, []string{"ebpf-cni", "ebpf-agent", "portmap"}) {
		t.Errorf("recorded are %v", names)
	}
}
