package maps

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/registry"
)

// TestHeadersAreCovered finds a struct that no map has, and that nobody compares.
func TestHeadersAreCovered(t *testing.T) {
	headers, err := filepath.Glob("*/*.h")
	if err != nil || len(headers) < len(registry.Pinned())-6 {
		t.Fatalf("headers: %v, %v", headers, err)
	}
	records, found := records(t), 0
	for _, file := range headers {
		for _, m := range regexp.MustCompile(`(?m)^struct (\w+) \{`).FindAllStringSubmatch(read(t, file), -1) {
			found++
			if _, ok := records[m[1]]; !ok {
				t.Errorf("%s: struct %s is not compared with Go", file, m[1])
			}
		}
	}
	if found != len(records) {
		t.Errorf("%d structs in the headers, %d are compared", found, len(records))
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
