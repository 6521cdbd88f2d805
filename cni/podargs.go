package cni

import (
	"strings"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// podOf returns what Kubernetes' runtimes call the pod in CNI_ARGS, "K=V;K=V": its "namespace/name", and its uid; empty
// where they do not say. What can't be a pod's name is left out, and named in the error.
func podOf(args string) (pod, uid string, err error) {
	values := map[string]string{}
	for pair := range strings.SplitSeq(args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		values[key] = value
	}
	if name := values["K8S_POD_NAME"]; name != "" {
		pod = values["K8S_POD_NAMESPACE"] + "/" + name
	}
	return endpoint.CheckPod(pod, values["K8S_POD_UID"])
}
