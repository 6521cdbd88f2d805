package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// steps are those of an ADD and of a DEL, in order.
func (w *fixture) steps() (add, release []string) {
	w.t.Helper()
	conf, err := json.Marshal(w.conf)
	w.must(err)
	p := w.newPod()
	pl := &plugin{stdout: discard{}, stderr: discard{}, wait: lockWait, step: func(name string) error {
		if part, ok := strings.CutPrefix(name, "release "); ok {
			release = append(release, part)
		} else {
			add = append(add, name)
		}
		return nil
	}}
	args := p.skelArgs(conf)
	w.must(pl.funcs().Add(args))
	w.must(pl.funcs().Del(args))
	return add, release
}

// neighboured is a node with a pod that no clean-up may touch. It and each further pod have host ports.
func neighboured(t *testing.T) (*fixture, *pod, []string) {
	t.Helper()
	w := newDual(t)
	w.conf["addressQuarantine"] = "0s"
	w.serveServices(true)
	other := w.newPod()
	w.add(other, mapped(hostPort(8081, 80)))
	w.conf["runtimeConfig"] = mapped(hostPort(8080, 80), hostPort(8080, 53, "udp", nodeIPs[0].String()))["runtimeConfig"]
	return w, other, w.everything()
}

// killed starts an ADD that kills itself before the step.
func (w *fixture) killed(p *pod, step string) {
	w.t.Helper()
	if _, e := w.call("ADD", p, nil, killAt+"="+step); e == nil || e.Msg != "killed" {
		w.t.Fatalf("ADD survived being killed before %s: %v", step, e)
	}
}

func TestKilledAddLeavesNothing(t *testing.T) {
	cleanups := map[string]func(w *fixture, p, other *pod){
		"DEL": func(w *fixture, p, _ *pod) { w.ok("DEL", p, nil) },
		"GC":  func(w *fixture, p, other *pod) { w.ok("GC", nil, gcList(other)) },
		"DEL without the namespace": func(w *fixture, p, _ *pod) {
			w.destroy(p)
			w.ok("DEL", p, nil)
		},
		"GC without the namespace": func(w *fixture, p, other *pod) {
			w.destroy(p)
			w.ok("GC", nil, gcList(other))
		},
	}
	for name, cleanup := range cleanups {
		t.Run(name, func(t *testing.T) {
			w, other, before := neighboured(t)
			steps, _ := w.steps()
			for _, step := range steps {
				p := w.newPod()
				w.killed(p, step)
				cleanup(w, p, other)
				if diff := cmp.Diff(before, w.everything()); diff != "" {
					t.Errorf("killed before %q: left behind (+) or lost (-):\n%s", step, diff)
				}
			}
		})
	}
}

// destroy ends the pod's namespace and waits until the kernel has taken the link away.
func (w *fixture) destroy(p *pod) {
	w.t.Helper()
	link, err := w.host.LinkByName(p.id.HostLinkName())
	p.ns.Close()
	p.ns = nil
	if err == nil {
		w.eventually("link of a destroyed namespace is gone", func() bool {
			_, err := w.host.LinkByIndex(link.Index)
			return err != nil
		})
	}
}

func TestKilledAddDoesNotHinderTheNext(t *testing.T) {
	w, _, before := neighboured(t)
	steps, _ := w.steps()
	for _, step := range steps {
		p := w.newPod()
		w.killed(p, step)
		r := w.add(p, nil)
		if got := r.IPs[0].Address.IP.String(); len(w.used()) != 4 {
			t.Errorf("killed before %q: ADD gave %s, in use are %v", step, got, w.used())
		}
		w.ok("CHECK", p, prevResult(t, r))
		w.ok("DEL", p, nil)
		w.unchanged(before)
	}
}

func TestFailedAddUndoesEverything(t *testing.T) {
	w, _, before := neighboured(t)
	steps, _ := w.steps()
	for _, step := range steps {
		p := w.newPod()
		_, e := w.call("ADD", p, nil, failAt+"="+step)
		w.isError(e, 999, "made to fail at "+step)
		if diff := cmp.Diff(before, w.everything()); diff != "" {
			t.Errorf("failed at %q: left behind (+) or lost (-):\n%s", step, diff)
		}
		w.add(p, nil) // nothing of the failed one is in the way
		w.ok("DEL", p, nil)
	}
}

func TestEmptyStoreFileOfAKill(t *testing.T) {
	for _, verb := range []string{"DEL", "GC"} {
		t.Run(verb, func(t *testing.T) {
			w, other, before := neighboured(t)
			w.must(os.WriteFile(filepath.Join(w.stateDir, "ipam/net1/10.9.0.77"), nil, 0o600))
			if verb == "GC" {
				w.ok("GC", nil, gcList(other))
			} else {
				w.ok("DEL", w.newPod(), nil)
			}
			w.unchanged(before)
		})
	}
}

func TestKilledDelIsFinishedByTheNext(t *testing.T) {
	for _, verb := range []string{"DEL", "GC"} {
		t.Run(verb, func(t *testing.T) {
			w, other, before := neighboured(t)
			_, parts := w.steps()
			for _, part := range parts {
				p := w.newPod()
				r := w.add(p, nil)
				if _, e := w.call("DEL", p, nil, killAt+"=release "+part); e == nil || e.Msg != "killed" {
					t.Fatalf("DEL survived being killed before %s: %v", part, e)
				}
				if _, e := w.call("CHECK", p, prevResult(t, r)); e == nil && part != "mark" {
					t.Errorf("CHECK passes although a DEL began, killed before %q", part)
				}
				if verb == "GC" {
					w.ok("GC", nil, gcList(other))
				} else {
					w.ok("DEL", p, nil)
				}
				if diff := cmp.Diff(before, w.everything()); diff != "" {
					t.Errorf("killed before %q: left behind (+) or lost (-):\n%s", part, diff)
				}
			}
		})
	}
}

// The steps are where a kill is told apart; this one falls anywhere, also within them and within the library.
func TestKilledAtAnyMoment(t *testing.T) {
	w, other, before := neighboured(t)
	conf, err := json.Marshal(w.conf)
	w.must(err)
	for i := range 40 {
		p := w.newPod()
		verb := "ADD"
		if i%2 == 1 { // the DEL is what dies
			w.add(p, nil)
			verb = "DEL"
		}
		cmd := w.command(verb, p, conf)
		w.must(cmd.Start())
		time.Sleep(time.Duration(i) * 750 * time.Microsecond) // from before its start to after its end
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if i%4 < 2 {
			w.ok("DEL", p, nil)
		} else {
			w.ok("GC", nil, gcList(other))
		}
		if diff := cmp.Diff(before, w.everything()); diff != "" {
			t.Fatalf("%s killed after %d x 0.75 ms: left behind (+) or lost (-):\n%s", verb, i, diff)
		}
	}
}
