package install

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// edit changes the list in dir as a program does that knows nothing of its order of fields: it decodes and encodes all.
func edit(t *testing.T, dir string, change func(list map[string]any, plugins []any) []any) {
	t.Helper()
	path := filepath.Join(dir, Conflist)
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var list map[string]any
	if err := json.Unmarshal(content, &list); err != nil {
		t.Fatal(err)
	}
	list["plugins"] = change(list, list["plugins"].([]any))
	if content, err = json.Marshal(list); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func appended(types ...string) func(map[string]any, []any) []any {
	return func(_ map[string]any, plugins []any) []any {
		for _, kind := range types {
			plugins = append(plugins, map[string]any{"type": kind, "extra": 1e3})
		}
		return plugins
	}
}

// renew writes the list as the agent does. It returns whether it wrote, and the plugins in the list afterwards.
func renew(t *testing.T, dir string, l List) (wrote bool, types []string) {
	t.Helper()
	var err error
	if l.Others, err = ReadOthers(dir); err != nil {
		t.Fatal(err)
	}
	if wrote, err = WriteList(dir, l); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, Conflist))
	if err != nil {
		t.Fatal(err)
	}
	var have struct{ Plugins []Entry }
	if err := json.Unmarshal(content, &have); err != nil {
		t.Fatal(err)
	}
	return wrote, typesOf(have.Plugins)
}

func TestOthersStay(t *testing.T) {
	tuning, sbr := Entry(`{"type": "tuning", "mtu": 1300}`), Entry(`{"type": "sbr"}`)
	for _, tt := range []struct {
		name   string
		first  func(*List) // the list that other programs change
		change func(map[string]any, []any) []any
		then   func(*List) // what the agent writes afterwards
		wrote  bool
		want   string
	}{
		{name: "appended", change: appended("istio-cni"), want: "ebpf-cni istio-cni"},
		{name: "appended twice", change: appended("tuning", "tuning"), want: "ebpf-cni tuning tuning"},
		{name: "our own change", change: appended("istio-cni"), then: func(l *List) { l.MTU = 1400 }, wrote: true, want: "ebpf-cni istio-cni"},
		{name: "portmap from now on", change: appended("istio-cni"), then: func(l *List) { l.Portmap = true }, wrote: true, want: "ebpf-cni portmap istio-cni"},
		{name: "portmap no more", first: func(l *List) { l.Portmap = true }, change: appended("istio-cni"), wrote: true, want: "ebpf-cni istio-cni"},
		{name: "portmap and another", change: appended("portmap"), then: func(l *List) { l.Portmap = true }, wrote: true, want: "ebpf-cni portmap"},
		{name: "chained", first: func(l *List) { l.Chain = []Entry{tuning} }, change: appended("istio-cni"), then: func(l *List) { l.Chain = []Entry{tuning} }, want: "ebpf-cni tuning istio-cni"},
		{name: "chained no more", first: func(l *List) { l.Chain = []Entry{tuning, sbr} }, change: appended("istio-cni", "sbr"), then: func(l *List) { l.Chain = []Entry{tuning} }, wrote: true, want: "ebpf-cni tuning istio-cni sbr"},
		{
			name: "the chained one was removed", first: func(l *List) { l.Chain = []Entry{tuning} }, then: func(l *List) { l.Chain = []Entry{tuning} }, wrote: true, want: "ebpf-cni tuning",
			change: func(_ map[string]any, plugins []any) []any { return plugins[:1] },
		},
		{
			name: "before ours", wrote: true, want: "ebpf-cni istio-cni",
			change: func(_ map[string]any, plugins []any) []any {
				return append([]any{map[string]any{"type": "bridge"}}, append(plugins, map[string]any{"type": "istio-cni"})...)
			},
		},
		{
			name: "instead of ours", wrote: true, want: "ebpf-cni",
			change: func(map[string]any, []any) []any { return []any{map[string]any{"type": "bridge"}} },
		},
		{
			name: "ours was changed", wrote: true, want: "ebpf-cni istio-cni",
			change: func(_ map[string]any, plugins []any) []any {
				plugins[0].(map[string]any)["mtu"] = 9000
				return append(plugins, map[string]any{"type": "istio-cni"}, map[string]any{"type": "a/b"}, 7)
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, l := t.TempDir(), list()
			if tt.first != nil {
				tt.first(&l)
			}
			renew(t, dir, l)
			edit(t, dir, tt.change)
			l = list()
			if tt.then != nil {
				tt.then(&l)
			}
			wrote, types := renew(t, dir, l)
			if wrote != tt.wrote || strings.Join(types, " ") != tt.want {
				t.Errorf("wrote %t, want %t; the plugins are %v, want %s", wrote, tt.wrote, types, tt.want)
			}
			if wrote, types := renew(t, dir, l); wrote || strings.Join(types, " ") != tt.want {
				t.Errorf("it was written again, with %v", types)
			}
		})
	}
}

