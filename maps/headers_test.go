package maps

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/traffic"
)

// TestHeadersAreCovered finds a struct or an enum that the tables above forgot.
func TestHeadersAreCovered(t *testing.T) {
	headers, err := filepath.Glob("*/*.h")
	if err != nil || len(headers) < len(mapTypes)-3 {
		t.Fatalf("headers: %v, %v", headers, err)
	}
	found := map[string]bool{}
	for _, file := range headers {
		for _, m := range regexp.MustCompile(`(?m)^(struct|enum) (\w+) \{`).FindAllStringSubmatch(read(t, file), -1) {
			found[m[1]+" "+m[2]] = true
			_, isRecord := records[m[2]]
			_, isEnum := enums[m[2]]
			if m[1] == "struct" && !isRecord || m[1] == "enum" && !isEnum {
				t.Errorf("%s: %s %s is not compared with Go", file, m[1], m[2])
			}
		}
	}
	if len(found) != len(records)+len(enums) {
		t.Errorf("%d structs and enums in the headers, %d are compared", len(found), len(records)+len(enums))
	}
}

// TestExplanations holds what people are told against the headers' comments.
func TestExplanations(t *testing.T) {
	for _, c := range []struct {
		file, prefix string
		count        int
		explain      func(i int) (name, explanation string)
	}{
		{"drops/drops.h", "DROP_", int(drops.Reasons), func(i int) (string, string) {
			return drops.Reason(i).String(), drops.Reason(i).Explain()
		}},
		{"traffic/traffic.h", "TRAFFIC_", int(traffic.Events), func(i int) (string, string) {
			return strings.ToUpper(traffic.Event(i).String()), traffic.Event(i).Explain()
		}},
	} {
		comments := map[string]string{}
		line := regexp.MustCompile(`(?m)^\t` + c.prefix + `(\w+),\s*/\* (.*) \*/$`)
		for _, m := range line.FindAllStringSubmatch(read(t, c.file), -1) {
			comments[m[1]] = m[2]
		}
		for i := range c.count {
			name, explanation := c.explain(i)
			if comments[name] == "" || comments[name] != explanation {
				t.Errorf("%s%s: the header says %q, Go %q", c.prefix, name, comments[name], explanation)
			}
		}
		if len(comments) != c.count {
			t.Errorf("%s explains %d values, Go knows %d", c.file, len(comments), c.count)
		}
	}
	if got := drops.Reasons.Explain(); got == "" || got == drops.None.Explain() {
		t.Errorf("an unknown reason is explained as %q", got)
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
