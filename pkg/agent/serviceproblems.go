package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// reportProblems logs what is new among problems, and what is over, and has the Services say what is new.
func (c *serviceController) reportProblems(all []service.Problem) {
	now, full := make(map[service.Problem]bool, len(all)), map[service.Name]bool{}
	for _, p := range all {
		if now[p] = true; !c.reported[p] {
			c.log.Warn("problem with a Service", "service", p.Service.String(), "reason", string(p.Reason), "detail", p.Text)
			c.events.put(p)
		}
		if p.Reason == service.Full {
			full[p.Service] = true
		}
	}
	for p := range c.reported {
		if !now[p] {
			c.log.Info("a problem with a Service is over", "service", p.Service.String(), "reason", string(p.Reason), "detail", p.Text)
		}
	}
	c.reported = now
	var err error
	if len(full) > 0 {
		err = fmt.Errorf("the maps have no room for all Services: %d are not served, or not in full; `ebpfctl status` names them", len(full))
	}
	c.complaints.note("services/room", err)
}

// toldProblems are problems as ebpfctl is told of them.
func toldProblems(all []service.Problem) (told []observe.ServiceProblem) {
	for _, p := range all {
		told = append(told, observe.ServiceProblem{Service: p.Service.String(), Reason: reasonOf(p.Reason), Text: p.Text})
	}
	return told
}

// reasonOf is a reason as metrics have it.
func reasonOf(r service.Reason) string { return strings.ToLower(string(r)) }

const (
	// eventPause is before each Event on average, or eventSpacing for each node if that is more: all nodes find the same problem
	// at the same moment, and together ask the API server for no more than one Event in eventSpacing. No more than mostEvents wait.
	eventPause   = 10 * time.Second
	eventSpacing = 40 * time.Millisecond
	mostEvents   = 100
	// eventLife is for how long the API keeps one. So long it is not written again, also if the problem comes and goes.
	eventLife = time.Hour
	// eventTimeout bounds the requests for one of them.
	eventTimeout = 5 * time.Second
)

// serviceEvents has Services say what is wrong with them.
type serviceEvents struct {
	*node
	waiting chan service.Problem
	pause   time.Duration // on average, of few nodes

	// Owned by the goroutine of run: when those of the last eventLife were written.
	written map[service.Problem]time.Time
}

func newServiceEvents(n *node) *serviceEvents {
	return &serviceEvents{node: n, waiting: make(chan service.Problem, mostEvents), pause: eventPause, written: map[service.Problem]time.Time{}}
}

// put has a problem written some time; of too many at once the log and ebpfctl know.
func (e *serviceEvents) put(p service.Problem) {
	if e.cfg.API == nil {
		return
	}
	select {
	case e.waiting <- p:
	default:
	}
}

// run writes Events until ctx ends.
func (e *serviceEvents) run(ctx context.Context) error {
	if e.cfg.API == nil {
		return nil
	}
	client, err := source.NewClient(jsonOnly(e.cfg.API))
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case p := <-e.waiting:
			if e.stands(p, time.Now()) {
				continue
			}
			if err := e.writeLater(ctx, client, p); err != nil {
				return err
			}
		}
	}
}

// stands says whether the API still has the Event about a problem.
func (e *serviceEvents) stands(p service.Problem, now time.Time) bool {
	maps.DeleteFunc(e.written, func(_ service.Problem, at time.Time) bool { return now.Sub(at) >= eventLife })
	_, there := e.written[p]
	return there
}

// writeLater writes an Event after a while. It returns an error when ctx ends.
func (e *serviceEvents) writeLater(ctx context.Context, client *rest.RESTClient, p service.Problem) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(rand.N(2 * max(e.pause, time.Duration(e.status.read().nodes)*eventSpacing))): //nolint:gosec // nobody is to guess it
	}
	err := e.write(ctx, client, p, time.Now())
	switch {
	case err == nil:
		e.written[p] = time.Now()
	case ctx.Err() == nil:
		e.log.Warn("an Event can't be written", "error", err)
	}
	return ctx.Err()
}

// jsonOnly is how to reach an API for what is read in full: of protobuf the UIDs are left out.
func jsonOnly(config *rest.Config) *rest.Config {
	c := rest.CopyConfig(config)
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	return c
}

// eventText is what an Event says of a problem, on all nodes alike.
func eventText(p service.Problem) string {
	const where = "; the agent's log and ebpfctl status say why there"
	switch p.Reason { // those whose text is about this node
	case service.HealthCheck:
		return "some nodes, such as the one that this Event is from, can't answer its load balancer's health checks on its healthCheckNodePort" + where
	case service.HostPort:
		return "a NodePort of it does not answer on some nodes, such as the one that this Event is from, where it is the host port of a pod" + where
	}
	return p.Text
}

// write writes one Event. Its name says what it says, so that of all nodes' one stands.
func (e *serviceEvents) write(ctx context.Context, client *rest.RESTClient, p service.Problem, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	var found corev1.ServiceList
	one := fields.OneTermEqualSelector(metav1.ObjectNameField, p.Service.Name).String()
	if err := client.Get().Namespace(p.Service.Namespace).Resource("services").Param("fieldSelector", one).Do(ctx).Into(&found); err != nil {
		return fmt.Errorf("find Service %s, to write an Event about it: %w", p.Service, err)
	}
	at := slices.IndexFunc(found.Items, func(s corev1.Service) bool { return s.Name == p.Service.Name })
	if at < 0 {
		return nil // it has gone, and the problem with it
	}
	of, text := found.Items[at], eventText(p)
	sum := sha256.Sum256([]byte(string(of.UID) + string(p.Reason) + text))
	stamp := metav1.NewTime(now)
	event := corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: p.Service.Namespace, Name: p.Service.Name + "." + hex.EncodeToString(sum[:8])},
		InvolvedObject: corev1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: p.Service.Namespace, Name: p.Service.Name, UID: of.UID},
		Type:           corev1.EventTypeWarning, Reason: string(p.Reason), Message: shorten(text, maxReason), Count: 1,
		FirstTimestamp: stamp, LastTimestamp: stamp,
		Source: corev1.EventSource{Component: "ebpf-cni", Host: e.cfg.Node},
	}
	err := client.Post().Namespace(p.Service.Namespace).Resource("events").Body(&event).Do(ctx).Error()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write an Event about Service %s: %w", p.Service, err)
	}
	return nil
}
