package source

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"
)

// streamOf is what makes and reads the events of a watch, as client-go asks for it.
func streamOf(t *testing.T) (runtime.StreamSerializerInfo, runtime.Decoder) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	l := lean{serializer.NewCodecFactory(scheme).WithoutConversion()}
	info, ok := runtime.SerializerInfoForMediaType(l.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("no protobuf")
	}
	return *info.StreamSerializer, l.DecoderToVersion(info.Serializer, corev1.SchemeGroupVersion)
}

// frame writes an event as an API server does.
func frame(t *testing.T, stream runtime.StreamSerializerInfo, to io.Writer, kind watch.EventType, o runtime.Object) {
	t.Helper()
	data, err := (&metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: encode(t, o)}}).Marshal()
	if err == nil {
		_, err = stream.NewFrameWriter(to).Write(data)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A heartbeat is not delivered; whatever changes what is read of a Node is, and so is everything else.
func TestHeartbeatsEndInTheStream(t *testing.T) {
	stream, objects := streamOf(t)
	beats := 0
	beat := func(changes ...func(*corev1.Node)) *corev1.Node {
		n := wholeNode()
		beats++
		n.ResourceVersion, n.Labels["beat"] = strconv.Itoa(beats), strconv.Itoa(beats)
		n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(time.Unix(int64(beats), 0))
		n.Status.Images[0].SizeBytes = int64(beats)
		n.ManagedFields[0].Time = &metav1.Time{Time: time.Unix(int64(beats), 0)}
		for _, change := range changes {
			change(n)
		}
		return n
	}
	second := func(n *corev1.Node) { n.Name = "n2" }
	moved := func(n *corev1.Node) { n.Status.Addresses[0].Address = "192.0.2.9" }
	zoned := func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = "another" }
	big := func(n *corev1.Node) { n.Status.Images[0].Names[0] = strings.Repeat("i", 100_000) }
	failed := &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Message: "gone"}
	bookmark := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{ResourceVersion: "bookmark"}}
	cases := []struct {
		what      string
		kind      watch.EventType
		object    runtime.Object
		delivered bool
	}{
		{"a Node not heard of before", watch.Modified, beat(), true},
		{"its heartbeat", watch.Modified, beat(), false},
		{"bookmark", watch.Bookmark, bookmark, true},
		{"the same bookmark", watch.Bookmark, bookmark, true},
		{"another Node", watch.Added, beat(second), true},
		{"the other Node's heartbeat", watch.Modified, beat(second), false},
		{"address", watch.Modified, beat(moved), true},
		{"a big heartbeat", watch.Modified, beat(moved, big), false},
		{"the former address", watch.Modified, beat(), true},
		{"podCIDR", watch.Modified, beat(func(n *corev1.Node) { n.Spec.PodCIDR = "10.244.9.0/24" }), true},
		{"the former podCIDR, big", watch.Modified, beat(big), true},
		{"annotation", watch.Modified, beat(func(n *corev1.Node) { n.Annotations["a"] = "b" }), true},
		{"condition", watch.Modified, beat(func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }), true},
		{"the condition as before", watch.Modified, beat(), true},
		{"zone", watch.Modified, beat(zoned), true},
		{"a heartbeat from the new zone", watch.Modified, beat(zoned), false},
		{"no zone any more", watch.Modified, beat(func(n *corev1.Node) { delete(n.Labels, corev1.LabelTopologyZone) }), true},
		{"age", watch.Modified, beat(func(n *corev1.Node) { n.CreationTimestamp = metav1.Unix(5, 0) }), true},
		{"another taint", watch.Modified, beat(func(n *corev1.Node) { n.CreationTimestamp, n.Spec.Taints[0].Key = metav1.Unix(5, 0), "other" }), false},
		{"the taint of a Node that leaves", watch.Modified, beat(func(n *corev1.Node) { n.CreationTimestamp, n.Spec.Taints = metav1.Unix(5, 0), nil }), true},
		{"deletion", watch.Modified, beat(func(n *corev1.Node) {
			n.CreationTimestamp, n.Spec.Taints, n.DeletionTimestamp = metav1.Unix(5, 0), nil, new(metav1.Unix(6, 0))
		}), true},
		{"the end", watch.Deleted, beat(), true},
		{"the end again", watch.Deleted, beat(), true},
		{"a new beginning", watch.Added, beat(), true},
		{"a beginning again", watch.Added, beat(), true},
		{"heartbeat after that", watch.Modified, beat(), false},
		{"failure", watch.Error, failed, true},
		{"failure again", watch.Error, failed, true},
	}
	var sent bytes.Buffer
	for _, c := range cases {
		frame(t, stream, &sent, c.kind, c.object)
	}
	// A byte at a time, as slow networks may bring it.
	received := restwatch.NewDecoder(streaming.NewDecoder(stream.NewFrameReader(io.NopCloser(iotest.OneByteReader(&sent))), stream.Serializer), objects)
	for _, c := range cases {
		if !c.delivered {
			continue
		}
		kind, o, err := received.Decode()
		if err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		got, _ := o.(*corev1.Node)
		want, isNode := c.object.(*corev1.Node)
		if kind != c.kind || isNode && got.ResourceVersion != want.ResourceVersion {
			t.Fatalf("%s: got %s of %+v", c.what, kind, o)
		}
	}
	if kind, o, err := received.Decode(); !errors.Is(err, io.EOF) {
		t.Errorf("after all: %s of %+v, %v", kind, o, err)
	}
}

// A heartbeat is delivered when nothing else has been for a while: by it the reflector knows from where to go on.
func TestHeartbeatNowAndThen(t *testing.T) {
	stream, objects := streamOf(t)
	var sent bytes.Buffer
	for _, version := range []string{"1", "2", "3", "4"} {
		n := wholeNode()
		n.ResourceVersion = version
		frame(t, stream, &sent, watch.Modified, n)
	}
	reader := stream.NewFrameReader(io.NopCloser(&sent))
	received := restwatch.NewDecoder(streaming.NewDecoder(reader, stream.Serializer), objects)
	for _, want := range []string{"1", "2"} {
		_, o, err := received.Decode()
		if err != nil || o.(*corev1.Node).ResourceVersion != want {
			t.Fatalf("got %+v, %v, want version %s", o, err, want)
		}
		if want == "1" {
			reader.(*frames).delivered = time.Now().Add(-betweenHeartbeats)
		}
	}
	if _, o, err := received.Decode(); !errors.Is(err, io.EOF) {
		t.Errorf("so soon after one: %+v, %v", o, err)
	}
}

// An event that would fill the memory ends the watch.
func TestEndlessEvent(t *testing.T) {
	stream, _ := streamOf(t)
	header := []byte{0x7f, 0xff, 0xff, 0xff}
	endless := io.MultiReader(bytes.NewReader(header), zeros{})
	if _, err := stream.NewFrameReader(io.NopCloser(endless)).Read(make([]byte, 1024)); !errors.Is(err, errFrame) {
		t.Error(err)
	}
}

type zeros struct{}

func (zeros) Read(into []byte) (int, error) { clear(into); return len(into), nil }
