package datapath

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

var update = flag.Bool("update", false, "write bounds above the instruction counts of now into testdata/verifier.txt")

// configurations are all that differ for the verifier: what turns code off.
func configurations() map[string]config.NodeConfig {
	node := func(masquerade uint32) config.NodeConfig {
		return config.NodeConfig{Masquerade: masquerade, Mark: 0x00800000, SnatPortLow: 49152, SnatPortHigh: 65535}
	}
	narrow := node(1)
	narrow.SnatPortLow = narrow.SnatPortHigh
	return map[string]config.NodeConfig{"masquerade": node(1), "no-masquerade": node(0), "one-port": narrow}
}

// headroom is how much more work than now the bounds that -update writes leave:
// what exceeds them was not a small change.
func headroom(instructions int) int { return (instructions*5/4/100 + 1) * 100 }

// TestVerifier loads every configuration and compares how many instructions the
// verifier walked through with the bounds in testdata/verifier.txt. Other kernels
// count differently, so the bounds are of the kernel that is named there.
func TestVerifier(t *testing.T) {
	priv.Require(t)
	got := make(map[string]int)
	for name, node := range configurations() {
		for program, instructions := range verified(t, node) {
			got[name+" "+program] = instructions
		}
	}
	path := filepath.Join("testdata", "verifier.txt")
	if *update {
		writeBounds(t, path, got)
	}
	bounds, kernel := readBounds(t, path)
	for what, n := range got {
		bound, ok := bounds[what]
		switch {
		case n == 0 || n > 1_000_000:
			t.Errorf("%s: the verifier counts %d instructions", what, n)
		case !ok:
			t.Errorf("%s: no bound in %s (go test ./pkg/datapath -run TestVerifier -update)", what, path)
		case kernel == majorMinor() && n > bound:
			t.Errorf("%s: %d instructions, the bound in %s is %d", what, n, path, bound)
		}
	}
	for what := range bounds {
		if _, ok := got[what]; !ok {
			t.Errorf("%s is in %s and nowhere else", what, path)
		}
	}
}

// verified loads the embedded programs and returns the verifier's counts.
func verified(t *testing.T, node config.NodeConfig) map[string]int {
	t.Helper()
	spec, err := configure(Options{NodeConfig: node})
	check(t, err)
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer coll.Close()
	out := make(map[string]int)
	for name, p := range coll.Programs {
		info, err := p.Info()
		check(t, err)
		n, _ := info.VerifiedInstructions()
		out[name] = int(n)
	}
	return out
}

func majorMinor() string {
	parts := strings.SplitN(release(), ".", 3)
	return strings.Join(parts[:min(2, len(parts))], ".")
}

func writeBounds(t *testing.T, path string, counts map[string]int) {
	t.Helper()
	var lines []string
	for what, n := range counts {
		lines = append(lines, fmt.Sprintf("%s %d\n", what, headroom(n)))
	}
	slices.Sort(lines)
	check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check(t, os.WriteFile(path, []byte("linux "+majorMinor()+"\n"+strings.Join(lines, "")), 0o644))
}

// readBounds returns the counts by configuration and program, and the kernel
// that they are of.
func readBounds(t *testing.T, path string) (map[string]int, string) {
	t.Helper()
	text, err := os.ReadFile(path)
	check(t, err)
	first, rest, _ := strings.Cut(string(text), "\n")
	bounds := make(map[string]int)
	for line := range strings.Lines(rest) {
		var name, program string
		var n int
		if _, err := fmt.Sscan(line, &name, &program, &n); err != nil {
			t.Fatalf("%s: %q: %v", path, line, err)
		}
		bounds[name+" "+program] = n
	}
	return bounds, strings.TrimPrefix(first, "linux ")
}
