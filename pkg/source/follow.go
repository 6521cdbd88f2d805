package source

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// resource is one of the API that can be followed.
type resource struct {
	group    group
	name     string         // in a request's path
	title    string         // in texts
	object   runtime.Object // an example
	selector string         // of labels
}

// server is an API server, and how it is listened to.
type server struct {
	config *rest.Config
	heard  func()
	limits limits
}

// client makes a client of a resource, of whose silence is told.
func (s server) client(of group, r *reach) (*rest.RESTClient, error) {
	heard := s.heard
	if heard == nil {
		heard = func() {}
	}
	most := cmp.Or(s.limits, usualLimits())
	config := rest.CopyConfig(s.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return attentive{next, most, heard, r.noteAnswer} })
	return newClient(config, of)
}

// follow has a store hear of the complete list of a resource and then of every change, until ctx ends.
func (of resource) follow(ctx context.Context, client cache.Getter, r *reach, s cache.ReflectorStore) {
	requests := cache.NewFilteredListWatchFromClient(client, of.name, metav1.NamespaceAll, func(o *metav1.ListOptions) { o.LabelSelector = of.selector })
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return onceHeard(ctx, func() (runtime.Object, error) {
				l, err := requests.ListWithContext(ctx, o)
				r.noteError(verbList, err)
				return l, err
			})
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return onceHeard(ctx, func() (watch.Interface, error) {
				w, err := requests.WatchWithContext(ctx, o)
				if err == nil || o.SendInitialEvents == nil { // an API server that can't stream the list is asked for one
					r.noteError(verbWatch, err)
				}
				return w, err
			})
		},
	}
	cache.NewReflectorWithOptions(lw, of.object, s, cache.ReflectorOptions{
		Name:    of.name,
		Backoff: &wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 7, Cap: 10 * time.Second},
	}).RunWithContext(ctx)
}

// refusedAgain is after how long a refused connection is tried again, at most twice as late.
const refusedAgain = 150 * time.Millisecond

// onceHeard repeats a request as long as nobody listens for it. That costs both ends next to nothing, and an API server that
// has been away is followed again at once; the reflector would wait longer each time, as it does after answers that are errors.
func onceHeard[T any](ctx context.Context, request func() (T, error)) (T, error) {
	for {
		answer, err := request()
		if !utilnet.IsConnectionRefused(err) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, err
		case <-time.After(refusedAgain + rand.N(refusedAgain)): //nolint:gosec // nobody is to guess it
		}
	}
}
