package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/maps/affinity"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/registry"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/modes"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// endpointsEach is how many endpoints each of many Services has.
const endpointsEach = 10

// rangePoll is how often is looked whether the agent has written the range.
const rangePoll = time.Millisecond

// rangeOfMany is where the many Services have their addresses from.
var rangeOfMany = netip.MustParsePrefix("10.96.0.0/12")

// manyServices are so many Services with endpoints on all of the nodes but the first, which has the agent that is measured. The first Service is UDP's: probes
// go to it.
func manyServices(number int, nodes []lab.NodeSpec) []modes.Service {
	all := make([]modes.Service, number)
	ip := rangeOfMany.Addr()
	for i := range all {
		ip = ip.Next()
		s := modes.Service{Name: fmt.Sprintf("team-%d/application-%d", i%100, i), IP: ip, Ports: []modes.ServicePort{{Protocol: "tcp", Port: 80, Target: 8080}}}
		if i == 0 {
			s.Ports[0].Protocol, s.Ports[0].Target = "udp", probePort
		}
		for j := range endpointsEach {
			node := nodes[1+(i+j)%(len(nodes)-1)]
			addr := node.PodCIDRs[0].Addr().As4()
			addr[3] = byte(2 + (i+j)%250)
			s.Endpoints = append(s.Endpoints, modes.Endpoint{Addr: netip.AddrFrom4(addr), Node: node.Name})
		}
		all[i] = s
	}
	return all
}

// objectsOf are a Service and its EndpointSlice, about as large as those of clusters in use.
func objectsOf(s modes.Service) (*corev1.Service, *discoveryv1.EndpointSlice) {
	service, slice := s.Objects()
	labels := map[string]string{"app.kubernetes.io/name": service.Name, "app.kubernetes.io/part-of": service.Namespace, "app.kubernetes.io/managed-by": "Helm"}
	fields := metav1.NewFieldsV1(`{"f:addressType":{},"f:endpoints":{},"f:metadata":{"f:annotations":{".":{},"f:endpoints.kubernetes.io/last-change-trigger-time":{}},` +
		`"f:generateName":{},"f:labels":{".":{},"f:app.kubernetes.io/name":{},"f:endpointslice.kubernetes.io/managed-by":{},"f:kubernetes.io/service-name":{}},` +
		`"f:ownerReferences":{".":{},"k:{\"uid\":\"0e8a3c0e-6c1f-4bcb-9d5c-5d2f5f3c1b7a\"}":{}}},"f:ports":{}}`)
	filled := func(o *metav1.ObjectMeta, manager string) {
		o.UID, o.CreationTimestamp = types.UID("0e8a3c0e-6c1f-4bcb-9d5c-5d2f5f3c1b7a"), metav1.NewTime(time.Unix(1_700_000_000, 0))
		o.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: fields}}
		for name, value := range labels {
			metav1.SetMetaDataLabel(o, name, value)
		}
	}
	filled(&service.ObjectMeta, "helm")
	filled(&slice.ObjectMeta, "kube-controller-manager")
	service.Spec.Selector = map[string]string{"app.kubernetes.io/name": service.Name}
	slice.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: service.Name, UID: service.UID, Controller: new(true)}}
	for i := range slice.Endpoints {
		pod := fmt.Sprintf("%s-7d9c6b8f5d-%05d", service.Name, i)
		slice.Endpoints[i].TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: service.Namespace, Name: pod, UID: service.UID}
		slice.Endpoints[i].Zone = new("zone-a")
	}
	return service, slice
}

// serveMany has an API server know Services, and returns what it has of EndpointSlices, in their order.
func serveMany(s *apiServer, all []modes.Service) (slices *resource, err error) {
	of := make([]object, len(all))
	in := make([]object, len(all))
	for i, one := range all {
		of[i], in[i] = objectsOf(one)
	}
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{rangeOfMany.String()}}}
	_, err1 := s.add("/apis/networking.k8s.io/v1/servicecidrs", metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"}, []object{cidr})
	_, err2 := s.add("/api/v1/services", metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, of)
	slices, err3 := s.add("/apis/discovery.k8s.io/v1/endpointslices", metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}, in)
	return slices, errors.Join(err1, err2, err3)
}

