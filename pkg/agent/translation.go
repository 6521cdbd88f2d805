package agent

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
)

const (
	// retryMode is when another attempt is made at a mode that did not come about:
	// each costs the verifier's work.
	retryMode = 15 * time.Second
)

// translation follows whether netfilter translates on this node, and what the
// programs do about it. All of it belongs to one goroutine.
type translation struct {
	mode  KubeProxyMode
	watch *netfilter.Watch
	// beside says that the programs work beside netfilter's translation.
	beside bool
	// again is when to look again, after a failure.
	again time.Time
	// failure is why the newest change of what the programs do did not come about; nil: it did.
	failure error
	// changing says that the programs are being replaced.
	changing bool
}

// look finds out what the programs should do. After an error they should go on as
// they do.
func (t *translation) look(now time.Time) (beside bool, err error) {
	if t.mode != KubeProxyAuto {
		return t.mode == KubeProxyOn, nil
	}
	return t.watch.Look(now, t.beside)
}

// begin is look for a process that has seen nothing yet.
func (t *translation) begin(now time.Time) (beside bool, err error) {
	if t.mode != KubeProxyAuto {
		return t.mode == KubeProxyOn, nil
	}
	return t.watch.Begin(now)
}

// describe says beside what the programs work; empty: netfilter does not translate.
func (t *translation) describe() string {
	switch {
	case !t.beside:
		return ""
	case t.mode == KubeProxyOn:
		return "--kube-proxy=on"
	}
	return t.watch.Where()
}

// explainMode says what to do when the programs don't load because the kernel
// does not let them ask netfilter's connection table.
func explainMode(err error, beside bool) error {
	if err == nil || !beside || !strings.Contains(err.Error(), "unknown kfunc") {
		return err
	}
	const module = "/sys/kernel/btf/nf_conntrack"
	remedy := "the module nf_conntrack is not loaded: `modprobe nf_conntrack`"
	if _, statErr := os.Stat(module); statErr == nil {
		remedy = "nf_conntrack is a module here, whose functions the kernel gives to nobody without CAP_SYS_ADMIN: " +
			"add SYS_ADMIN to the agent's capabilities"
	}
	return fmt.Errorf("work beside netfilter's translation: %s, or set --kube-proxy=off where nothing translates: %w", remedy, err)
}

// followTranslation has the programs work beside netfilter's translation for as
// long as there is one.
func (r *reconciler) followTranslation(now time.Time) {
	t := &r.translation
	if t.changing || now.Before(t.again) {
		return
	}
	beside, err := t.look(now)
	if err != nil {
		r.complain("netfilter's rules", err)
	} else {
		r.settled("netfilter's rules")
	}
	if beside != t.beside {
		t.changing = true
		r.modes.wanted <- beside
	}
}

// modes connects the reconciler with the goroutine that replaces the programs:
// routes and pods must not wait for the verifier, nor for the plugin's work to end.
// The reconciler wants nothing more before it has taken the outcome.
type modes struct {
	wanted  chan bool
	outcome chan outcome
}

type outcome struct {
	beside bool
	err    error
}

func newModes() modes { return modes{make(chan bool, 1), make(chan outcome, 1)} }

// changeModes replaces the programs when that is wanted, until ctx ends.
func (r *reconciler) changeModes(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case beside := <-r.modes.wanted:
			r.changeMode(ctx, beside)
		}
	}
}

func (r *reconciler) changeMode(ctx context.Context, beside bool) {
	err := r.dp.Reconfigure(ctx, r.cfg.nodeConfig(beside))
	r.modes.outcome <- outcome{beside, explainMode(err, beside)}
}

// modeChanged takes the outcome.
func (r *reconciler) modeChanged(ctx context.Context, o outcome, now time.Time) {
	t := &r.translation
	t.changing, t.failure = false, o.err
	if o.err != nil {
		t.again = now.Add(retryMode)
		if ctx.Err() == nil {
			r.complain("netfilter's translation", o.err)
		}
		return
	}
	r.settled("netfilter's translation")
	t.beside = o.beside
	r.tellTranslation()
}

// tellTranslation says beside what the programs work now.
func (r *reconciler) tellTranslation() {
	where := r.translation.describe()
	r.status.besideNetfilter(where != "")
	if where == "" {
		r.log.Info("nothing translates addresses on this node; packets pass netfilter by")
	} else {
		r.log.Info("working beside netfilter's translation of addresses", "found", where)
	}
}
