package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// More nodes on the link than the kernel keeps neighbours are one problem of this node, until the sysctl allows for them. The real
// setting is the whole machine's, so this is a file.
func TestTooManyNeighbours(t *testing.T) {
	l := testLoop(t)
	l.cfg.ProcSys = t.TempDir()
	path := filepath.Join(l.cfg.ProcSys, neighboursMax(wire.IPv4))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	allow := func(most string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(most+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		l.pass(t.Context())
	}
	assertProblems := func(when string, want int) {
		t.Helper()
		if problems := l.status.read().problems; problems[neighbourTable] != want || len(problems) != want {
			t.Errorf("%s: problems %v, want %d of this node", when, problems, want)
		}
		if why := l.status.reason(); why != "" {
			t.Errorf("%s: not ready: %s", when, why)
		}
	}
	l.accept(list(n1(), n2(), n3()))
	l.pass(t.Context())
	assertProblems("in a namespace without the setting", 0)
	allow("2")
	assertProblems("room for two and nobody else", 1)
	if told := l.readTold(t).Problems; len(told) != 1 || !strings.Contains(told[0].Text, "gc_thresh3") || !strings.Contains(told[0].Text, "2 nodes") {
		t.Errorf("ebpfctl is told %+v", told)
	}
	allow("3")
	assertProblems("room for three", 0)
}