// measureServices starts an agent with nothing there, which learns of a workload's Nodes and Services from an API server, measures it, and takes away all that it
// has left.
func (a *agents) measureServices(ctx context.Context, w result.Workload, mode string) (sample result.Sample, err error) {
	node, nodes := a.lab.Nodes[0], modes.FarNodes(a.lab.NodeSpecs(), w.Size, wire.IPv4)
	all := manyServices(w.Services, nodes)
	s, err := serveNodes(a.lab, nodes)
	if err != nil {
		return result.Sample{}, err
	}
	defer func() {
		_, stopped := node.StopAgent()
		err = errors.Join(err, stopped, node.Reboot(), s.close())
	}()
	slices, err := serveMany(s, all)
	if err != nil {
		return result.Sample{}, err
	}
	started := time.Now()
	if err = node.StartAgent(modes.AgentFlags(mode)...); err == nil {
		sample, err = completeServices(ctx, node, all, started)
	}
	if err == nil && w.Kind == result.Changes {
		sample, err = a.changeEndpoints(ctx, func(changed modes.Service) error {
			_, slice := objectsOf(changed)
			return s.publish(slices, 0, slice)
		}, all[0], nodes)
	}
	if err != nil {
		err = fmt.Errorf("%w; the agent says:\n%s", err, node.LogTail(5))
	}
	return sample, err
}

// completeServices measures how long it takes until the maps have all Services, and what agent and maps then weigh. The agent writes the range of Services once
// the maps have them all.
func completeServices(ctx context.Context, node *lab.Node, all []modes.Service, started time.Time) (result.Sample, error) {
	for !hasRange(node) {
		if err := pause(ctx, rangePoll); err != nil {
			return result.Sample{}, errors.Join(fmt.Errorf("the agent does not say that all Services are served: %w", err), modes.ServicesOf(node, all))
		}
	}
	took := time.Since(started)
	cpu, err := cpuTime(node.AgentPID())
	if err != nil {
		return result.Sample{}, err
	}
	if err := modes.ServicesOf(node, all); err != nil {
		return result.Sample{}, fmt.Errorf("the agent has said that all Services are served: %w", err)
	}
	if err := pause(ctx, settled); err != nil {
		return result.Sample{}, err
	}
	now, peak, err1 := memory(node.AgentPID())
	maps, err2 := weighMaps(node)
	return result.Sample{Values: map[string]float64{"memory": now, "peak": peak, "complete": took.Seconds(), "cpu": cpu.Seconds(), "maps": maps}}, errors.Join(err1, err2)
}

// hasRange says whether the node's destinations have the range of Services.
func hasRange(node *lab.Node) bool {
	table, err := destinations.Open(bpffs.Dir(node.BPFFS()).Map(destinations.Name))
	if err != nil {
		return false
	}
	defer table.Close()
	found, err := table.Get(destinations.KeyFrom(rangeOfMany))
	return err == nil && found.Kind == destinations.Service
}

// weighMaps is what the kernel keeps for the maps that a node's agent and plugin write, and for the one that clients' affinity takes: what is left are flows, with
// their fragments and ports, and counters.
func weighMaps(node *lab.Node) (bytes float64, err error) {
	for _, d := range registry.Pinned() {
		if d.Content != typed.Configured && d.Name != affinity.Name {
			continue
		}
		m, err := ebpf.LoadPinnedMap(bpffs.Dir(node.BPFFS()).Map(d.Name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return 0, fmt.Errorf("open map %s: %w", d.Name, err)
		}
		info, err := m.Info()
		if err := errors.Join(err, m.Close()); err != nil {
			return 0, fmt.Errorf("ask for the size of map %s: %w", d.Name, err)
		}
		// A trie has no memory while it is empty.
		size, known := info.Memlock()
		if !known && info.Type != ebpf.LPMTrie {
			return 0, fmt.Errorf("the kernel does not tell the size of map %s", d.Name)
		}
		bytes += float64(size)
	}
	return bytes, nil
}
