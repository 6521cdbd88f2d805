package source

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// Services follows the Services, EndpointSlices and ServiceCIDRs of a Kubernetes API server.
type Services struct {
	Config *rest.Config
	Log    *slog.Logger
	// Heard is called each time the API server sends anything, which it does every minute at least; nil: nobody asks.
	Heard func()
	// limits of its silence; zero: the usual ones.
	limits limits
	// absence is after how long an API without ServiceCIDRs is asked for them again; zero: as late as a watch is renewed.
	absence time.Duration
}

// What is followed.
var (
	serviceResource = resource{group: core, name: "services", title: "Services", object: &corev1.Service{}, selector: served}
	sliceResource   = resource{group: discovery, name: "endpointslices", title: "EndpointSlices", object: &discoveryv1.EndpointSlice{}, selector: served}
	cidrResource    = resource{group: networking, name: "servicecidrs", title: "ServiceCIDRs", object: &networkingv1.ServiceCIDR{}}
)

// Run delivers all there is as soon as the lists of Services and EndpointSlices are complete, and it is known whether there are
// ServiceCIDRs; then what changes, and once more all of it when a whole list had to be read again and is another, until ctx ends.
// What happens while deliver runs comes in one Update afterwards. That a kind can't be read is told by an Update with an
// error, and again after each without one; the other kinds go on.
func (s Services) Run(ctx context.Context, deliver func(service.Update)) error {
	p := newPending()
	services := kept[service.Service, *corev1.Service]{pending: p, table: &p.services, read: new(interner).serviceOf}
	endpoints := kept[service.Slice, *discoveryv1.EndpointSlice]{pending: p, table: &p.slices, read: new(interner).sliceOf}
	ranges := kept[cidrs, *networkingv1.ServiceCIDR]{pending: p, table: &p.cidrs, read: new(interner).cidrsOf}
	services.reach = p.reach(s.Config, serviceResource, kindService)
	endpoints.reach = p.reach(s.Config, sliceResource, kindSlice)
	ranges.reach = p.reach(s.Config, cidrResource, kindCIDR)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.follow(ctx, serviceResource, services.reach, &services) })
	g.Go(func() error { return s.follow(ctx, sliceResource, endpoints.reach, &endpoints) })
	g.Go(func() error { return s.followWhereServed(ctx, cidrResource, &ranges) })
	g.Go(func() error { return p.run(ctx, deliver) })
	return g.Wait()
}

// reach is what tells of a kind that it can't be read.
func (p *pending) reach(config *rest.Config, of resource, kind kind) *reach {
	return &reach{
		host: func() string { return nameOf(config) }, resource: of.title,
		failed:    func(err *failure) { p.fail(kind, err) },
		recovered: func() { p.fail(kind, nil) },
	}
}

func (s Services) follow(ctx context.Context, of resource, r *reach, store cache.ReflectorStore) error {
	client, err := server{s.Config, s.Heard, s.limits}.client(of.group, r)
	if err == nil {
		of.follow(ctx, client, r, store)
		err = ctx.Err()
	}
	return err
}

// followWhereServed follows ServiceCIDRs, which an API server may not have. Until it has them there are none, and that is no fault.
func (s Services) followWhereServed(ctx context.Context, of resource, k *kept[cidrs, *networkingv1.ServiceCIDR]) error {
	for {
		served, absent := context.WithCancel(ctx)
		k.reach.absentMeans(absent)
		err := s.follow(served, of, k.reach, k)
		absent()
		if ctx.Err() != nil || !errors.Is(err, context.Canceled) {
			return err
		}
		k.reach.noteAbsence()
		_ = k.Replace(nil, "")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(cmp.Or(s.absence, renewal+rand.N(renewal))): //nolint:gosec // nobody is to guess it
		}
	}
}

// renewal is how soon the reflector renews a watch, at most twice as late.
const renewal = 5 * time.Minute
