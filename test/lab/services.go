package lab

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// ServiceSpec is what the agents learn about one Service and its endpoints.
type ServiceSpec struct {
	Name string
	// ClusterIPs, ExternalIPs and LoadBalancerIPs are its addresses.
	ClusterIPs, ExternalIPs, LoadBalancerIPs []netip.Addr
	// Port is the Service's, for TCP and UDP alike.
	Port uint16
	// NodePort is the port of nodes that leads to it; 0: it has none.
	NodePort uint16
	// InternalLocal and ExternalLocal are that a traffic policy is Local.
	InternalLocal, ExternalLocal bool
	// SourceRanges are who may ask its load balancer; none: everybody may.
	SourceRanges []netip.Prefix
	// HealthCheckPort is its healthCheckNodePort; 0: it has none.
	HealthCheckPort uint16
	// Affinity is for how many seconds a client keeps its backend; 0: it does not.
	Affinity int32
	// Endpoints are of any family, and have ports of their own.
	Endpoints []EndpointSpec
}

// EndpointSpec is one endpoint of a Service. The zero value of what it may be is that of an ordinary one, which is ready.
type EndpointSpec struct {
	At netip.AddrPort
	// Node is the name of the Node that it runs on; empty: of none.
	Node string
	// NotReady, NotServing and Terminating are its conditions.
	NotReady, NotServing, Terminating bool
	// Zone and ForZones are where it is, and its hints.
	Zone     string
	ForZones []string
}

// Endpoint is a pod as an endpoint, at its address of a family.
func (p *Pod) Endpoint(family wire.Family, port uint16) EndpointSpec {
	return EndpointSpec{At: netip.AddrPortFrom(p.AddrOf(family), port), Node: p.Node.Name}
}

// Endpoint is the node itself as an endpoint: a pod of the host's network.
func (n *Node) Endpoint(family wire.Family, port uint16) EndpointSpec {
	return EndpointSpec{At: netip.AddrPortFrom(n.AddrOf(family), port), Node: n.Name}
}

// ServiceCIDR is where the lab's Services get their ClusterIPs from.
var ServiceCIDR = prefixes("10.96.0.0/16", "fd00:10:96::/112")

// SetServices replaces the Services in the list that the agents read.
func (l *Lab) SetServices(specs ...ServiceSpec) error {
	publish, err := l.StageServices(specs...)
	if err != nil {
		return err
	}
	return publish()
}

// StageServices writes a list with other Services beside the one that the agents read. The function returned replaces that, at
// once; it is to be called once.
func (l *Lab) StageServices(specs ...ServiceSpec) (publish func() error, err error) {
	l.mu.Lock()
	l.told.services = slices.Clone(specs)
	l.mu.Unlock()
	return l.stageCluster()
}

// stageCluster writes Nodes and Services as they were last given beside the list that the agents read.
func (l *Lab) stageCluster() (publish func() error, err error) {
	l.mu.Lock()
	told := l.told
	l.mu.Unlock()
	list, err := nodeList(told.nodes)
	if err != nil {
		return nil, err
	}
	list["items"] = append(list["items"].([]any), serviceItems(told.services)...)
	raw, err := yaml.Marshal(list)
	if err != nil {
		return nil, err
	}
	return l.StageNodesFile(raw)
}

// ServiceList renders Services and their EndpointSlices as `kubectl get services,endpointslices -A -o json` does.
func ServiceList(specs ...ServiceSpec) ([]byte, error) {
	return json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": serviceItems(specs)})
}

func serviceItems(specs []ServiceSpec) (items []any) {
	for _, spec := range specs {
		items = append(items, spec.service())
	}
	for _, spec := range specs {
		for _, slice := range spec.slices() {
			items = append(items, slice)
		}
	}
	return items
}

// protocols are those of a Service's ports, which are named so.
var protocols = []core.Protocol{core.ProtocolTCP, core.ProtocolUDP}

func portName(protocol core.Protocol) string { return strings.ToLower(string(protocol)) }

