package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// beside is a node whose list has a fake portmap behind our plugin.
func beside(t *testing.T) delegating {
	t.Helper()
	w := newServing(t)
	d := delegating{fixture: w, dir: t.TempDir(), before: w.everything()}
	w.env = []string{fakeIPAM + "=" + d.dir}
	self, err := os.Executable()
	w.must(err)
	w.must(os.Symlink(self, filepath.Join(w.plugins, portmapPlugin)))
	w.conf["portmap"] = true
	return d
}

// The rules of pods that were made while portmap was chained are removed with them, after it was taken out of the list.
func TestPodsOfPortmap(t *testing.T) {
	d := beside(t)
	p := d.newPod()
	r := d.add(p, mapped(hostPort(8080, 80))) // which are not ours
	if got := d.hostPorts(p); len(got) != 0 {
		t.Errorf("entries %v", got)
	}
	e, err := endpoint.Read(d.stateDir, p.id)
	if err != nil || !e.Portmap {
		t.Errorf("the state says %v, %v", e.Portmap, err)
	}
	d.ok("CHECK", p, prevResult(t, r))
	d.ok("DEL", p, nil)
	d.asked() // the runtime has called it

	last, collected, own := d.newPod(), d.newPod(), d.newPod()
	d.add(last, nil)
	d.add(collected, nil)
	delete(d.conf, "portmap")
	d.add(own, mapped(hostPort(8080, 80)))
	d.ok("DEL", last, nil)
	d.asked("DEL")
	var conf struct {
		CNIVersion, Name, Type string
		RuntimeConfig          struct{ PortMappings []any }
	}
	raw, err := os.ReadFile(filepath.Join(d.dir, "conf-DEL"))
	d.must(err)
	d.must(json.Unmarshal(raw, &conf))
	if conf.CNIVersion == "" || conf.Name != "net1" || conf.Type != "portmap" || len(conf.RuntimeConfig.PortMappings) == 0 {
		t.Errorf("portmap was called with %s", raw)
	}
	d.ok("DEL", last, nil)
	d.ok("GC", nil, gcList(own))
	d.asked("DEL")
	d.ok("DEL", own, nil)
	d.asked()
	d.unchanged(d.before)
}

// It is no reason to keep a pod's resources that portmap is gone, or fails.
func TestPortmapThatFails(t *testing.T) {
	for name, breakIt := range map[string]func(d delegating){
		"gone":   func(d delegating) { d.must(os.Remove(filepath.Join(d.plugins, portmapPlugin))) },
		"failed": func(d delegating) { d.leave("refuse-DEL", `{"code": 999, "msg": "made to fail"}`) },
		"hung": func(d delegating) {
			d.leave("hang-DEL", "")
			d.fixture.env = append(d.fixture.env, ipamWait+"=300ms")
		},
	} {
		for _, verb := range []string{"DEL", "GC"} {
			t.Run(name+" "+verb, func(t *testing.T) {
				d := beside(t)
				p := d.newPod()
				d.add(p, nil)
				delete(d.conf, "portmap")
				breakIt(d)
				log, e := d.call(verb, p, gcList())
				if e != nil || !strings.Contains(log, "portmap's rules for the pod not removed") {
					t.Errorf("%v, log: %s", e, log)
				}
				d.unchanged(d.before)
			})
		}
	}
}
