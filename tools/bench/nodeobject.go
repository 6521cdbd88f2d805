package main

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/testdata"
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
