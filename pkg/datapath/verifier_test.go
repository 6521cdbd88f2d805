package datapath

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

var update = flag.Bool("update", false, "write the instruction counts of now, and bounds above them, into testdata/verifier-VERSION.txt")

// configurations are all that differ for the verifier: what turns code off.
func configurations() map[string]config.NodeConfig {
	held := config.PortRange{First: 49152, Count: 16384}
	node := func(masquerade uint32) config.NodeConfig {
		return config.NodeConfig{
			Masquerade: masquerade, Mark: 0x00800000, TunnelPort: 4789, TunnelVNI: 4096, TunnelChecksum: 1, SnatHeld: held, SnatPrivileged: config.PortRange{First: 665, Count: 188},
			SnatPorts: [config.PortRanges]config.PortRange{{First: 1024, Count: 7000}, {First: 9000, Count: 20000}, {First: 48649, Count: 10000}, {First: 60000, Count: 5536}},
		}
	}
	narrow := node(1)
	narrow.SnatPorts = [config.PortRanges]config.PortRange{{First: 65535, Count: 1}}
	beside := node(1)
	beside.NetfilterNat = config.Translates
	masquerading := node(1)
	masquerading.NetfilterNat = config.Masquerades
	services := node(3)
	services.Services, services.Loopback, services.HostNetns = 1, 3, 1
	both := services
	both.NetfilterNat = config.Translates
	bridges := both
	bridges.Bridges = 1
	return map[string]config.NodeConfig{
		"masquerade": node(1), "no-masquerade": node(0), "one-port": narrow, "beside-netfilter": beside, "beside-masquerading": masquerading,
		"services": services, "services-beside-netfilter": both, "bridges": bridges,
	}
}

// headroom is how much more work than now the bounds that -update writes leave:
// what exceeds them was not a small change.
func headroom(instructions int) int { return (instructions*5/4/100 + 1) * 100 }

// cost is what one program in one configuration costs the verifier: what it was
// when the file was written, and what it must not exceed.
type cost struct{ instructions, bound int }

// TestVerifier loads every configuration and compares how many instructions the
// verifier walked through with the bounds in testdata/verifier-VERSION.txt. Each
// kernel counts in its own way, so each that the tests run on has a file.
func TestVerifier(t *testing.T) {
	priv.Require(t)
	got := make(map[string]int)
	for name, node := range configurations() {
		for program, instructions := range verified(t, node) {
			got[name+" "+program] = instructions
		}
	}
	path := filepath.Join("testdata", "verifier-"+majorMinor()+".txt")
	if *update {
		writeCosts(t, path, got)
	}
	costs, err := readCosts(path)
	if errors.Is(err, fs.ErrNotExist) {
		t.Logf("Linux %s has no bounds: go test ./pkg/datapath -run TestVerifier -update writes them", majorMinor())
	} else {
		check(t, err)
	}
	for what, n := range got {
		c, ok := costs[what]
		switch {
		case n == 0 || n > 1_000_000:
			t.Errorf("%s: the verifier counts %d instructions", what, n)
		case costs != nil && !ok:
			t.Errorf("%s: no bound in %s (-update writes it)", what, path)
		case ok && n > c.bound:
			t.Errorf("%s: %d instructions, the bound in %s is %d; it was %d", what, n, path, c.bound, c.instructions)
		}
	}
	for what := range costs {
		if _, ok := got[what]; !ok {
			t.Errorf("%s is in %s and nowhere else", what, path)
		}
	}
}

// Programs that have no port left to masquerade to load as others do.
func TestVerifierWithoutPorts(t *testing.T) {
	priv.Require(t)
	none := configurations()["bridges"]
	none.SnatPorts = [config.PortRanges]config.PortRange{}
	verified(t, none)
}

// The kernels that every change is tested on have bounds.
func TestVerifierHasBounds(t *testing.T) {
	for _, version := range []string{"6.1", "6.12", "6.18"} {
		costs, err := readCosts(filepath.Join("testdata", "verifier-"+version+".txt"))
		if err != nil || len(costs) == 0 {
			t.Errorf("Linux %s: %d bounds, %v", version, len(costs), err)
		}
	}
}

// verified loads the embedded programs and returns the verifier's counts.
func verified(t *testing.T, node config.NodeConfig) map[string]int {
	t.Helper()
	spec, err := configure(Options{NodeConfig: node, Cgroup: "/any", Bare: true})
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

func writeCosts(t *testing.T, path string, counts map[string]int) {
	t.Helper()
	var lines []string
	for what, n := range counts {
		lines = append(lines, fmt.Sprintf("%s %d %d\n", what, n, headroom(n)))
	}
	slices.Sort(lines)
	head := "# configuration, program, instructions that the verifier of Linux " + majorMinor() + " walked through, upper bound\n"
	check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check(t, os.WriteFile(path, []byte(head+strings.Join(lines, "")), 0o644))
}

// readCosts returns the costs by configuration and program.
func readCosts(path string) (map[string]cost, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	costs := make(map[string]cost)
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		var name, program string
		var c cost
		if _, err := fmt.Sscan(line, &name, &program, &c.instructions, &c.bound); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", path, line, err)
		}
		costs[name+" "+program] = c
	}
	return costs, nil
}
