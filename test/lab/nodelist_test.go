package lab

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/test/testdata"
)

// The lab's nodes are those of the list that a real API server gave.
func TestNodeListIsTheRealOne(t *testing.T) {
	var given, ours corev1.NodeList
	if err := yaml.UnmarshalStrict(testdata.Nodes, &given); err != nil {
		t.Fatal(err)
	}
	raw, err := NodeList(defaultSpec(1), defaultSpec(2), defaultSpec(3))
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
	raw, err := NodeList(defaultSpec(1), defaultSpec(2), defaultSpec(3), defaultSpec(4), NodeSpec{Name: "bare"})
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

func TestChecksum(t *testing.T) {
	// RFC 1071, section 3: the sum of these is ddf2.
	if got := checksum([]byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}); got != ^uint16(0xddf2) {
		t.Errorf("checksum %#x, want %#x", got, ^uint16(0xddf2))
	}
	request := echoRequest(0)
	if _, err := judge(request, append([]byte{icmpEchoReply}, request[1:]...), netip.Addr{}); err == nil {
		t.Error("a reply whose type was changed without its checksum passes")
	}
}
