// Package e2e proves this network on a real Kubernetes: one cluster for most tests, the project's manifest as it is, pods
// that containerd and the kubelet start. What a test does to the cluster, it undoes.
package e2e
