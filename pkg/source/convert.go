package source

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// labelProxyName is the label of what somebody else serves.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// served is the selector of labels that leaves out what has no address of its own, and what somebody else serves. EndpointSlices have
// these labels of their Service.
const served = "!" + corev1.IsHeadlessService + ",!" + labelProxyName

// isServed says of labels what the selector does, for sources that have none.
func isServed(labels map[string]string) bool {
	_, headless := labels[corev1.IsHeadlessService]
	_, others := labels[labelProxyName]
	return !headless && !others
}

// faults are what of an object can't be read.
type faults []string

func (f *faults) add(format string, args ...any) { *f = append(*f, fmt.Sprintf(format, args...)) }

// String says the first few.
func (f faults) String() string {
	const most = 3
	if len(f) > most {
		return fmt.Sprintf("%s; and %d more", strings.Join(f[:most], "; "), len(f)-most)
	}
	return strings.Join(f, "; ")
}

// address reads an address; it is not valid where it can't be read.
func (f *faults) address(what, text string) netip.Addr {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		f.add("%s %.60q is no address", what, text)
		return netip.Addr{}
	}
	return a.Unmap()
}

func (f *faults) addresses(what string, texts []string) (all []netip.Addr) {
	for _, text := range texts {
		if a := f.address(what, text); a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

// ranges reads who may ask a load balancer; nil: everybody may. Of texts none of which can be read it is nobody.
func (f *faults) ranges(texts []string) (all []netip.Prefix) {
	if len(texts) == 0 {
		return nil
	}
	all = make([]netip.Prefix, 0, len(texts))
	for _, text := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err == nil && p.Addr().Is4In6() {
			p, err = p.Addr().Unmap().Prefix(p.Bits() - 96)
		}
		if err != nil {
			f.add("loadBalancerSourceRange %.60q is no range of addresses", text)
			continue
		}
		all = append(all, p.Masked())
	}
	return all
}

// protocols are those that the API has.
var protocols = map[corev1.Protocol]wire.Protocol{"": wire.TCP, corev1.ProtocolTCP: wire.TCP, corev1.ProtocolUDP: wire.UDP, corev1.ProtocolSCTP: 132}

// port reads the protocol and the number of a port; ok is false where it can't.
func (f *faults) port(name string, protocol corev1.Protocol, port int32) (wire.Protocol, uint16, bool) {
	number, known := protocols[protocol]
	if !known {
		f.add("port %.60q has the protocol %.20q", name, protocol)
		return 0, 0, false
	}
	if port < 1 || port > 65535 {
		f.add("port %.60q has the number %d", name, port)
		return 0, 0, false
	}
	return number, uint16(port), true
}

// serviceOf reads a Service; ok is false where there is nothing to serve.
func (in *interner) serviceOf(o *corev1.Service) (s service.Service, ok bool) {
	addresses := o.Spec.ClusterIPs
	if len(addresses) == 0 && o.Spec.ClusterIP != "" {
		addresses = []string{o.Spec.ClusterIP}
	}
	if !isServed(o.Labels) || o.Spec.Type == corev1.ServiceTypeExternalName || len(addresses) == 0 || addresses[0] == corev1.ClusterIPNone {
		return service.Service{}, false
	}
	var f faults
	s = service.Service{
		Name: in.name(o.Namespace, o.Name), Created: o.CreationTimestamp.UTC(),
		ClusterIPs: f.addresses("clusterIP", addresses), ExternalIPs: f.addresses("externalIP", o.Spec.ExternalIPs),
		InternalLocal: o.Spec.InternalTrafficPolicy != nil && *o.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		ExternalLocal: o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		Affinity:      affinity(&o.Spec), SourceRanges: f.ranges(o.Spec.LoadBalancerSourceRanges),
	}
	if p := o.Spec.HealthCheckNodePort; p > 0 && p <= 65535 && s.ExternalLocal && o.Spec.Type == corev1.ServiceTypeLoadBalancer {
		s.HealthCheckPort = uint16(p)
	}
	for _, i := range o.Status.LoadBalancer.Ingress {
		if i.IP != "" && (i.IPMode == nil || *i.IPMode == corev1.LoadBalancerIPModeVIP) {
			s.LoadBalancerIPs = append(s.LoadBalancerIPs, f.addresses("address of the load balancer", []string{i.IP})...)
		}
	}
	for _, p := range o.Spec.Ports {
		protocol, number, ok := f.port(p.Name, p.Protocol, p.Port)
		if !ok {
			continue
		}
		port := service.Port{Name: in.text(p.Name), Protocol: protocol, Port: number}
		if p.NodePort > 0 && p.NodePort <= 65535 {
			port.NodePort = uint16(p.NodePort)
		}
		s.Ports = append(s.Ports, port)
	}
	s.Malformed = f.String()
	return s, true
}

// affinity is for how many seconds a client keeps its backend.
func affinity(spec *corev1.ServiceSpec) uint32 {
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	c := spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil || *c.ClientIP.TimeoutSeconds <= 0 {
		return uint32(corev1.DefaultClientIPServiceAffinitySeconds)
	}
	return uint32(*c.ClientIP.TimeoutSeconds)
}

// sliceOf reads an EndpointSlice; ok is false where it serves no Service of ours.
func (in *interner) sliceOf(o *discoveryv1.EndpointSlice) (s service.Slice, ok bool) {
	of := o.Labels[discoveryv1.LabelServiceName]
	addresses := o.AddressType == discoveryv1.AddressTypeIPv4 || o.AddressType == discoveryv1.AddressTypeIPv6
	if !isServed(o.Labels) || of == "" || !addresses {
		return service.Slice{}, false
	}
	var f faults
	s = service.Slice{Name: in.name(o.Namespace, o.Name), Service: in.text(of)}
	for _, p := range o.Ports {
		if p.Port == nil {
			continue // all ports, which no Service can mean
		}
		name := deref(p.Name, "")
		if protocol, number, ok := f.port(name, deref(p.Protocol, ""), *p.Port); ok {
			s.Ports = append(s.Ports, service.SlicePort{Name: in.text(name), Protocol: protocol, Port: number})
		}
	}
	if len(o.Endpoints) > 0 {
		s.Endpoints = make([]service.Endpoint, 0, len(o.Endpoints))
	}
	for i := range o.Endpoints {
		if e, ok := in.endpoint(&o.Endpoints[i], &f); ok {
			s.Endpoints = append(s.Endpoints, e)
		}
	}
	s.Malformed = f.String()
	return s, true
}

func (in *interner) endpoint(o *discoveryv1.Endpoint, f *faults) (service.Endpoint, bool) {
	if len(o.Addresses) == 0 {
		f.add("an endpoint without an address")
		return service.Endpoint{}, false
	}
	address := f.address("endpoint", o.Addresses[0])
	if !address.IsValid() {
		return service.Endpoint{}, false
	}
	ready := deref(o.Conditions.Ready, true)
	e := service.Endpoint{
		Address: address,
		Ready:   ready, Serving: deref(o.Conditions.Serving, ready), Terminating: deref(o.Conditions.Terminating, false),
		Node: in.text(deref(o.NodeName, "")), Zone: in.text(deref(o.Zone, "")),
	}
	if o.Hints != nil {
		for _, z := range o.Hints.ForZones {
			e.ForZones = append(e.ForZones, in.text(z.Name))
		}
		for _, n := range o.Hints.ForNodes {
			e.ForNodes = append(e.ForNodes, in.text(n.Name))
		}
	}
	return e, true
}

// cidrsOf reads a ServiceCIDR. The API lets no malformed range in.
func (in *interner) cidrsOf(o *networkingv1.ServiceCIDR) (c cidrs, ok bool) {
	for _, text := range o.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			c = append(c, p.Masked())
		}
	}
	return c, true
}

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// interner has equal texts share their memory: a hundred thousand endpoints are on few nodes, in fewer zones.
type interner struct{ known map[string]string }

// mostInterned bounds what is kept for the sake of what may come: names that are no longer used go with it.
const mostInterned = 1 << 16

func (in *interner) text(s string) string {
	if s == "" {
		return ""
	}
	if known, ok := in.known[s]; ok {
		return known
	}
	if in.known == nil || len(in.known) >= mostInterned {
		in.known = map[string]string{}
	}
	s = strings.Clone(s)
	in.known[s] = s
	return s
}

func (in *interner) name(namespace, name string) service.Name {
	return service.Name{Namespace: in.text(namespace), Name: name}
}
