package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// ErrNotInCluster says that there is neither a kubeconfig nor a service account.
var ErrNotInCluster = errors.New("not inside a cluster")

// API follows the Node objects of a Kubernetes API server.
type API struct {
	Config *rest.Config
	Log    *slog.Logger
	// Self is the name of this node. Observed is called with the condition
	// NetworkUnavailable of its Node each time the API sends that Node, which may be
	// often, and with nil when there is no such Node (any more).
	Self     string
	Observed func(*Condition)
	// Heard is called each time the API server sends anything, which it does every minute at least; nil: nobody asks.
	Heard func()
	// limits of its silence; zero: the usual ones.
	limits limits
}

// LoadConfig reads a kubeconfig, or with an empty path what a pod is given
// (ErrNotInCluster when there is no such thing).
func LoadConfig(kubeconfig string) (*rest.Config, error) {
	var config *rest.Config
	var err error
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	} else if config, err = rest.InClusterConfig(); errors.Is(err, rest.ErrNotInCluster) {
		return nil, ErrNotInCluster
	}
	if err != nil {
		return nil, err
	}
	// Protobuf decodes in a fraction of the time and memory of JSON.
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.UserAgent = "ebpf-agent"
	return config, nil
}

// Run delivers the complete list and then every change, until ctx ends. While
// the API can't be reached it goes on trying and says so with an Update that has
// an error; what was delivered before is never taken back for that.
func (a API) Run(ctx context.Context, deliver func(Update)) error {
	s := &store{deliver: deliver, self: a.Self, observed: a.Observed, nodes: map[string]plan.Node{}}
	s.reach = s.reachOf(a.Config)
	client, err := server{a.Config, a.Heard, a.limits}.client(nodeResource.group, s.reach)
	if err != nil {
		return err
	}
	nodeResource.follow(ctx, client, s.reach, s)
	return ctx.Err()
}

var nodeResource = resource{group: core, name: "nodes", title: "Nodes", object: &corev1.Node{}}

// store is what the reflector writes to. It keeps the few fields that matter
// and delivers a new state for each change of one of them.
type store struct {
	reach    *reach
	deliver  func(Update)
	self     string
	observed func(*Condition)

	mu       sync.Mutex
	nodes    map[string]plan.Node
	complete bool // a whole list has arrived
}

// reachOf is what knows of the Nodes whether they can be read.
func (s *store) reachOf(config *rest.Config) *reach {
	return &reach{
		host: func() string { return nameOf(config) }, resource: nodeResource.title,
		failed: func(err *failure) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.deliver(Update{Err: err, Changed: time.Now()})
		},
		recovered: func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.publish()
		},
	}
}

// Transformer makes the reflector shed what is not needed of each object before
// it stores it for itself.
func (s *store) Transformer() cache.TransformFunc { return s.trim }

// Add implements cache.ReflectorStore.
func (s *store) Add(obj any) error { return s.Update(obj) }

// read is convert. That another Node leaves is no news here, or an autoscaler would have every agent plan anew for each.
func (s *store) read(obj any) (plan.Node, error) {
	n, err := convert(obj)
	n.Leaving = n.Leaving && n.Name == s.self
	return n, err
}

// Update implements cache.ReflectorStore.
func (s *store) Update(obj any) error {
	n, err := s.read(obj)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observe(obj)
	if have, ok := s.nodes[n.Name]; ok && have.Equal(n) {
		return nil // a heartbeat
	}
	s.nodes[n.Name] = n
	s.publish()
	return nil
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(obj any) error {
	n, err := convert(obj)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observeAbsence(n.Name)
	if _, ok := s.nodes[n.Name]; ok {
		delete(s.nodes, n.Name)
		s.publish()
	}
	return nil
}

// Replace implements cache.ReflectorStore: a complete list has arrived.
func (s *store) Replace(objs []any, _ string) error {
	nodes := make(map[string]plan.Node, len(objs))
	for _, obj := range objs {
		n, err := s.read(obj)
		if err != nil {
			return err
		}
		nodes[n.Name] = n
	}
	s.reach.noteList()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observeAbsence(s.self) // unless it is among them
	for _, obj := range objs {
		s.observe(obj)
	}
	s.nodes, s.complete = nodes, true
	s.publish()
	return nil
}

// Resync implements cache.ReflectorStore.
func (s *store) Resync() error { return nil }

// publish delivers the state if it is a complete one. The caller holds the lock, so that
// states arrive in order.
func (s *store) publish() {
	if !s.complete {
		return
	}
	list := make([]plan.Node, 0, len(s.nodes))
	for _, n := range s.nodes {
		list = append(list, n)
	}
	// A map has no order; rules that look at the list's order need the same one
	// each time.
	slices.SortFunc(list, func(a, b plan.Node) int { return strings.Compare(a.Name, b.Name) })
	s.deliver(Update{Nodes: list, Changed: time.Now()})
}

// trim keeps of an object only what convert and observe read.
func (s *store) trim(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return obj, nil
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.Name, ResourceVersion: n.ResourceVersion, CreationTimestamp: n.CreationTimestamp,
			DeletionTimestamp: n.DeletionTimestamp, Annotations: watchListMarks(n.Annotations), Labels: zoneOf(n.Labels),
		},
		Spec:   corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: leavingTaints(n.Spec.Taints)},
		Status: corev1.NodeStatus{Addresses: n.Status.Addresses, Conditions: s.conditionsToKeep(n)},
	}, nil
}

// watchListMarks keeps the annotation by which the API marks the end of the
// initial list in a watch.
func watchListMarks(annotations map[string]string) map[string]string {
	if v, ok := annotations[metav1.InitialEventsAnnotationKey]; ok {
		return map[string]string{metav1.InitialEventsAnnotationKey: v}
	}
	return nil
}

// zoneOf keeps the label of the zone.
func zoneOf(labels map[string]string) map[string]string {
	if v, ok := labels[corev1.LabelTopologyZone]; ok {
		return map[string]string{corev1.LabelTopologyZone: strings.Clone(v)}
	}
	return nil
}

// leavingTaint is what the cluster autoscaler gives to a Node that it is about to delete.
const leavingTaint = "ToBeDeletedByClusterAutoscaler"

// leavingTaints keeps that taint.
func leavingTaints(taints []corev1.Taint) []corev1.Taint {
	if slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.Key == leavingTaint }) {
		return []corev1.Taint{{Key: leavingTaint}}
	}
	return nil
}

func convert(obj any) (plan.Node, error) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	o, ok := obj.(*corev1.Node)
	if !ok {
		return plan.Node{}, fmt.Errorf("the API sent a %T among the Nodes", obj)
	}
	n := plan.Node{
		Name: o.Name, Created: o.CreationTimestamp.Time, PodCIDRs: slices.Clone(o.Spec.PodCIDRs), Zone: o.Labels[corev1.LabelTopologyZone],
		Leaving: o.DeletionTimestamp != nil || leavingTaints(o.Spec.Taints) != nil,
	}
	if len(n.PodCIDRs) == 0 && o.Spec.PodCIDR != "" {
		n.PodCIDRs = []string{o.Spec.PodCIDR}
	}
	for _, a := range o.Status.Addresses {
		n.AddAddress(string(a.Type), strings.Clone(a.Address))
	}
	return n, nil
}
