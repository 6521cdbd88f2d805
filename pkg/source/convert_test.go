package source

import (
	"bytes"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

var byAddress = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

// wholeService has something in every part of a Service.
func wholeService() *corev1.Service {
	return &corev1.Service{
		TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", ResourceVersion: "77", CreationTimestamp: metav1.Unix(1_700_000_000, 0), UID: "1-2",
			Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"note": "n"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 5000))}},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": strings.Repeat("s", 1000)},
			ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7", "fd00:96::7"}, ExternalIPs: []string{"192.0.2.7"},
			Ports: []corev1.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromString("web"), NodePort: 30080, AppProtocol: new("h2c")},
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}, {Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 99},
			},
			SessionAffinity: corev1.ServiceAffinityClientIP, SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(60))}},
			InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyLocal), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 31000,
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, LoadBalancerIP: "192.0.2.99",
			LoadBalancerSourceRanges: []string{"203.0.113.7/24", " 2001:db8::/32", "::ffff:192.0.2.0/120"},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
			{IP: "198.51.100.1"}, {IP: "198.51.100.2", IPMode: new(corev1.LoadBalancerIPModeProxy)}, {IP: "2001:db8::1", IPMode: new(corev1.LoadBalancerIPModeVIP)}, {Hostname: "lb.example.org"},
		}}},
	}
}

func wantService() service.Service {
	return service.Service{
		Name: service.Name{Namespace: "shop", Name: "web"}, Created: time.Unix(1_700_000_000, 0).UTC(),
		ClusterIPs:      []netip.Addr{netip.MustParseAddr("10.96.0.7"), netip.MustParseAddr("fd00:96::7")},
		ExternalIPs:     []netip.Addr{netip.MustParseAddr("192.0.2.7")},
		LoadBalancerIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")},
		Ports: []service.Port{
			{Name: "http", Protocol: wire.TCP, Port: 80, NodePort: 30080}, {Name: "dns", Protocol: wire.UDP, Port: 53}, {Name: "sctp", Protocol: 132, Port: 99},
		},
		InternalLocal: true, ExternalLocal: true, Affinity: 60, HealthCheckPort: 31000,
		SourceRanges: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("192.0.2.0/24")},
	}
}

// wholeSlice has something in every part of an EndpointSlice.
func wholeSlice() *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web-x7", ResourceVersion: "78", Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "Service", Name: strings.Repeat("o", 1000)}},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080)), AppProtocol: new("h2c")}, {Name: new("any")}, {Port: new(int32(53))}},
		Endpoints: []discoveryv1.Endpoint{
			{
				Addresses: []string{"10.244.1.5", "10.244.1.6"}, Hostname: new("web-0"), NodeName: new("n1"), Zone: new("z1"), TargetRef: &corev1.ObjectReference{Name: strings.Repeat("p", 3000)},
				DeprecatedTopology: map[string]string{"a": strings.Repeat("t", 1000)},
				Hints:              &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}, {Name: "z2"}}, ForNodes: []discoveryv1.ForNode{{Name: "n1"}}},
			},
			{Addresses: []string{"10.244.2.5"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false)}},
			{Addresses: []string{"10.244.3.5"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}},
		},
	}
}

func wantSlice() service.Slice {
	return service.Slice{
		Name: service.Name{Namespace: "shop", Name: "web-x7"}, Service: "web",
		Ports: []service.SlicePort{{Name: "http", Protocol: wire.TCP, Port: 8080}, {Protocol: wire.TCP, Port: 53}},
		Endpoints: []service.Endpoint{
			{Address: netip.MustParseAddr("10.244.1.5"), Ready: true, Serving: true, Node: "n1", Zone: "z1", ForZones: []string{"z1", "z2"}, ForNodes: []string{"n1"}},
			{Address: netip.MustParseAddr("10.244.2.5")},
			{Address: netip.MustParseAddr("10.244.3.5"), Serving: true, Terminating: true},
		},
	}
}

