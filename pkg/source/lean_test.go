package source

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

// codec encodes and decodes as the API does.
func codec(t testing.TB) *protobuf.Serializer {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	return protobuf.NewSerializer(scheme, scheme)
}

func encode(t testing.TB, o runtime.Object) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := codec(t).Encode(o, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// wholeNode has something in every part of a Node.
func wholeNode() *corev1.Node {
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Name: "n1", ResourceVersion: "77", CreationTimestamp: metav1.Unix(1_700_000_000, 0), UID: "1-2",
			Labels:        map[string]string{corev1.LabelTopologyZone: "west", "role": strings.Repeat("r", 60), "zone": strings.Repeat("z", 60)},
			Annotations:   map[string]string{metav1.InitialEventsAnnotationKey: "true"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 5000))}},
		},
		Spec: corev1.NodeSpec{
			PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24", "fd00::/64"}, ProviderID: "cloud://1", Unschedulable: true,
			Taints: []corev1.Taint{{Key: strings.Repeat("t", 60), Effect: corev1.TaintEffectNoSchedule}, {Key: leavingTaint, Value: "1700000000", Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeHostName, Address: "n1"}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Unix(1_700_000_001, 0))}},
			Images:     []corev1.ContainerImage{{Names: []string{strings.Repeat("i", 9000)}, SizeBytes: 7}},
			Phase:      corev1.NodeRunning,
		},
	}
}

// Of what is pruned, the same is read as of the whole.
func TestPruned(t *testing.T) {
	decode := func(data []byte) runtime.Object {
		o, _, err := codec(t).Decode(data, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	s := &store{self: "n1", observed: func(*Condition) {}}
	trimmed := func(n *corev1.Node) any {
		kept, err := s.trim(n)
		if err != nil {
			t.Fatal(err)
		}
		return kept
	}
	data := encode(t, wholeNode())
	pruned := prune(data)
	if len(pruned) > 500 || len(data) < 14_000 {
		t.Errorf("%d of %d bytes are kept", len(pruned), len(data))
	}
	if diff := cmp.Diff(trimmed(wholeNode()), trimmed(decode(pruned).(*corev1.Node))); diff != "" {
		t.Errorf("read of the whole and of the pruned Node:\n%s", diff)
	}
	if n, err := convert(decode(pruned)); err != nil || n.Zone != "west" || !n.Leaving {
		t.Errorf("the zone is read as %q, leaving as %t, error %v", n.Zone, n.Leaving, err)
	}
	if kept := decode(pruned).(*corev1.Node).Spec.Taints; len(kept) != 1 {
		t.Errorf("taints are kept that nobody reads: %v", kept)
	}
	if kept := decode(pruned).(*corev1.Node).Labels; len(kept) != 1 {
		t.Errorf("labels are kept that nobody reads: %v", kept)
	}
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "9", Continue: "more"}}
	list.Items = []corev1.Node{*wholeNode(), {ObjectMeta: metav1.ObjectMeta{Name: "n2"}}}
	pruned, err := pruneList(bytes.NewReader(encode(t, list)), node)
	if err != nil {
		t.Fatal(err)
	}
	got := decode(pruned).(*corev1.NodeList)
	if diff := cmp.Diff(list.ListMeta, got.ListMeta); diff != "" || len(got.Items) != 2 || got.Items[1].Name != "n2" {
		t.Fatalf("list of %d: %s", len(got.Items), diff)
	}
	if diff := cmp.Diff(trimmed(&list.Items[0]), trimmed(&got.Items[0])); diff != "" {
		t.Errorf("read of the whole and of the pruned list:\n%s", diff)
	}
	status := encode(t, &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Message: "gone"})
	for _, other := range [][]byte{status, []byte(`{"kind":"Node"}`), nil, protobufMagic} {
		if !bytes.Equal(prune(other), other) {
			t.Errorf("%q was changed", other)
		}
	}
}

// Whatever is sent, and can be read, is read the same when it is pruned. Only as an API server writes it: the decoder lets the
// key of a map reach beyond its entry, into what is pruned.
func FuzzPrune(f *testing.F) {
	small := wholeNode() // large inputs are executed a hundred times less often
	small.ManagedFields[0].FieldsV1, small.Status.Images[0].Names = metav1.NewFieldsV1("{}"), []string{"i"}
	whole := encode(f, small)
	for _, n := range []int{len(whole), len(whole) - 1, 100, 30, 5} {
		f.Add(whole[:n])
	}
	decoder := codec(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		want, _, err := decoder.Decode(data, nil, nil)
		_, _, _ = decoder.Decode(prune(data), nil, nil) // no more than an error
		n, isNode := want.(*corev1.Node)
		if err != nil || !isNode {
			return
		}
		got, _, err := decoder.Decode(prune(encode(t, n)), nil, nil)
		if err != nil {
			t.Fatalf("refused when pruned: %v", err)
		}
		a, errA := convert(n)
		b, errB := convert(got)
		if errA != nil || errB != nil || !a.Equal(b) || got.(*corev1.Node).ResourceVersion != n.ResourceVersion {
			t.Errorf("%+v is read as %+v when pruned", a, b)
		}
	})
}

// A list that is cut off anywhere is refused, and so is one that can't be read: less than all Nodes must not look like all.
func TestListCutOff(t *testing.T) {
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "9"}}
	for i := range 3 {
		list.Items = append(list.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i), Labels: wholeNode().Labels}})
	}
	data := encode(t, list)
	end := len(data) - len("\x1a\x00\x22\x00") // without the envelope's last fields, which are empty
	for n := range end {
		kept, err := pruneList(bytes.NewReader(data[:n]), node)
		if err != nil {
			continue
		}
		if o, _, err := codec(t).Decode(kept, nil, nil); err == nil {
			t.Fatalf("%d of %d bytes are a list of %d Nodes", n, end, len(o.(*corev1.NodeList).Items))
		}
	}
	for what, data := range map[string][]byte{
		"JSON": []byte(`{"kind":"NodeList"}`), "a number": append(bytes.Clone(protobufMagic), 1<<3, 7),
		"an endless field": append(bytes.Clone(protobufMagic), 1<<3|2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1),
	} {
		if kept, err := pruneList(bytes.NewReader(data), node); err == nil {
			t.Errorf("%s is read as %q", what, kept)
		}
	}
}

// A list is never in memory as a whole, of which most is not kept.
func TestListIsReadInParts(t *testing.T) {
	list := &corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
	for range 1000 {
		list.Items = append(list.Items, *wholeNode())
	}
	data := encode(t, list)
	took := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := pruneList(bytes.NewReader(data), node); err != nil {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if took > int64(len(data))/4 {
		t.Errorf("a list of %d bytes took %d of memory", len(data), took)
	}
}
