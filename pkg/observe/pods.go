package observe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/maps/bridges"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/sources"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// PodName is what Kubernetes calls a pod; empty where the runtime has not said it.
type PodName struct {
	Namespace string `json:"pod_namespace"`
	Name      string `json:"pod_name"`
	UID       string `json:"pod_uid"`
}

// String is "namespace/name", empty without a name.
func (n PodName) String() string { return strings.TrimPrefix(n.Namespace+"/"+n.Name, "/") }

// Object are the fields of a row in JSON.
func (n PodName) Object() typed.Object {
	return typed.Object{
		{Name: "pod_namespace", Value: n.Namespace},
		{Name: "pod_name", Value: n.Name},
		{Name: "pod_uid", Value: n.UID},
	}
}

// Pods are the names of this node's pods, as the state files of their endpoints have them.
type Pods struct {
	byLink       map[uint32]PodName // by the index of the host-side link
	byAttachment map[endpoint.ID]PodName
}

// ReadPods reads the names. State files that can't be read are named in the error, which comes with the others.
func ReadPods(stateDir string) (Pods, error) {
	p := Pods{map[uint32]PodName{}, map[endpoint.ID]PodName{}}
	list, err := endpoint.List(stateDir)
	for _, e := range list {
		namespace, name, _ := strings.Cut(e.Pod, "/")
		n := PodName{namespace, name, e.PodUID}
		p.byLink[uint32(e.HostIndex)], p.byAttachment[e.ID] = n, n
	}
	return p, err
}

// Of returns the name of the pod that has a container's interface.
func (p Pods) Of(containerID, ifName string) PodName {
	return p.byAttachment[endpoint.ID{ContainerID: containerID, IfName: ifName}]
}

// named adds the pods' names to the rows of a table that has their links' indexes. Those of the uplinks' maps are of
// other links.
func (p Pods) named(t typed.Table) typed.Table {
	if t.Name == uplinks.Name || t.Name == sources.Name || t.Name == destinations.Name || t.Name == bridges.Name {
		return t
	}
	texts := map[string]string{} // as the column has the indexes
	for index, name := range p.byLink {
		texts[fmt.Sprint(index)] = name.String()
	}
	cells, object := t.Cells, t.Object
	if at := slices.IndexFunc(t.Columns, func(c typed.Column) bool { return c.Name == "IFINDEX" }); at >= 0 {
		t.Columns = append(slices.Clip(t.Columns), typed.Column{Name: "POD NAME"})
		t.Cells = func(i int) []string {
			row := cells(i)
			return append(row, cmp.Or(texts[row[at]], "-"))
		}
	}
	t.Object = func(i int) typed.Object {
		row := object(i)
		for _, f := range row {
			if index, ok := f.Value.(uint32); ok && f.Name == "ifindex" {
				return append(row, p.byLink[index].Object()...)
			}
		}
		return row
	}
	return t
}
