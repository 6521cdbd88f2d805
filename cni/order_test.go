package cni

import (
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// At every moment of ADD: a link that is up has its program and its devices entry, an endpoints entry has a state
// file. The steps are observed by stopping ADD before each of them.
func TestOrderOfAdd(t *testing.T) {
	for _, mode := range []string{"tcx", "clsact"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "tcx" {
				priv.NeedTCX(t)
			}
			w := newDual(t)
			w.conf["attach"] = mode
			w.serveServices(true)
			w.conf["runtimeConfig"] = mapped(hostPort(8080, 80))["runtimeConfig"]
			before := w.everything()
			names, _ := w.steps()
			for i, step := range names {
				p := w.newPod()
				w.killed(p, step)
				done := func(name string) bool { return slices.Index(names, name) < i }
				for what, is := range map[string]struct{ got, want bool }{
					"address used":    {len(w.used()) > 0, done("address")},
					"link exists":     {w.hostLink(p).exists, done("link")},
					"attached":        {w.hostLink(p).mode == attach.Mode(mode), done("program")},
					"devices entry":   {len(entriesOf(w, devices.Open, devices.Name)) > 0, done("device entry")},
					"link up":         {w.hostLink(p).up, done("link state")},
					"route":           {slices.ContainsFunc(w.everything(), isRoute), done("route")},
					"state file":      {w.hasState(p), done("state file")},
					"host port entry": {len(entriesOf(w, hostports.Open, hostports.Name)) > 0, done("host port entry")},
					"endpoints entry": {len(entriesOf(w, endpoints.Open, endpoints.Name)) > 0, done("endpoint entry")},
				} {
					if is.got != is.want {
						t.Errorf("before %q: %s is %v, want %v", step, what, is.got, is.want)
					}
				}
				w.ok("DEL", p, nil)
				w.unchanged(before)
			}
		})
	}
}

func isRoute(line string) bool { return strings.HasPrefix(line, "route ") }

type linkState struct {
	exists, up bool
	mode       attach.Mode
}

func (w *fixture) hostLink(p *pod) linkState {
	w.t.Helper()
	l, err := w.host.LinkByName(p.id.HostLinkName())
	if err != nil {
		return linkState{}
	}
	s, err := attach.Attacher{Dir: w.pins}.Attached(l.Index, attach.FromPod)
	w.must(err)
	return linkState{exists: true, up: l.Up(), mode: s.Mode}
}

func (w *fixture) hasState(p *pod) bool {
	_, err := endpoint.Read(w.stateDir, p.id)
	return err == nil
}

func TestClsact(t *testing.T) {
	w := newFixture(t)
	w.conf["attach"] = "clsact"
	before := w.everything()
	p := w.newPod()
	r := w.add(p, nil)
	if s := w.hostLink(p); s.mode != attach.Clsact {
		t.Errorf("attached by %q", s.mode)
	}
	w.ok("CHECK", p, prevResult(t, r))
	w.ok("DEL", p, nil)
	w.unchanged(before)
}
