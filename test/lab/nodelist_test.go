package lab

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/testdata"
)

// defaultSpecs are the first nodes of a lab.
func defaultSpecs(t *testing.T, opts Options, nodes int) (specs []NodeSpec) {
	t.Helper()
	opts, err := opts.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	for i := range nodes {
		specs = append(specs, opts.defaultSpec(i+1))
	}
	return specs
}

// The lab's nodes are those of the list that a real API server gave.
func TestNodeListIsTheRealOne(t *testing.T) {
	var given, ours corev1.NodeList
	if err := yaml.UnmarshalStrict(testdata.Nodes, &given); err != nil {
		t.Fatal(err)
	}
	raw, err := NodeList(defaultSpecs(t, Options{}, 3)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(raw, &ours); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(given, ours); diff != "" {
		t.Errorf("the list that the lab writes differs from test/testdata/nodes.yaml:\n%s", diff)
	}
}

func TestNodeListGrows(t *testing.T) {
	raw, err := NodeList(append(defaultSpecs(t, Options{}, 4), NodeSpec{Name: "bare"})...)
	if err != nil {
		t.Fatal(err)
	}
	var list corev1.NodeList
	if err := yaml.UnmarshalStrict(raw, &list); err != nil {
		t.Fatal(err)
	}
	uids := map[string]bool{}
	for _, node := range list.Items {
		uids[string(node.UID)] = true
	}
	if len(list.Items) != 5 || len(uids) != 5 {
		t.Fatalf("%d nodes with %d uids, want 5 of each", len(list.Items), len(uids))
	}
	fourth := list.Items[3]
	if fourth.Name != "k8s-n4" || fourth.Spec.PodCIDR != "10.244.3.0/24" || fourth.Status.Addresses[0].Address != "172.18.0.14" {
		t.Errorf("node 4 is %s with %s at %s", fourth.Name, fourth.Spec.PodCIDR, fourth.Status.Addresses[0].Address)
	}
	bare := list.Items[4]
	if bare.Spec.PodCIDR != "" || len(bare.Status.Addresses) != 1 {
		t.Errorf("a node without podCIDR and InternalIP has %q and %v", bare.Spec.PodCIDR, bare.Status.Addresses)
	}
}

func TestNodeListOfFamilies(t *testing.T) {
	opts := Options{Families: []wire.Family{wire.IPv6, wire.IPv4}, Underlay: []wire.Family{wire.IPv4, wire.IPv6}, Links: 2}
	raw, err := NodeList(defaultSpecs(t, opts, 2)...)
	if err != nil {
		t.Fatal(err)
	}
	var list corev1.NodeList
	if err := yaml.UnmarshalStrict(raw, &list); err != nil {
		t.Fatal(err)
	}
	second := list.Items[1]
	if diff := cmp.Diff([]string{"fd00:10:244:1::/64", "10.244.1.0/24"}, second.Spec.PodCIDRs); diff != "" || second.Spec.PodCIDR != second.Spec.PodCIDRs[0] {
		t.Errorf("podCIDR is %s, podCIDRs differ:\n%s", second.Spec.PodCIDR, diff)
	}
	var addrs []string
	for _, a := range second.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			addrs = append(addrs, a.Address)
		}
	}
	if diff := cmp.Diff([]string{"172.19.0.12", "fd00:172:19::12"}, addrs); diff != "" {
		t.Errorf("InternalIPs differ:\n%s", diff)
	}
}

func TestParseIP(t *testing.T) {
	addrs := [wire.Families][2]netip.Addr{
		{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}, {netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")},
	}
	v4 := slices.Concat([]byte{0x46, 9: 17, 11: 0}, addrs[wire.IPv4][0].AsSlice(), addrs[wire.IPv4][1].AsSlice(), []byte{1, 1, 1, 0})
	v6 := slices.Concat([]byte{0x60, 6: 17, 7: 64}, addrs[wire.IPv6][0].AsSlice(), addrs[wire.IPv6][1].AsSlice())
	fragment := slices.Clone(v6)
	fragment[6] = 44
	for _, tc := range []struct {
		name   string
		family wire.Family
		packet []byte
		whole  int // as many bytes are needed
	}{
		{"IPv4 with an option", wire.IPv4, v4, 24},
		{"IPv6", wire.IPv6, v6, 40},
		{"an IPv6 fragment", wire.IPv6, append(fragment, 17, 0, 0, 0, 0, 0, 0, 9), 40},
	} {
		p, ok := parseIP(append(tc.packet, "rest"...))
		if !ok || p.source != addrs[tc.family][0] || p.destination != addrs[tc.family][1] || p.protocol != 17 || string(p.payload) != "rest" {
			t.Errorf("%s: %+v, %v", tc.name, p, ok)
		}
		for length := range len(tc.packet) {
			if _, ok := parseIP(tc.packet[:length]); ok != (length >= tc.whole) {
				t.Errorf("%s cut to %d bytes: taken for a packet: %v", tc.name, length, ok)
			}
		}
	}
	if _, ok := parseIP(make([]byte, 60)); ok {
		t.Error("version 0 is taken for a packet")
	}
}

func TestChecksum(t *testing.T) {
	// RFC 1071, section 3: the sum of these is ddf2.
	if got := checksum([]byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}); got != ^uint16(0xddf2) {
		t.Errorf("checksum %#x, want %#x", got, ^uint16(0xddf2))
	}
	protocol := icmps[wire.IPv4]
	request := protocol.request(0)
	if _, err := protocol.judge(request, append([]byte{protocol.reply}, request[1:]...), netip.Addr{}); err == nil {
		t.Error("a reply whose type was changed without its checksum passes")
	}
}
