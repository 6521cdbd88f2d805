package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// imagesOfNode is how many images a kubelet names in its Node, at most.
const imagesOfNode = 50

// nodeObjects are Nodes as the API has them, as large as those of clusters in use: what makes them large is the names of images.
func nodeObjects(specs ...lab.NodeSpec) ([]corev1.Node, error) {
	raw, err := lab.NodeListJSON(specs...)
	if err != nil {
		return nil, err
	}
	var list corev1.NodeList
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read a list of Nodes: %w", err)
	}
	images := make([]corev1.ContainerImage, imagesOfNode)
	for i := range images {
		name := fmt.Sprintf("registry.example.com/platform-team-%d/service-component-%d", i%7, i)
		images[i] = corev1.ContainerImage{
			Names:     []string{fmt.Sprintf("%s@sha256:%x", name, sha256.Sum256([]byte(name))), name + ":v1.27.3-build.20261122"},
			SizeBytes: int64(i+1) << 22,
		}
	}
	for i := range list.Items {
		list.Items[i].Status.Images = images
	}
	return list.Items, nil
}
