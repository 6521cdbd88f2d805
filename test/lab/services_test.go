package lab

import (
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"
)

// The list that agents read has Nodes, Services and EndpointSlices; each change of one keeps the others.
func TestServicesInTheList(t *testing.T) {
	l := &Lab{Dir: t.TempDir()}
	near := EndpointSpec{At: netip.MustParseAddrPort("10.244.0.2:8080"), Node: "k8s-n1"}
	leaving := EndpointSpec{At: netip.MustParseAddrPort("[fd00:10:244:1::2]:8080"), Node: "k8s-n2", Terminating: true, Zone: "a", ForZones: []string{"b"}}
	elsewhere := EndpointSpec{At: netip.MustParseAddrPort("10.244.1.3:9090"), NotReady: true}
	if err := l.SetServices(ServiceSpec{
		Name: "web", ClusterIPs: []netip.Addr{ServiceCIDR[0].Addr().Next(), ServiceCIDR[1].Addr().Next()}, Port: 80,
		LoadBalancerIPs: []netip.Addr{netip.MustParseAddr("192.0.2.9")}, InternalLocal: true, Affinity: 5,
		Endpoints: []EndpointSpec{near, leaving, elsewhere},
	}); err != nil {
		t.Fatal(err)
	}
	if err := l.WriteNodes(NodeSpec{Name: "k8s-n1"}); err != nil {
		t.Fatal(err)
	}
	var list struct {
		Kind  string           `json:"kind"`
		Items []map[string]any `json:"items"`
	}
	raw, err := os.ReadFile(l.NodesFile())
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(raw, &list); err != nil {
		t.Fatal(err)
	}
	var service core.Service
	var slices []discovery.EndpointSlice
	var kinds []string
	for _, item := range list.Items {
		kinds = append(kinds, item["kind"].(string))
		text, err := yaml.Marshal(item)
		if err != nil {
			t.Fatal(err)
		}
		switch item["kind"] {
		case "Service":
			err = yaml.UnmarshalStrict(text, &service)
		case "EndpointSlice":
			slices = append(slices, discovery.EndpointSlice{})
			err = yaml.UnmarshalStrict(text, &slices[len(slices)-1])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"Node", "Service", "EndpointSlice", "EndpointSlice", "EndpointSlice"}, kinds); diff != "" || list.Kind != "List" {
		t.Fatalf("a %s of other kinds:\n%s", list.Kind, diff)
	}
	if service.Spec.ClusterIP != "10.96.0.1" || len(service.Spec.Ports) != 2 || service.Status.LoadBalancer.Ingress[0].IP != "192.0.2.9" {
		t.Errorf("the Service is %+v", service)
	}
	got := slices[1].Endpoints[0]
	if slices[1].AddressType != discovery.AddressTypeIPv6 || *got.Conditions.Ready || !*got.Conditions.Serving || !*got.Conditions.Terminating || got.Hints.ForZones[0].Name != "b" {
		t.Errorf("the terminating endpoint is %+v", got)
	}
	if *slices[2].Endpoints[0].Conditions.Serving || *slices[2].Ports[0].Port != 9090 || slices[2].Endpoints[0].NodeName != nil {
		t.Errorf("the third slice is %+v", slices[2])
	}
}
