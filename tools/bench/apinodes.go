package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/testdata"
)

const (
	nodesPath = "/api/v1/nodes"
	// renewal is how often a kubelet writes its Node's status when nothing changes.
	renewal = 5 * time.Minute
)

// nodeObjects are Nodes as the API has them, as large as those of clusters in use.
func nodeObjects(specs ...lab.NodeSpec) ([]corev1.Node, error) {
	raw, err := lab.NodeListJSON(specs...)
	if err != nil {
		return nil, err
	}
	var list corev1.NodeList
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read a list of Nodes: %w", err)
	}
	var images []corev1.ContainerImage
	if err := json.Unmarshal(testdata.Images, &images); err != nil {
		return nil, fmt.Errorf("read test/testdata/images.json: %w", err)
	}
	for i := range list.Items {
		list.Items[i].Status.Images = images
	}
	return list.Items, nil
}

// renew renews the status of one Node after the other.
func (s *apiServer) renew(ctx context.Context) {
	count := len(s.nodes.objects)
	tick := time.NewTicker(renewal / time.Duration(count))
	defer tick.Stop()
	for i := 0; ; i = (i + 1) % count {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			_, _ = s.update(i, func(status *corev1.NodeStatus) { // what was encoded once is encoded again
				for c := range status.Conditions {
					status.Conditions[c].LastHeartbeatTime = metav1.NewTime(now)
				}
			})
		}
	}
}

// node is number i of the Nodes, as it is. The caller holds the lock.
func (s *apiServer) node(i int) *corev1.Node { return s.nodes.objects[i].object.(*corev1.Node) }

// update changes the status of a Node, and returns the Node encoded.
func (s *apiServer) update(i int, change func(*corev1.NodeStatus)) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node := *s.node(i)
	node.Status.Conditions = slices.Clone(node.Status.Conditions)
	change(&node.Status)
	err := s.set(s.nodes, i, &node)
	return s.nodes.objects[i].encoded, err
}

// stage prepares a Node's change. The function returned sends it.
func (s *apiServer) stage(i int, spec lab.NodeSpec) (publish func() error, err error) {
	nodes, err := nodeObjects(spec)
	if err != nil {
		return nil, err
	}
	return func() error { return s.publish(s.nodes, i, &nodes[0]) }, nil
}

// patch writes the conditions that a patch names.
func (s *apiServer) patch(w http.ResponseWriter, r *http.Request, name string) {
	var body struct {
		Status struct{ Conditions []corev1.NodeCondition }
	}
	i, known := s.nodes.index[name]
	err := json.NewDecoder(r.Body).Decode(&body)
	if !known || err != nil {
		http.Error(w, fmt.Sprintf("no Node %q, or no patch: %v", name, err), http.StatusBadRequest)
		return
	}
	encoded, err := s.update(i, func(status *corev1.NodeStatus) {
		for _, condition := range body.Status.Conditions {
			status.Conditions = slices.DeleteFunc(status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == condition.Type })
			status.Conditions = append(status.Conditions, condition)
		}
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(encoded) // who does not wait for it does not want it
}
