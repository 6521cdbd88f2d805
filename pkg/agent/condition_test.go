package agent

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// patches is an API server that takes patches of the status of Node n1.
type patches struct {
	t       *testing.T
	refuse  bool
	written []corev1.NodeCondition
}

func (p *patches) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPatch || r.URL.Path != "/api/v1/nodes/n1/status" ||
		r.Header.Get("Content-Type") != "application/strategic-merge-patch+json" {
		p.t.Errorf("%s %s as %s", r.Method, r.URL, r.Header.Get("Content-Type"))
	}
	body, err := io.ReadAll(r.Body)
	var n corev1.Node
	if err == nil {
		err = json.Unmarshal(body, &n)
	}
	if err != nil || len(n.Status.Conditions) != 1 {
		p.t.Errorf("patch %s: %v", body, err)
	}
	p.written = append(p.written, n.Status.Conditions...)
	w.Header().Set("Content-Type", "application/json")
	if p.refuse {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`))
		return
	}
	n.TypeMeta = metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}
	_ = json.NewEncoder(w).Encode(n)
}

func newCondition(t *testing.T) (*condition, *patches) {
	t.Helper()
	p := &patches{t: t}
	srv := httptest.NewServer(p)
	t.Cleanup(srv.Close)
	client, err := source.NewClient(&rest.Config{Host: srv.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	return &condition{node: "n1", api: client, status: newStatus(log), log: log}, p
}

func TestConditionIsCleared(t *testing.T) {
	c, p := newCondition(t)
	now := time.Unix(1000, 0)
	c.status.setNotReady("")
	c.step(t.Context(), now)
	if len(p.written) != 0 {
		t.Fatal("written before the Node was seen")
	}
	c.seen.Store(&source.Condition{Status: "True", Reason: "NoRouteCreated", Since: time.Unix(10, 0)})
	c.step(t.Context(), now)
	if len(p.written) != 1 {
		t.Fatalf("written %v", p.written)
	}
	got := p.written[0]
	if got.Type != "NetworkUnavailable" || got.Status != "False" || got.Reason != reasonReady || !got.LastTransitionTime.Time.Equal(now) {
		t.Errorf("written %+v", got)
	}
	c.step(t.Context(), now.Add(time.Hour))
	if len(p.written) != 1 {
		t.Error("written again although nothing changed")
	}
	// Somebody sets it again: put right, and again only after a while.
	other := &source.Condition{Status: "True", Reason: "NoRouteCreated", Since: now}
	for i := range 10 {
		c.seen.Store(other)
		c.step(t.Context(), now.Add(time.Hour+time.Duration(i)*minPatchInterval/10))
	}
	if len(p.written) != 2 {
		t.Errorf("written %d times against somebody else within %v, want once", len(p.written)-1, minPatchInterval)
	}
}

func TestConditionIsSetAfterDoubt(t *testing.T) {
	c, p := newCondition(t)
	since := time.Unix(10, 0).UTC()
	c.seen.Store(&source.Condition{Status: "False", Reason: reasonReady, Message: "ebpf-cni carries pods", Since: since})
	start := time.Unix(1000, 0)
	c.status.setNotReady("no podCIDR")
	c.step(t.Context(), start)
	c.step(t.Context(), start.Add(notReadyGrace/2))
	c.status.setNotReady("")
	c.step(t.Context(), start.Add(notReadyGrace*3/4))
	c.status.setNotReady("no podCIDR")
	c.step(t.Context(), start.Add(notReadyGrace))
	if len(p.written) != 0 {
		t.Fatalf("a short while without readiness was written: %+v", p.written)
	}
	c.step(t.Context(), start.Add(2*notReadyGrace))
	if len(p.written) != 1 || p.written[0].Status != "True" || p.written[0].Message != "ebpf-cni: no podCIDR" {
		t.Fatalf("written %+v", p.written)
	}
	// Another reason is the same status since the same time.
	c.status.setNotReady("two podCIDRs")
	c.step(t.Context(), start.Add(3*notReadyGrace))
	if len(p.written) != 2 || !p.written[1].LastTransitionTime.Equal(&p.written[0].LastTransitionTime) {
		t.Errorf("written %+v", p.written)
	}
}

func TestConditionBacksOff(t *testing.T) {
	c, p := newCondition(t)
	p.refuse = true
	c.status.setNotReady("")
	c.seen.Store(&source.Condition{})
	start := time.Unix(1000, 0)
	for at := time.Duration(0); at < 2*time.Hour; at += askCondition {
		c.step(t.Context(), start.Add(at))
	}
	// After 5 s, 10 s, ... up to a minute, and every minute.
	if n := len(p.written); n < 118 || n > 128 {
		t.Errorf("tried %d times in two hours", n)
	}
	p.refuse = false
	c.step(t.Context(), start.Add(3*time.Hour))
	if c.failing || c.pause != minPatchInterval {
		t.Errorf("after success: failing %v, pause %v", c.failing, c.pause)
	}
}

func TestFailureToStartIsTold(t *testing.T) {
	p := &patches{t: t}
	srv := httptest.NewServer(p)
	defer srv.Close()
	log := slog.New(slog.DiscardHandler)
	a := &agent{node: &node{log: log, status: newStatus(log), cfg: Config{
		Node: "n1", API: &rest.Config{Host: srv.URL}, Directories: Directories{Conf: t.TempDir()},
	}}}
	failure := errors.New("pin directory: not on a BPF file system\nand more")
	a.reportFailure(t.Context(), failure)
	if len(p.written) != 1 || p.written[0].Status != "True" || p.written[0].Message != "ebpf-cni: pin directory: not on a BPF file system" {
		t.Fatalf("written %+v", p.written)
	}
	// An earlier agent's dataplane carries pods.
	if err := os.WriteFile(filepath.Join(a.cfg.Conf, install.Conflist), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a.reportFailure(t.Context(), failure)
	if len(p.written) != 1 {
		t.Errorf("told although pods are carried: %+v", p.written)
	}
}
