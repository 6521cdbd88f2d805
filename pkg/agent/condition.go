package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

const (
	// askCondition is how often what the Node should say is compared with what it says.
	askCondition = 500 * time.Millisecond
	// notReadyGrace is how long the node must have been unable to carry pods before its Node
	// says so: a restart of the agent is no reason to keep pods away.
	notReadyGrace = 10 * time.Second
	// One patch follows another no sooner than minPatchInterval, and after failures ever later up
	// to maxPatchInterval: others may write the same condition, or the right to it be missing.
	minPatchInterval = 5 * time.Second
	maxPatchInterval = time.Minute
)

// The reasons of the condition.
const (
	reasonReady    = "PodNetworkReady"
	reasonNotReady = "PodNetworkNotReady"
)

// condition keeps the Node's condition NetworkUnavailable correct. Clouds set it
// when a node comes, and the scheduler then keeps pods away.
type condition struct {
	node   string
	api    *rest.RESTClient
	status *status
	log    *slog.Logger

	// Owned by the goroutine of run.
	next    time.Time     // no patch before then
	pause   time.Duration // between the newest patch and the next
	failing bool          // the newest patch failed
	unready time.Time     // since when the node has not been ready; zero: it is

	seen atomic.Pointer[source.Condition] // what the Node says; nil: there is no Node to write to, or none yet
}

func (a *agent) newCondition() (*condition, error) {
	client, err := source.NewClient(a.cfg.API)
	if err != nil {
		return nil, err
	}
	return &condition{node: a.cfg.Node, api: client, status: a.status, log: a.log}, nil
}

// reportFailure has the Node say why this agent gives up, unless an earlier one left
// a dataplane that carries pods without it: then the list is there.
func (a *agent) reportFailure(ctx context.Context, failure error) {
	_, err := os.Stat(filepath.Join(a.cfg.Conf, install.Conflist))
	if a.cfg.API == nil || ctx.Err() != nil || errors.Is(failure, ErrRunning) || !errors.Is(err, fs.ErrNotExist) {
		return
	}
	c, err := a.newCondition()
	if err == nil {
		first, _, _ := strings.Cut(failure.Error(), "\n")
		now := metav1.Now()
		want := unavailable(first)
		want.LastHeartbeatTime, want.LastTransitionTime = now, now
		err = c.patch(ctx, *want)
	}
	if err != nil {
		a.log.Warn("condition NetworkUnavailable of the Node can't be written", "node", a.cfg.Node, "error", err)
	}
}

// carries is what the condition of a node says that can carry pods; missing is which family of addresses they do without.
func carries(missing error) string {
	const text = "ebpf-cni carries pods"
	if missing == nil {
		return text
	}
	return text + "; " + shorten(strings.ReplaceAll(missing.Error(), "\n", "; "), maxReason)
}

// unavailable is the condition of a node that can't carry pods.
func unavailable(why string) *corev1.NodeCondition {
	return &corev1.NodeCondition{
		Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue, Reason: reasonNotReady, Message: "ebpf-cni: " + shorten(why, maxReason),
	}
}

// run compares and writes until ctx ends.
func (c *condition) run(ctx context.Context) error {
	return repeat(ctx, func() time.Duration {
		c.step(ctx, time.Now())
		return askCondition
	})
}

// step writes the condition if it is not what it should be and it is time to.
func (c *condition) step(ctx context.Context, now time.Time) {
	want := c.want(now)
	seen := c.seen.Load()
	if want == nil || seen == nil || c.says(seen, want) || now.Before(c.next) {
		return
	}
	want.LastTransitionTime = metav1.NewTime(now)
	if string(want.Status) == seen.Status {
		want.LastTransitionTime = metav1.NewTime(seen.Since)
	}
	want.LastHeartbeatTime = metav1.NewTime(now)
	err := c.patch(ctx, *want)
	if ctx.Err() != nil {
		return
	}
	c.schedule(now, err)
	if err == nil {
		c.log.Info("condition of the Node written", "type", string(want.Type), "status", string(want.Status), "message", want.Message)
	}
}

// want is what the Node should say; nil: whatever it says.
func (c *condition) want(now time.Time) *corev1.NodeCondition {
	why := c.status.reason()
	if why == "" {
		c.unready = time.Time{}
		return &corev1.NodeCondition{
			Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse, Reason: reasonReady, Message: carries(c.status.read().missing),
		}
	}
	if c.unready.IsZero() {
		c.unready = now
	}
	if now.Sub(c.unready) < notReadyGrace {
		return nil
	}
	return unavailable(why)
}

func (c *condition) says(seen *source.Condition, want *corev1.NodeCondition) bool {
	return seen.Status == string(want.Status) && seen.Reason == want.Reason && seen.Message == want.Message
}

// schedule decides when the next patch may be, and complains once of failures.
func (c *condition) schedule(now time.Time, err error) {
	if err == nil {
		c.pause, c.failing = minPatchInterval, false
	} else {
		c.pause = min(max(2*c.pause, minPatchInterval), maxPatchInterval)
		if !c.failing {
			c.log.Warn("condition NetworkUnavailable of the Node can't be written, trying again", "node", c.node, "error", err)
		}
		c.failing = true
	}
	c.next = now.Add(c.pause)
}

// patch writes one condition and leaves the Node's others alone.
func (c *condition) patch(ctx context.Context, want corev1.NodeCondition) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{want}}})
	if err != nil {
		return fmt.Errorf("encode the condition: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, minPatchInterval)
	defer cancel()
	var n corev1.Node
	if err := c.api.Patch(types.StrategicMergePatchType).Resource("nodes").Name(c.node).SubResource("status").Body(body).Do(ctx).Into(&n); err != nil {
		return err
	}
	// The watch says the same, a moment later.
	c.seen.Store(source.ConditionOf(&n))
	return nil
}
