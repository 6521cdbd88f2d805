package source

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// An API server speaks protobuf to who asks for it: objects, events and errors.
func TestClientSpeaksProtobuf(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	whole, raw := protobuf.NewSerializer(scheme, scheme), protobuf.NewRawSerializer(scheme, scheme)
	kind := func(name string) metav1.TypeMeta { return metav1.TypeMeta{Kind: name, APIVersion: "v1"} }
	node := &corev1.Node{TypeMeta: kind("Node"), ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"zone": "a"}}, Spec: corev1.NodeSpec{PodCIDR: "10.244.0.0/24"}}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if accept := r.Header.Get("Accept"); !strings.HasPrefix(accept, runtime.ContentTypeProtobuf) {
			t.Errorf("asked for %q", accept)
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		answer := func(o runtime.Object) {
			if err := whole.Encode(o, w); err != nil {
				t.Error(err)
			}
		}
		switch query := r.URL.Query(); {
		case r.URL.Path == "/api/v1/nodes/n1/status":
			if body, _ := io.ReadAll(r.Body); r.Method != http.MethodPatch || string(body) != "{}" || r.Header.Get("Content-Type") != "application/strategic-merge-patch+json" {
				t.Errorf("%s of %q as %s", r.Method, body, r.Header.Get("Content-Type"))
			}
			answer(node)
		case query.Get("watch") == "true" && query.Get("resourceVersion") == "7":
			var object bytes.Buffer
			if err := whole.Encode(node, &object); err != nil {
				t.Error(err)
			}
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
			frames := streaming.NewEncoder(protobuf.LengthDelimitedFramer.NewFrameWriter(w), raw)
			if err := frames.Encode(&metav1.WatchEvent{Type: string(watch.Modified), Object: runtime.RawExtension{Raw: object.Bytes()}}); err != nil {
				t.Error(err)
			}
		case query.Get("resourceVersion") == "0":
			answer(&corev1.NodeList{TypeMeta: kind("NodeList"), ListMeta: metav1.ListMeta{ResourceVersion: "7"}, Items: []corev1.Node{*node}})
		default:
			w.WriteHeader(http.StatusForbidden)
			answer(&metav1.Status{TypeMeta: kind("Status"), Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: "not yours"})
		}
	}))
	defer server.Close()
	client, err := NewClient(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{
		ContentType: runtime.ContentTypeProtobuf, AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	nodes := cache.NewListWatchFromClient(client, "nodes", metav1.NamespaceAll, fields.Everything())
	got, err := nodes.ListWithContext(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if list, _ := got.(*corev1.NodeList); err != nil || list == nil || list.ResourceVersion != "7" || len(list.Items) != 1 || list.Items[0].Spec.PodCIDR != node.Spec.PodCIDR {
		t.Errorf("list: %v, %v", list, err)
	} else if list.Items[0].Labels != nil {
		t.Errorf("what nobody reads was decoded: %v", list.Items[0].Labels)
	}
	w, err := nodes.WatchWithContext(ctx, metav1.ListOptions{ResourceVersion: "7"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if event := <-w.ResultChan(); event.Type != watch.Modified || event.Object.(*corev1.Node).Name != "n1" {
		t.Errorf("event %+v", event)
	}
	var patched corev1.Node
	err = client.Patch(types.StrategicMergePatchType).Resource("nodes").Name("n1").SubResource("status").Body([]byte("{}")).Do(ctx).Into(&patched)
	if err != nil || patched.Name != "n1" {
		t.Errorf("patch: %v, %v", patched.Name, err)
	}
	if _, err := nodes.ListWithContext(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "not yours") {
		t.Errorf("refused: %v", err)
	}
}
