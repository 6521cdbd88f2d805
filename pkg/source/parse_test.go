package source

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

func realList(t testing.TB) []byte {
	t.Helper()
	content, err := os.ReadFile("testdata/nodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func wantReal() []plan.Node {
	created := time.Date(2026, 11, 20, 20, 41, 3, 0, time.UTC)
	return []plan.Node{
		{Name: "k8s-n1", Created: created, PodCIDRs: []string{"10.244.0.0/24"}, InternalIPs: []string{"172.18.0.11"}},
		{Name: "k8s-n2", Created: created, PodCIDRs: []string{"10.244.1.0/24"}, InternalIPs: []string{"172.18.0.12"}},
	}
}

func TestParseWhatKubectlPrints(t *testing.T) {
	content := realList(t)
	asJSON, err := yaml.YAMLToJSON(content)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"yaml": content, "json": asJSON,
		"yaml with a document marker": append([]byte("---\n"), content...),
		"yaml with CRLF":              bytes.ReplaceAll(content, []byte("\n"), []byte("\r\n")),
		"flow style":                  []byte(strings.Replace(string(asJSON), `"kind":"List"`, `kind: List`, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(content)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(wantReal(), got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestKubectlsLayoutIsSplit(t *testing.T) {
	if l, ok := splitYAML(realList(t)); !ok || len(l.Items) != 2 || l.Kind != "List" {
		t.Errorf("not split: %v, %d items, kind %q", ok, len(l.Items), l.Kind)
	}
}

// list is a NodeList in YAML with these items.
func listOf(items ...string) string {
	return "apiVersion: v1\nkind: NodeList\nitems:\n- " + strings.Join(items, "\n- ") + "\n"
}

func TestParse(t *testing.T) {
	good := `{metadata: {name: a}, spec: {podCIDRs: [10.0.0.0/24]}}`
	tests := []struct {
		name    string
		content string
		want    []plan.Node
		err     error
	}{
		{"empty", "", nil, ErrEmpty},
		{"blank", " \n\n", nil, ErrEmpty},
		{"comment", "# nothing yet\n", nil, ErrKind},
		{"no items", "apiVersion: v1\nkind: List\nitems: []\n", nil, ErrEmpty},
		{"null items", "apiVersion: v1\nkind: List\nitems:\n", nil, ErrEmpty},
		{"cut off JSON", `{"apiVersion":"v1","kind":"List","items":[{"metadata":{"na`, nil, ErrMalformed},
		{"not YAML", "a: b: c\n", nil, ErrMalformed},
		{"text", "kubectl: command not found\n", nil, ErrKind},
		{"a scalar", "hello\n", nil, ErrKind},
		{"two documents", listOf(good) + "---\n" + listOf(good), nil, ErrMalformed},
		{"more after JSON", `{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"a"}}]} {}`, nil, ErrMalformed},
		{"a single Node", "apiVersion: v1\nkind: Node\nmetadata: {name: a}\n", nil, ErrKind},
		{"another kind", strings.Replace(listOf(good), "NodeList", "PodList", 1), nil, ErrKind},
		{"another version", strings.Replace(listOf(good), "v1", "v2", 1), nil, ErrKind},
		{"a List of Pods", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a}}\n", nil, ErrKind},
		{"a List with items of no kind", "apiVersion: v1\nkind: List\nitems:\n- {metadata: {name: a}}\n", nil, ErrKind},
		{"an item is a text", listOf("hello"), nil, ErrKind},
		{"an item is null", listOf("null"), nil, ErrNameless},
		{"no name", listOf(good, "{metadata: {}}"), nil, ErrNameless},
		{"no metadata", listOf(good, "{spec: {}}"), nil, ErrNameless},
		{"empty name", listOf(`{metadata: {name: ""}}`), nil, ErrNameless},
		{"name is a number", listOf(`{metadata: {name: 5}}`), nil, ErrNameless},
		{"good", listOf(good), []plan.Node{{Name: "a", PodCIDRs: []string{"10.0.0.0/24"}}}, nil},
		{"zone", listOf(`{metadata: {name: a, labels: {topology.kubernetes.io/zone: west, role: r}}}`), []plan.Node{{Name: "a", Zone: "west"}}, nil},
		{"zone is a number", listOf(`{metadata: {name: a, labels: {topology.kubernetes.io/zone: 5}}}`), []plan.Node{{Name: "a"}}, nil},
		{"being deleted", listOf(`{metadata: {name: a, deletionTimestamp: "2026-01-02T03:04:05Z"}}`), []plan.Node{{Name: "a", Leaving: true}}, nil},
		{"about to be deleted", listOf(`{metadata: {name: a}, spec: {taints: [{key: b, effect: NoSchedule}, {key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}}`),
			[]plan.Node{{Name: "a", Leaving: true}}, nil},
		{"taints that stay", listOf(`{metadata: {name: a}, spec: {taints: [{key: b, effect: NoSchedule}]}}`), []plan.Node{{Name: "a"}}, nil},
		{"taints are a number", listOf(`{metadata: {name: a}, spec: {taints: 5, podCIDR: 10.0.0.0/24}}`), []plan.Node{{Name: "a", PodCIDRs: []string{"10.0.0.0/24"}}}, nil},
		{"podCIDR alone", listOf(`{metadata: {name: a}, spec: {podCIDR: 10.0.0.0/24}}`), []plan.Node{{Name: "a", PodCIDRs: []string{"10.0.0.0/24"}}}, nil},
		{"addresses", listOf(`{metadata: {name: a}, status: {addresses: [{type: ExternalIP, address: 1.2.3.4}, {type: InternalIP, address: nonsense}, {type: Hostname, address: a}]}}`),
			[]plan.Node{{Name: "a", ExternalIPs: []string{"1.2.3.4"}, InternalIPs: []string{"nonsense"}}}, nil},
		{"unreadable timestamp", listOf(`{metadata: {name: a, creationTimestamp: yesterday}}`), []plan.Node{{Name: "a"}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse([]byte(tt.content))
			if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestParseKeepsAWrongNodeToItself(t *testing.T) {
	got, err := Parse([]byte(listOf(`{metadata: {name: a}, spec: {podCIDRs: 7}}`, `{metadata: {name: b}}`, `{metadata: {name: c}, status: []}`)))
	if err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	if !strings.Contains(got[0].Malformed, "spec") || got[1].Malformed != "" || !strings.Contains(got[2].Malformed, "status") {
		t.Errorf("got %+v", got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(realList(f))
	f.Add([]byte(mixed(goodNode, goodService, goodSlice, goodCIDR)))
	for _, s := range []string{
		"", "{}", "[]", "items:\n- a\n- b\n", listOf(`{metadata: {name: a}}`), "a: &a [*a]\n",
		"apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Node\n  metadata:\n    name: \"x\n- y\"\n",
		"items:\n- metadata: &m {name: a}\n- metadata: *m\nkind: NodeList\napiVersion: v1\n",
		"items:\n- metadata:\n    name: |\n      a\n- metadata:\n    name: b\nkind: NodeList\napiVersion: v1\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		all, err := parse(content, true)
		nodes := all.nodes
		if (err == nil) != (len(nodes) > 0) {
			t.Fatalf("%d nodes and error %v", len(nodes), err)
		}
		if err != nil && strings.ContainsAny(err.Error(), "\n\r") {
			t.Errorf("an error of several lines: %q", err)
		}
		for _, n := range nodes {
			if n.Name == "" {
				t.Error("a Node without a name")
			}
		}
		for name, s := range all.slices {
			if name != s.Name || name.Name == "" {
				t.Errorf("%v is kept as %v", s.Name, name)
			}
		}
		checkSplit(t, content)
	})
}

// checkSplit compares reading item by item with reading the document at once.
func checkSplit(t *testing.T, content []byte) {
	t.Helper()
	content = bytes.TrimSpace(content)
	parts, ok := splitYAML(content)
	if !ok || oneDocument(content) != nil {
		return
	}
	asJSON, err := yaml.YAMLToJSON(content)
	if err != nil {
		t.Fatalf("split, but as a whole it is: %v\n%s", err, content)
	}
	whole, err := decodeJSON(asJSON)
	if err != nil {
		t.Fatalf("split, but as a whole it is: %v\n%s", err, content)
	}
	if fmt.Sprintf("%s", whole) != fmt.Sprintf("%s", parts) {
		t.Errorf("whole: %s\nparts: %s", whole, parts)
	}
}
