package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

var (
	noPlugin = map[string]any{"ipam": map[string]any{"type": "nosuch"}}
	// rewritten is a list of the same name, with another ipam plugin's section.
	rewritten = map[string]any{"ipam": map[string]any{"type": ipamName, "pool": "new"}}
)

// configured is the configuration that the fake plugin got last for a command.
func (d delegating) configured(verb string) map[string]any {
	d.t.Helper()
	raw, err := os.ReadFile(filepath.Join(d.dir, "conf-"+verb))
	d.must(err)
	var conf map[string]any
	d.must(json.Unmarshal(raw, &conf))
	return conf
}

// A pod whose address is in the store, and a list that has gone over to another ipam plugin.
func TestHostLocalAddressIsFreedUnderAnotherList(t *testing.T) {
	d := newDelegating(t)
	local := hostLocal(map[string]any{})
	for name, end := range map[string]func(p *pod){
		"DEL":                       func(p *pod) { d.ok("DEL", p, noPlugin) },
		"DEL by a plugin there":     func(p *pod) { d.ok("DEL", p, nil) },
		"DEL after a killed ADD":    func(p *pod) { d.ok("DEL", p, noPlugin) },
		"GC":                        func(*pod) { d.ok("GC", nil, gcList()) },
		"DEL without a state file ": func(p *pod) { d.must(endpoint.Remove(d.stateDir, p.id)); d.ok("DEL", p, noPlugin) },
	} {
		p := d.newPod()
		if strings.Contains(name, "killed") {
			_, e := d.call("ADD", p, local, killAt+"=pod")
			d.isError(e, 0, "killed")
		} else {
			d.add(p, local)
		}
		end(p)
		if name == "GC" {
			d.asked("GC")
		} else {
			d.asked() // the other plugin knows nothing of the pod
		}
		if used := d.used(); len(used) > 0 {
			t.Errorf("%s: still in use: %v", name, used)
		}
		d.unchanged(d.before)
	}
}

func TestDelegatedAddressIsGivenBackUnderAnotherList(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	for _, list := range []map[string]any{hostLocal(map[string]any{}), noPlugin, rewritten} {
		for _, verb := range []string{"DEL", "GC"} {
			p := d.newPod()
			d.add(p, map[string]any{"ipam": map[string]any{"type": ipamName, "pool": "old"}})
			d.asked("ADD")
			want := []string{"DEL"}
			if verb == "DEL" {
				d.ok("DEL", p, list)
			} else if _, e := d.call("GC", nil, merged(gcList(), list)); e != nil && e.Code != 7 {
				t.Errorf("GC: %s", e) // error 7: today's plugin is not there
			}
			if verb == "GC" && list["ipam"].(map[string]any)["type"] == ipamName {
				want = append(want, "GC")
			}
			d.asked(want...)
			if pool := d.configured("DEL")["ipam"].(map[string]any)["pool"]; pool != "old" {
				t.Errorf("%s: the plugin is asked with pool %v, not what ADD was made with", verb, pool)
			}
			d.unchanged(d.before)
		}
	}
}

// A DEL that the other plugin refuses is repeated, and must know as much as the first one.
func TestRefusedDelegatedDelIsRepeated(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	p := d.newPod()
	d.add(p, nil)
	d.leave("refuse-DEL", `{"code":123,"msg":"not today"}`)
	d.refused(123, "DEL", p, hostLocal(map[string]any{}), "not today")
	d.must(os.Remove(filepath.Join(d.dir, "refuse-DEL")))
	d.ok("DEL", p, hostLocal(map[string]any{}))
	d.asked("ADD", "DEL", "DEL")
	d.unchanged(d.before)
	d.ok("DEL", p, nil) // once more, and nothing is known
	d.asked("DEL")
}

func TestDelegatedDelGetsTodaysResult(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	p := d.newPod()
	r := d.add(p, nil)
	d.ok("DEL", p, prevResult(t, r))
	if d.configured("DEL")["prevResult"] == nil {
		t.Error("the ipam plugin was not given prevResult")
	}
}

// CHECK asks whom ADD asked.
func TestCheckUnderAnotherList(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	p, q := d.newPod(), d.newPod()
	r := d.add(p, nil)
	s := d.add(q, hostLocal(nil))
	d.ok("CHECK", p, merged(prevResult(t, r), hostLocal(map[string]any{})))
	d.asked("ADD", "CHECK")
	d.ok("CHECK", q, merged(prevResult(t, s), noPlugin))
}

// State files of the version before say the type only.
func TestStateFileWithoutTheConfiguration(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	for _, list := range []map[string]any{nil, hostLocal(map[string]any{})} {
		p := d.newPod()
		d.add(p, nil)
		d.asked("ADD")
		path := filepath.Join(endpoint.Dir(d.stateDir), p.id.String()+".json")
		raw, err := os.ReadFile(path)
		d.must(err)
		var fields map[string]any
		d.must(json.Unmarshal(raw, &fields))
		delete(fields, "ipam_conf")
		raw, err = json.Marshal(fields)
		d.must(err)
		d.must(os.WriteFile(path, raw, 0o600))
		d.ok("DEL", p, list)
		if list == nil {
			d.asked("DEL")
		} else {
			d.asked() // there is nothing to ask it with
		}
		d.unchanged(d.before)
	}
}

// The list names host-local now, and the ipam plugin of before has been removed from the node: what it gave is nobody's to
// take back any more, and no reason to keep a pod.
func TestDelWhenTheIPAMPluginIsGone(t *testing.T) {
	d := newDelegating(t)
	d.answer("172.20.3.4/16")
	p := d.newPod()
	d.add(p, nil)
	d.must(os.Remove(filepath.Join(d.plugins, ipamName)))
	if _, e := d.call("DEL", p, nil); e == nil {
		t.Error("DEL does not mind that the plugin of its own list is gone")
	}
	hostLocal := map[string]any{"ipam": map[string]any{"type": "host-local", "ranges": [][]any{{map[string]any{"subnet": "10.9.0.0/24"}}}}}
	for range 2 {
		if _, e := d.call("DEL", p, hostLocal); e != nil {
			t.Errorf("DEL: %v", e)
		}
	}
	if _, e := d.call("GC", nil, map[string]any{"ipam": hostLocal["ipam"], "cni.dev/valid-attachments": []any{}}); e != nil {
		t.Errorf("GC: %v", e)
	}
}