// A field of the list itself that the agent does not know stays as well, and so does the configuration of a plugin, word for word.
func TestOthersStayAsTheyAre(t *testing.T) {
	dir, l := t.TempDir(), list()
	renew(t, dir, l)
	edit(t, dir, func(list map[string]any, plugins []any) []any {
		list["disableCheck"] = true
		return append(plugins, map[string]any{"type": "tuning", "big": json.Number("12345678901234567890")})
	})
	l.MTU = 1300
	renew(t, dir, l)
	content, err := os.ReadFile(filepath.Join(dir, Conflist))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"disableCheck": true`, `"big": 12345678901234567890`, `"mtu": 1300`} {
		if !strings.Contains(string(content), want) {
			t.Errorf("no %s in\n%s", want, content)
		}
	}
}

func TestSetAside(t *testing.T) {
	dir := t.TempDir()
	if there, err := SetAside(dir); there || err != nil {
		t.Errorf("nothing: %t, %v", there, err)
	}
	renew(t, dir, list())
	edit(t, dir, appended("istio-cni"))
	if there, err := SetAside(dir); !there || err != nil {
		t.Errorf("a list: %t, %v", there, err)
	}
	for _, name := range files(t, dir) {
		if ext := filepath.Ext(name); ext == ".conflist" || ext == ".conf" || ext == ".json" {
			t.Errorf("runtimes read %s", name)
		}
	}
	if _, types := renew(t, dir, list()); strings.Join(types, " ") != "ebpf-cni istio-cni" {
		t.Errorf("afterwards the plugins are %v", types)
	}
	if diff := cmp.Diff([]string{Conflist}, files(t, dir)); diff != "" {
		t.Errorf("files -want +got:\n%s", diff)
	}
	if _, err := SetAside(dir); err != nil {
		t.Error(err)
	}
	if _, err := RemoveList(dir); err != nil || len(files(t, dir)) > 0 {
		t.Errorf("a cleanup leaves %v, %v", files(t, dir), err)
	}
}

func TestParseChain(t *testing.T) {
	for content, want := range map[string]string{
		`[]`: "", `[{"type": "tuning", "sysctl": {}}, {"type": "sbr"}]`: "",
		``: "not a JSON list", `{"type": "tuning"}`: "not a JSON list", `[{"type": "tuning"}`: "not a JSON list",
		`[{"type": "tuning"}, {}]`: "plugin 2 is not", `["tuning"]`: "plugin 1 is not", `[{"type": 1}]`: "plugin 1 is not", `[{"type": "../tuning"}]`: "plugin 1 is not", `[null]`: "plugin 1 is not",
		`[{"type": "ebpf-cni"}]`: "own plugin", `[{"type": "portmap"}]`: "--portmap on", `[{"type": "bandwidth"}]`: "redirected packets bypass",
	} {
		chain, err := ParseChain([]byte(content))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", content, err, want)
		}
		if err == nil && strings.Count(content, "type") != len(chain) {
			t.Errorf("%s: %d plugins", content, len(chain))
		}
	}
}