func (s ServiceSpec) service() core.Service {
	object := core.Service{
		TypeMeta:   meta.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: meta.ObjectMeta{Namespace: "default", Name: s.Name},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeClusterIP, ClusterIPs: texts(s.ClusterIPs), ExternalIPs: texts(s.ExternalIPs),
			SessionAffinity: core.ServiceAffinityNone, InternalTrafficPolicy: new(core.ServiceInternalTrafficPolicyCluster),
		},
	}
	if len(s.ClusterIPs) > 0 {
		object.Spec.ClusterIP = object.Spec.ClusterIPs[0]
	}
	for _, protocol := range protocols {
		object.Spec.Ports = append(object.Spec.Ports, core.ServicePort{
			Name: portName(protocol), Protocol: protocol, Port: int32(s.Port), TargetPort: intstr.FromInt32(int32(s.Port)), NodePort: int32(s.NodePort),
		})
	}
	s.openOutside(&object)
	if s.InternalLocal {
		object.Spec.InternalTrafficPolicy = new(core.ServiceInternalTrafficPolicyLocal)
	}
	if s.Affinity != 0 {
		object.Spec.SessionAffinity = core.ServiceAffinityClientIP
		object.Spec.SessionAffinityConfig = &core.SessionAffinityConfig{ClientIP: &core.ClientIPConfig{TimeoutSeconds: new(s.Affinity)}}
	}
	return object
}

// openOutside writes what is about clients outside.
func (s ServiceSpec) openOutside(object *core.Service) {
	if s.NodePort != 0 {
		object.Spec.Type = core.ServiceTypeNodePort
	}
	if len(s.LoadBalancerIPs) > 0 {
		object.Spec.Type = core.ServiceTypeLoadBalancer
	}
	for _, addr := range s.LoadBalancerIPs {
		ingress := core.LoadBalancerIngress{IP: addr.String(), IPMode: new(core.LoadBalancerIPModeVIP)}
		object.Status.LoadBalancer.Ingress = append(object.Status.LoadBalancer.Ingress, ingress)
	}
	if s.ExternalLocal {
		object.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyLocal
	}
	object.Spec.LoadBalancerSourceRanges, object.Spec.HealthCheckNodePort = texts(s.SourceRanges), int32(s.HealthCheckPort)
}

func texts[T fmt.Stringer](values []T) (all []string) {
	for _, value := range values {
		all = append(all, value.String())
	}
	return all
}

// slices are one for each family and port of the endpoints, as the API server's controller makes them.
func (s ServiceSpec) slices() (all []*discovery.EndpointSlice) {
	type kind struct {
		family wire.Family
		port   uint16
	}
	of := map[kind]*discovery.EndpointSlice{}
	for _, endpoint := range s.Endpoints {
		which := kind{wire.FamilyOf(endpoint.At.Addr()), endpoint.At.Port()}
		slice := of[which]
		if slice == nil {
			slice = s.emptySlice(len(all), which.family, which.port)
			of[which] = slice
			all = append(all, slice)
		}
		slice.Endpoints = append(slice.Endpoints, endpoint.object())
	}
	return all
}

var addressTypes = [wire.Families]discovery.AddressType{wire.IPv4: discovery.AddressTypeIPv4, wire.IPv6: discovery.AddressTypeIPv6}

func (s ServiceSpec) emptySlice(number int, family wire.Family, port uint16) *discovery.EndpointSlice {
	slice := &discovery.EndpointSlice{
		TypeMeta: meta.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: meta.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("%s-%d", s.Name, number), Labels: map[string]string{discovery.LabelServiceName: s.Name},
		},
		AddressType: addressTypes[family],
	}
	for _, protocol := range protocols {
		slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: new(portName(protocol)), Protocol: new(protocol), Port: new(int32(port))})
	}
	return slice
}

func (e EndpointSpec) object() discovery.Endpoint {
	object := discovery.Endpoint{
		Addresses: []string{e.At.Addr().String()},
		Conditions: discovery.EndpointConditions{
			Ready: new(!e.NotReady && !e.Terminating), Serving: new(!e.NotServing && !e.NotReady), Terminating: new(e.Terminating),
		},
	}
	if e.Node != "" {
		object.NodeName = new(e.Node)
	}
	if e.Zone != "" {
		object.Zone = new(e.Zone)
	}
	if len(e.ForZones) > 0 {
		object.Hints = &discovery.EndpointHints{}
	}
	for _, zone := range e.ForZones {
		object.Hints.ForZones = append(object.Hints.ForZones, discovery.ForZone{Name: zone})
	}
	return object
}