func TestServiceIsRead(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(*corev1.Service)
		want   func(*service.Service) // nil: nothing is served
	}{
		{"whole", func(*corev1.Service) {}, func(*service.Service) {}},
		{"ExternalName", func(o *corev1.Service) { o.Spec.Type = corev1.ServiceTypeExternalName }, nil},
		{"headless", func(o *corev1.Service) { o.Spec.ClusterIP, o.Spec.ClusterIPs = "None", []string{"None"} }, nil},
		{"no address yet", func(o *corev1.Service) { o.Spec.ClusterIP, o.Spec.ClusterIPs = "", nil }, nil},
		{"labelled headless", func(o *corev1.Service) { o.Labels[corev1.IsHeadlessService] = "" }, nil},
		{"somebody else's", func(o *corev1.Service) { o.Labels[labelProxyName] = "other" }, nil},
		{"clusterIP alone", func(o *corev1.Service) { o.Spec.ClusterIPs = nil }, func(s *service.Service) { s.ClusterIPs = s.ClusterIPs[:1] }},
		{"no affinity", func(o *corev1.Service) { o.Spec.SessionAffinity = corev1.ServiceAffinityNone }, func(s *service.Service) { s.Affinity = 0 }},
		{"usual affinity", func(o *corev1.Service) { o.Spec.SessionAffinityConfig = nil }, func(s *service.Service) { s.Affinity = 10800 }},
		{"no policies", func(o *corev1.Service) { o.Spec.InternalTrafficPolicy, o.Spec.ExternalTrafficPolicy = nil, "" }, func(s *service.Service) {
			s.InternalLocal, s.ExternalLocal, s.HealthCheckPort = false, false, 0
		}},
		{"no load balancer", func(o *corev1.Service) { o.Spec.Type = corev1.ServiceTypeNodePort }, func(s *service.Service) { s.HealthCheckPort = 0 }},
		{"malformed address", func(o *corev1.Service) { o.Spec.ClusterIPs[0] = "10.96.0" }, func(s *service.Service) {
			s.ClusterIPs, s.Malformed = s.ClusterIPs[1:], `clusterIP "10.96.0" is no address`
		}},
		{"address with a zone", func(o *corev1.Service) { o.Spec.ExternalIPs[0] = "fe80::1%eth0" }, func(s *service.Service) {
			s.ExternalIPs, s.Malformed = nil, `externalIP "fe80::1%eth0" is no address`
		}},
		{"mapped address", func(o *corev1.Service) { o.Spec.ExternalIPs[0] = "::ffff:192.0.2.7" }, func(*service.Service) {}},
		{"no source ranges", func(o *corev1.Service) { o.Spec.LoadBalancerSourceRanges = nil }, func(s *service.Service) { s.SourceRanges = nil }},
		{"malformed source ranges", func(o *corev1.Service) { o.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0", "::ffff:0.0.0.0/90"} }, func(s *service.Service) {
			s.SourceRanges = []netip.Prefix{} // nobody
			s.Malformed = `loadBalancerSourceRange "10.0.0.0" is no range of addresses; loadBalancerSourceRange "::ffff:0.0.0.0/90" is no range of addresses`
		}},
		{"malformed ports", func(o *corev1.Service) {
			o.Spec.Ports[0].Port, o.Spec.Ports[1].Protocol, o.Spec.Ports[2].Port = 65536, "RAW", 0
			o.Spec.ExternalIPs = []string{"a"}
		}, func(s *service.Service) {
			s.Ports, s.ExternalIPs = nil, nil
			s.Malformed = `externalIP "a" is no address; port "http" has the number 65536; port "dns" has the protocol "RAW"; and 1 more`
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			o := wholeService()
			c.change(o)
			got, ok := new(interner).serviceOf(o)
			if ok != (c.want != nil) {
				t.Fatalf("read: %v, %+v", ok, got)
			}
			if !ok {
				return
			}
			want := wantService()
			c.want(&want)
			if diff := cmp.Diff(want, got, byAddress); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestSliceIsRead(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(*discoveryv1.EndpointSlice)
		want   func(*service.Slice) // nil: nothing is served
	}{
		{"whole", func(*discoveryv1.EndpointSlice) {}, func(*service.Slice) {}},
		{"names of hosts", func(o *discoveryv1.EndpointSlice) { o.AddressType = discoveryv1.AddressTypeFQDN }, nil},
		{"of no Service", func(o *discoveryv1.EndpointSlice) { o.Labels = nil }, nil},
		{"of a headless one", func(o *discoveryv1.EndpointSlice) { o.Labels[corev1.IsHeadlessService] = "" }, nil},
		{"of somebody else's", func(o *discoveryv1.EndpointSlice) { o.Labels[labelProxyName] = "x" }, nil},
		{"empty", func(o *discoveryv1.EndpointSlice) { o.Endpoints, o.Ports = nil, nil }, func(s *service.Slice) { s.Endpoints, s.Ports = nil, nil }},
		{"serving is what ready is", func(o *discoveryv1.EndpointSlice) { o.Endpoints[1].Conditions.Ready = nil }, func(s *service.Slice) { s.Endpoints[1].Ready, s.Endpoints[1].Serving = true, true }},
		{"malformed", func(o *discoveryv1.EndpointSlice) {
			o.Endpoints[0].Addresses[0], o.Endpoints[1].Addresses, o.Ports[0].Port = "10.244", nil, new(int32(-1))
		}, func(s *service.Slice) {
			s.Endpoints, s.Ports = s.Endpoints[2:], s.Ports[1:]
			s.Malformed = `port "http" has the number -1; endpoint "10.244" is no address; an endpoint without an address`
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			o := wholeSlice()
			c.change(o)
			got, ok := new(interner).sliceOf(o)
			if ok != (c.want != nil) {
				t.Fatalf("read: %v, %+v", ok, got)
			}
			if !ok {
				return
			}
			want := wantSlice()
			c.want(&want)
			if diff := cmp.Diff(want, got, byAddress); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// servicesCodec encodes and decodes as the API does.
func servicesCodec(t testing.TB) *protobuf.Serializer {
	t.Helper()
	scheme := apiruntime.NewScheme()
	for _, g := range []group{core, discovery, networking} {
		if err := g.types(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return protobuf.NewSerializer(scheme, scheme)
}

func encodeWith(t testing.TB, c *protobuf.Serializer, o apiruntime.Object) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := c.Encode(o, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// read is what becomes of an object, and what the reflector needs of it; empty: it is none that is read.
func read(t testing.TB, o apiruntime.Object) (all []any) {
	t.Helper()
	var in interner
	switch o := o.(type) {
	case *corev1.Service:
		s, ok := in.serviceOf(o)
		return []any{s, ok, o.ResourceVersion}
	case *discoveryv1.EndpointSlice:
		s, ok := in.sliceOf(o)
		return []any{s, ok, o.ResourceVersion}
	case *networkingv1.ServiceCIDR:
		c, ok := in.cidrsOf(o)
		return []any{c, ok, o.ResourceVersion}
	}
	return nil
}

func wholeCIDR() *networkingv1.ServiceCIDR {
	o := apiCIDR("kubernetes", "10.96.3.0/16", "nonsense", "fd00:96::/112")
	o.TypeMeta, o.ResourceVersion = typeOf("servicecidrs"), "7"
	o.Status.Conditions = []metav1.Condition{{Type: "Ready", Message: strings.Repeat("m", 900)}}
	return o
}

// Of what is pruned, the same is read as of the whole.
func TestServicesPruned(t *testing.T) {
	c := servicesCodec(t)
	for _, o := range []apiruntime.Object{wholeService(), wholeSlice(), wholeCIDR()} {
		data := encodeWith(t, c, o)
		pruned := prune(data)
		if len(pruned) > len(data)/2 {
			t.Errorf("%T: %d of %d bytes are kept", o, len(pruned), len(data))
		}
		got, _, err := c.Decode(pruned, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(read(t, o), read(t, got), byAddress); diff != "" {
			t.Errorf("-whole +pruned:\n%s", diff)
		}
	}
	end := wholeSlice()
	end.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	got, _, err := c.Decode(prune(encodeWith(t, c, end)), nil, nil)
	if err != nil || got.(*discoveryv1.EndpointSlice).Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Errorf("the end of a list in a watch is not seen: %v, %v", got, err)
	}
	list := &discoveryv1.EndpointSliceList{TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "9"}, Items: []discoveryv1.EndpointSlice{*wholeSlice(), *wholeSlice()}}
	kept, err := pruneList(bytes.NewReader(encodeWith(t, c, list)), leanItems["endpointslices"])
	if err != nil {
		t.Fatal(err)
	}
	o, _, err := c.Decode(kept, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	items := o.(*discoveryv1.EndpointSliceList).Items
	if len(items) != 2 || items[1].Endpoints[0].TargetRef != nil {
		t.Fatalf("list: %+v", items)
	}
	if s, ok := new(interner).sliceOf(&items[1]); !ok || cmp.Diff(wantSlice(), s, byAddress) != "" {
		t.Errorf("of the list %+v is read", s)
	}
}

// Whatever is sent: pruning changes nothing of what is read, and nothing is read that is no address.
func FuzzServices(f *testing.F) {
	c := servicesCodec(f)
	s, slice, cidr := wholeService(), wholeSlice(), wholeCIDR() // without their long texts: large inputs are executed a hundred times less often
	s.ManagedFields, s.Spec.Selector = nil, map[string]string{"app": "s"}
	slice.OwnerReferences, slice.Endpoints[0].TargetRef, slice.Endpoints[0].DeprecatedTopology = nil, nil, nil
	cidr.Status.Conditions = nil
	for _, o := range []apiruntime.Object{s, slice, cidr} {
		whole := encodeWith(f, c, o)
		for _, n := range []int{len(whole), len(whole) - 1, 100, 30} {
			f.Add(whole[:n])
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		o, _, err := c.Decode(data, nil, nil)
		_, _, _ = c.Decode(prune(data), nil, nil) // no more than an error
		if err != nil {
			return
		}
		want := read(t, o)
		if want == nil {
			return
		}
		got, _, err := c.Decode(prune(encodeWith(t, c, o)), nil, nil) // as an API server writes it, see FuzzPrune
		if err != nil {
			t.Fatalf("refused when pruned: %v", err)
		}
		if diff := cmp.Diff(want, read(t, got), byAddress); diff != "" {
			t.Errorf("-whole +pruned:\n%s", diff)
		}
		if s, isSlice := o.(*discoveryv1.EndpointSlice); isSlice {
			s, _ := new(interner).sliceOf(s)
			for _, e := range s.Endpoints {
				if !e.Address.IsValid() || e.Address.Zone() != "" || e.Address.Is4In6() {
					t.Errorf("%v is no address of an endpoint", e.Address)
				}
			}
		}
	})
}

// A hundred thousand endpoints stay small: texts that many have in common are one.
func TestManyEndpoints(t *testing.T) {
	const services, each = 1000, 10 // a tenth of what a large cluster has
	p := newPending()
	in := &interner{}
	kept := &kept[service.Slice, *discoveryv1.EndpointSlice]{pending: p, table: &p.slices, reach: p.reach(&rest.Config{}, sliceResource, kindSlice), read: in.sliceOf}
	c := servicesCodec(t)
	used := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := used()
	for i := range services {
		o := wholeSlice()
		o.Name, o.Labels[discoveryv1.LabelServiceName] = fmt.Sprint("web-", i), fmt.Sprint("web-", i)
		for j := range each {
			e := o.Endpoints[0]
			e.Addresses = []string{fmt.Sprintf("10.%d.%d.%d", j, i/250, i%250)}
			e.NodeName, e.Hints = new(fmt.Sprint("node-", (i+j)%10)), nil
			o.Endpoints = append(o.Endpoints, e)
		}
		o.Endpoints = o.Endpoints[3:]
		decoded, _, err := c.Decode(prune(encodeWith(t, c, o)), nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := kept.Add(decoded); err != nil {
			t.Fatal(err)
		}
	}
	took := used() - before
	if per := took / (services * each); per > 200 {
		t.Errorf("an endpoint takes %d bytes", per)
	} else {
		t.Logf("an endpoint takes %d bytes", per)
	}
	runtime.KeepAlive(kept)
}
