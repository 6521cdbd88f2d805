package agent

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
)

// writeCluster leaves for ebpfctl what the maps do not say: the names of the
// nodes, and what is wrong with their objects.
func (r *reconciler) writeCluster() error {
	c := observe.Cluster{}
	for _, p := range r.result.Peers {
		c.Nodes = append(c.Nodes, observe.ClusterNode{Name: p.Name, Address: p.Address})
	}
	for _, p := range r.result.Problems {
		c.Problems = append(c.Problems, observe.ClusterProblem{Node: p.Node, Reason: string(p.Reason), Text: p.Text})
	}
	path := filepath.Join(r.cfg.State, observe.ClusterFile)
	if _, err := os.Stat(path); err == nil && reflect.DeepEqual(c, r.told) {
		return nil
	}
	content, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("encode the names of the nodes: %w", err)
	}
	next := path + ".next"
	if err := os.WriteFile(next, append(content, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the names of the nodes: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write the names of the nodes: %w", err)
	}
	r.told = c
	return nil
}
