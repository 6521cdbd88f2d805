package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/test/testdata"
)

// NodeSpec is what the agents learn about one node. Every field may be given a value that makes no sense: that is
// what tests of the agent are for.
type NodeSpec struct {
	Name        string
	InternalIPs []netip.Addr
	PodCIDRs    []netip.Prefix
	// Leaving is that the cluster autoscaler is about to delete it.
	Leaving bool
	// Created is the creationTimestamp; zero: that of the list in test/testdata.
	Created time.Time
}

// told is what the agents' list has, as it was last written.
type told struct {
	nodes    []NodeSpec
	services []ServiceSpec
}

// defaultSpec is node number 1, 2, ... of a lab: with IPv4 alone and one fabric, as test/testdata/nodes.yaml has it.
func (o Options) defaultSpec(number int) NodeSpec {
	spec := NodeSpec{Name: fmt.Sprintf("k8s-n%d", number)}
	for _, family := range o.Underlay {
		addr := fmt.Sprintf(fabrics[o.fabricOf(number)].node[family], 10+number)
		spec.InternalIPs = append(spec.InternalIPs, netip.MustParseAddr(addr))
	}
	for _, family := range o.Families {
		spec.PodCIDRs = append(spec.PodCIDRs, netip.MustParsePrefix(fmt.Sprintf(podCIDR[family], number-1)))
	}
	return spec
}

// NodeSpecs describes the lab's nodes as they are.
func (l *Lab) NodeSpecs() []NodeSpec {
	specs := make([]NodeSpec, len(l.Nodes))
	for i, node := range l.Nodes {
		specs[i] = NodeSpec{Name: node.Name, InternalIPs: node.Addrs(), PodCIDRs: slices.Clone(node.PodCIDRs)}
	}
	return specs
}

// NodesFile is the list that every agent of the lab reads (--nodes-file).
func (l *Lab) NodesFile() string { return filepath.Join(l.Dir, "nodes.yaml") }

// WriteNodes replaces the Nodes in the list that the agents read, by rename. Its Services stay.
func (l *Lab) WriteNodes(specs ...NodeSpec) error {
	l.mu.Lock()
	l.told.nodes = slices.Clone(specs)
	l.mu.Unlock()
	publish, err := l.stageCluster()
	if err != nil {
		return err
	}
	return publish()
}

// WriteNodesFile replaces the list that the agents read by any content, by rename.
func (l *Lab) WriteNodesFile(content []byte) error {
	publish, err := l.StageNodesFile(content)
	if err != nil {
		return err
	}
	return publish()
}

// StageNodesFile writes a list beside the one that the agents read. The function returned replaces that by rename, at once; it is to be
// called once.
func (l *Lab) StageNodesFile(content []byte) (publish func() error, err error) {
	temp, err := os.CreateTemp(l.Dir, "nodes-*.tmp")
	if err != nil {
		return nil, fmt.Errorf("write node list: %w", err)
	}
	_, err = temp.Write(content)
	if err := errors.Join(err, temp.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("write node list %s: %w", temp.Name(), err), os.Remove(temp.Name()))
	}
	return func() error {
		if err := os.Rename(temp.Name(), l.NodesFile()); err != nil {
			return errors.Join(fmt.Errorf("write node list %s: %w", l.NodesFile(), err), os.Remove(temp.Name()))
		}
		return nil
	}, nil
}

// NodeList renders nodes as `kubectl get nodes -o yaml` does: each is a real Node object of test/testdata with the
// spec's values in place of its own.
func NodeList(specs ...NodeSpec) ([]byte, error) {
	list, err := nodeList(specs)
	if err != nil {
		return nil, err
	}
	return yaml.Marshal(list)
}

// NodeListJSON is NodeList as `kubectl get nodes -o json` has it: for lists of thousands, of which YAML takes seconds.
func NodeListJSON(specs ...NodeSpec) ([]byte, error) {
	list, err := nodeList(specs)
	if err != nil {
		return nil, err
	}
	return json.Marshal(list)
}

func nodeList(specs []NodeSpec) (map[string]any, error) {
	var list map[string]any
	if err := yaml.Unmarshal(testdata.Nodes, &list); err != nil {
		return nil, fmt.Errorf("parse test/testdata/nodes.yaml: %w", err)
	}
	templates := list["items"].([]any)
	texts := make([][]byte, len(templates))
	for i, template := range templates {
		var err error
		if texts[i], err = json.Marshal(template); err != nil {
			return nil, fmt.Errorf("copy a node of test/testdata/nodes.yaml: %w", err)
		}
	}
	items := make([]any, len(specs))
	for i, spec := range specs {
		// Parsed anew for each, since the templates would share their maps.
		var node map[string]any
		if err := json.Unmarshal(texts[i%len(texts)], &node); err != nil {
			return nil, fmt.Errorf("copy a node of test/testdata/nodes.yaml: %w", err)
		}
		spec.fill(node, i >= len(templates), i)
		items[i] = node
	}
	list["items"] = items
	return list, nil
}

// fill puts the spec's values into a Node object. An extra node gets a uid of its own.
func (s NodeSpec) fill(node map[string]any, extra bool, index int) {
	meta := node["metadata"].(map[string]any)
	meta["name"] = s.Name
	meta["labels"].(map[string]any)["kubernetes.io/hostname"] = s.Name
	if extra {
		meta["uid"] = fmt.Sprintf("00000000-0000-4000-8000-%012d", index)
	}
	if !s.Created.IsZero() {
		meta["creationTimestamp"] = s.Created.UTC().Format(time.RFC3339)
	}
	if s.Name == "" {
		delete(meta, "name")
	}

	spec := map[string]any{}
	if len(s.PodCIDRs) > 0 {
		cidrs := make([]any, len(s.PodCIDRs))
		for i, cidr := range s.PodCIDRs {
			cidrs[i] = cidr.String()
		}
		spec["podCIDR"], spec["podCIDRs"] = cidrs[0], cidrs
	}
	if s.Leaving {
		spec["taints"] = []any{map[string]any{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}}
	}
	node["spec"] = spec

	addresses := []any{}
	for _, ip := range s.InternalIPs {
		addresses = append(addresses, map[string]any{"type": "InternalIP", "address": ip.String()})
	}
	addresses = append(addresses, map[string]any{"type": "Hostname", "address": s.Name})
	node["status"].(map[string]any)["addresses"] = addresses
}
