package modes

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/tools/bench/result"
)

// Services are those that a network has.
type Services struct {
	Number int
	// Served is the path whose server is the only endpoint of one of them; empty: no traffic is for any.
	Served string
}

// Service is a Service. Those of networks have one endpoint: the fewer there are, the less netfilter has to do.
type Service struct {
	Name      string // namespace/name
	IP        netip.Addr
	Ports     []ServicePort
	Endpoints []Endpoint
	// Served says that traffic is for it.
	Served bool
}

// ServicePort is one of a Service's ports, and where its endpoints listen.
type ServicePort struct {
	Protocol     string // tcp, udp
	Port, Target uint16
	NodePort     uint16 // 0: none
}

// Endpoint is a ready one, on a node of that name.
type Endpoint struct {
	Addr netip.Addr
	Node string
}

// The ports of the Service that traffic is for. The client of a sample opens more connections than it has ports towards one port.
const (
	servicePort  = 80
	nodePort     = 30080
	TargetPort   = 8080
	ServicePorts = 4
)

// Frontend is where the client of a path sends what is for that Service: its ClusterIP or, from outside, its NodePort on the first node; and its first port.
func (n *Network) Frontend(path string) netip.AddrPort {
	if inbound(path) {
		return netip.AddrPortFrom(n.lab.Nodes[0].Addr(), nodePort)
	}
	return netip.AddrPortFrom(after(serviceCIDR[n.setup.family].Addr(), 5), servicePort)
}

// inbound says that a path begins at the host outside.
func inbound(path string) bool { return path == result.Inbound || path == result.InboundLocal }

// after is the address n after another one.
func after(a netip.Addr, n int) netip.Addr {
	raw := a.AsSlice()
	last := raw[len(raw)-4:]
	binary.BigEndian.PutUint32(last, binary.BigEndian.Uint32(last)+uint32(n))
	sum, _ := netip.AddrFromSlice(raw) // as long as it was
	return sum
}

// farServices have endpoints on far nodes.
func farServices(k int, family wire.Family) []Service {
	all := make([]Service, k)
	for i := range all {
		all[i] = Service{
			Name: fmt.Sprintf("default/service-%d", i), IP: after(serviceCIDR[family].Addr(), i+10),
			Ports: []ServicePort{{"tcp", servicePort, TargetPort, 0}}, Endpoints: []Endpoint{{Addr: after(clusterCIDR[family].Addr(), i+10)}},
		}
	}
	return all
}

// all are as many as there are to be.
func (n *Network) all(s Services) []Service {
	if s.Served == "" || s.Number < 1 {
		return farServices(max(s.Number, 0), n.setup.family)
	}
	_, server := n.Ends(s.Served)
	return withServed(farServices(s.Number-1, n.setup.family), n.Frontend("").Addr(), Endpoint{server.Addr(), n.nodeOf(server)})
}

// withServed has the one that traffic is for among others: in the middle, since kube-proxy's order is any.
func withServed(others []Service, ip netip.Addr, server Endpoint) []Service {
	served := Service{Name: "default/served", IP: ip, Endpoints: []Endpoint{server}, Served: true, Ports: []ServicePort{{"udp", servicePort, TargetPort, nodePort}}}
	for i := range uint16(ServicePorts) {
		served.Ports = append(served.Ports, ServicePort{"tcp", servicePort + i, TargetPort + i, nodePort + i})
	}
	return slices.Insert(others, len(others)/2, served)
}

// nodeOf is the name of the node that a pod is on.
func (n *Network) nodeOf(pod *lab.Namespace) string {
	if pod == n.hosts[remote] {
		return n.lab.Nodes[1].Name
	}
	return n.lab.Nodes[0].Name
}

// Endpoint is the address of its only endpoint.
func (s Service) Endpoint() netip.Addr { return s.Endpoints[0].Addr }

// Backend is where that listens.
func (s Service) Backend(p ServicePort) netip.AddrPort {
	return netip.AddrPortFrom(s.Endpoint(), p.Target)
}

// Title names a port as kube-proxy does.
func (p ServicePort) Title() string { return fmt.Sprintf("%s-%d", p.Protocol, p.Port) }

// Hash names the chain of a Service's port as kube-proxy does: so many letters and digits that depend on what the chain is for.
func (s Service) Hash(p ServicePort, length int) string { return hash(s.Name+":"+p.Title(), length) }

// EndpointHash names the chain of its endpoint.
func (s Service) EndpointHash(p ServicePort, length int) string {
	return hash(s.Name+":"+p.Title()+s.Endpoint().String(), length)
}

func hash(of string, length int) string {
	sum := sha256.Sum256([]byte(of))
	return base32.StdEncoding.EncodeToString(sum[:])[:length]
}

// Objects are the Service and its EndpointSlice as the API has them.
func (s Service) Objects() (*corev1.Service, *discoveryv1.EndpointSlice) {
	namespace, name, _ := strings.Cut(s.Name, "/")
	ip := s.IP.String()
	service := &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, SessionAffinity: corev1.ServiceAffinityNone},
	}
	slice := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name + "-" + strings.ToLower(hash(s.Name, 5)), Labels: map[string]string{discoveryv1.LabelServiceName: name},
		},
		AddressType: map[wire.Family]discoveryv1.AddressType{wire.IPv4: discoveryv1.AddressTypeIPv4, wire.IPv6: discoveryv1.AddressTypeIPv6}[wire.FamilyOf(s.IP)],
	}
	for _, p := range s.Ports {
		protocol, target := corev1.Protocol(strings.ToUpper(p.Protocol)), int32(p.Target)
		service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{
			Name: p.Title(), Protocol: protocol, Port: int32(p.Port), TargetPort: intstr.FromInt32(target), NodePort: int32(p.NodePort),
		})
		if p.NodePort != 0 {
			service.Spec.Type = corev1.ServiceTypeNodePort
		}
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new(p.Title()), Protocol: &protocol, Port: &target})
	}
	for _, e := range s.Endpoints {
		endpoint := discoveryv1.Endpoint{
			Addresses:  []string{e.Addr.String()},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
		}
		if e.Node != "" {
			endpoint.NodeName = new(e.Node)
		}
		slice.Endpoints = append(slice.Endpoints, endpoint)
	}
	return service, slice
}

// list is what the agents' file says of so many nodes, and of Services where the agents serve them.
func (n *Network) list(nodes int, s Services) ([]byte, error) {
	raw, err := lab.NodeListJSON(FarNodes(n.lab.NodeSpecs(), nodes, n.setup.family)...)
	if err != nil || !n.setup.services {
		return raw, err
	}
	list := struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Items      []any  `json:"items"`
	}{}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("read a list of Nodes: %w", err)
	}
	for _, one := range n.all(s) {
		service, slice := one.Objects()
		list.Items = append(list.Items, service, slice)
	}
	return json.Marshal(list)
}

// tellServices tells the agents of Services, and waits until their maps are complete.
func (n *Network) tellServices(ctx context.Context, s Services) error {
	raw, err := n.list(n.nodes, s)
	if err != nil {
		return err
	}
	if err := n.lab.WriteNodesFile(raw); err != nil {
		return err
	}
	all := n.all(s)
	return n.forAll(func(node *lab.Node) error { return waitForServices(ctx, node, all) })
}

// waitForServices waits until the maps of a node have these Services and no others.
func waitForServices(ctx context.Context, node *lab.Node, all []Service) error {
	for {
		missing := ServicesOf(node, all)
		if missing == nil || ctx.Err() != nil {
			return missing
		}
		time.Sleep(50 * time.Millisecond) // neither a map nor the agent tells when it is complete
	}
}
