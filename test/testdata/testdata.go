// Package testdata holds inputs that more than one test uses, embedded, so that they are found from any directory.
package testdata

import _ "embed"

// Nodes is the answer of a Kubernetes 1.36 API server to `kubectl get nodes -o yaml` for a cluster of three nodes.
//
//go:embed nodes.yaml
var Nodes []byte

// Images is what the status of a Node says of its images (JSON), fifty of them: no kubelet names more. They are what makes a Node large.
//
//go:embed images.json
var Images []byte
