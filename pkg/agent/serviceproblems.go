package agent

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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
	over := 0
	for p := range c.reported {
		if now[p] {
			continue
		}
		if over++; over <= mostLines {
			c.log.Info("no longer the case", "about", fmt.Sprintf("Service %s: %s: %s", p.Service, p.Reason, p.Text))
		}
	}
	if over > mostLines {
		c.log.Info("nor are other problems with Services", "more", over-mostLines)
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
	// eventPause is before each Event on average, of which no more than mostEvents wait: all nodes find the same problem at the same
	// moment.
	eventPause = 10 * time.Second
	mostEvents = 100
	// eventTimeout bounds the requests for one of them.
	eventTimeout = 5 * time.Second
)

// serviceEvents has Services say what is wrong with them.
type serviceEvents struct {
	*node
	waiting chan service.Problem
	pause   time.Duration // on average
}

func newServiceEvents(n *node) *serviceEvents {
	return &serviceEvents{n, make(chan service.Problem, mostEvents), eventPause}
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
			if err := e.writeLater(ctx, client, p); err != nil {
				return err
			}
		}
	}
}

// writeLater writes an Event after a while. It returns an error when ctx ends.
func (e *serviceEvents) writeLater(ctx context.Context, client *rest.RESTClient, p service.Problem) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(rand.N(2 * e.pause)): //nolint:gosec // nobody is to guess it
	}
	if err := e.write(ctx, client, p, time.Now()); err != nil && ctx.Err() == nil {
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
	of := found.Items[at]
	sum := sha256.Sum256([]byte(string(of.UID) + string(p.Reason) + p.Text))
	stamp := metav1.NewTime(now)
	event := corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: p.Service.Namespace, Name: p.Service.Name + "." + hex.EncodeToString(sum[:8])},
		InvolvedObject: corev1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: p.Service.Namespace, Name: p.Service.Name, UID: of.UID},
		Type:           corev1.EventTypeWarning, Reason: string(p.Reason), Message: shorten(p.Text, maxReason), Count: 1,
		FirstTimestamp: stamp, LastTimestamp: stamp,
		Source: corev1.EventSource{Component: "ebpf-cni", Host: e.cfg.Node},
	}
	err := client.Post().Namespace(p.Service.Namespace).Resource("events").Body(&event).Do(ctx).Error()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write an Event about Service %s: %w", p.Service, err)
	}
	return nil
}
