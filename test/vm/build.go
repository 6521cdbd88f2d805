package main

import (
	"context"
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

// suite is one package's tests, for both sides.
type suite struct {
	wire.Suite
	tests []string // by name, those that must run; before a kernel is chosen, all
}

// workshop makes what is the same for all kernels: binaries, and the archive of them.
type workshop struct {
	dir    string // for what is built
	root   string // of the checkout
	suites []suite
}

// build compiles the tests of the packages and what they and the machine need.
func build(ctx context.Context, root, dir string, packages []string, o testOptions) (*workshop, error) {
	w := &workshop{dir: dir, root: root}
	// Packages may be of any module.
	in := []string{"tools/in-modules.sh", strings.Join(packages, " ")}
	for _, command := range [][]string{
		{"go", "build", "-ldflags", "-s -w", "-o", w.path("init"), "./test/vm/init"},
		// The product's tests drive the plugin with cnitool, and chain tuning after it.
		{"go", "build", "-ldflags", "-s -w", "-o", w.path("bin") + "/", "github.com/containernetworking/cni/cnitool", "github.com/containernetworking/plugins/plugins/meta/tuning", "./cmd/..."},
		slices.Concat(in, []string{"go", "test", "{}", "-c", "-ldflags", "-s -w", "-o", w.path("tests") + "/"}),
	} {
		if _, err := w.run(ctx, command...); err != nil {
			return nil, err
		}
	}
	list, err := w.run(ctx, slices.Concat(in, []string{"go", "list", "-f", "{{.Dir}}", "{}"})...)
	if err != nil {
		return nil, err
	}
	for at := range strings.FieldsSeq(list) {
		if err := w.addSuite(ctx, at, o); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *workshop) path(name string) string { return filepath.Join(w.dir, name) }

// run runs a command at the root and returns what it says; go builds for a machine without a C library.
func (w *workshop) run(ctx context.Context, command ...string) (string, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = w.root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	return string(out), nil
}

// addSuite takes a package in, if it has tests.
func (w *workshop) addSuite(ctx context.Context, at string, o testOptions) error {
	dir, err := filepath.Rel(w.root, at)
	if err != nil {
		return err
	}
	binary := filepath.Base(dir) + ".test"
	if _, err := os.Stat(w.path("tests/" + binary)); err != nil {
		return nil // a package without tests
	}
	// The very binary that will run is asked, so that a test which the machine loses is missed.
	list, err := output(ctx, w.path("tests/"+binary), "-test.list", ".")
	if err != nil {
		return err
	}
	s := suite{Suite: wire.Suite{Dir: dir, Binary: binary, Seconds: o.seconds}}
	for name := range strings.FieldsSeq(list) {
		if !strings.HasPrefix(name, "Benchmark") && !strings.HasPrefix(name, "Example") {
			s.tests = append(s.tests, name)
		}
	}
	if o.update && dir == verifierDir {
		s.Fetch = "testdata/verifier-*.txt"
	}
	w.suites = append(w.suites, s)
	return nil
}

// busybox is what the tests find in place of a node's own programs.
const busybox = "/bin/busybox"

// static fails for a program that needs libraries, which the machine has none of.
func static(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if f.Section(".interp") != nil {
		return fmt.Errorf("%s is not static: install Debian's busybox-static", path)
	}
	return nil
}

// image writes the archive that a kernel boots with: what is common, the kernel's modules, and the plan.
func (w *workshop) image(k kernel, suites []suite) (string, error) {
	if err := static(busybox); err != nil {
		return "", err
	}
	plan := wire.Plan{Env: []string{
		"PATH=/bin", "HOME=/tmp", "REQUIRE_PRIVILEGED=1", "EBPF_CNI_BIN=" + wire.BinDir, "EBPF_CNI_PATIENCE=5",
	}}
	f, err := os.CreateTemp(w.dir, "root-*.cpio")
	if err != nil {
		return "", err
	}
	defer f.Close()
	a := newArchive(f)
	a.file("init", w.path("init"))
	a.tree(wire.BinDir, w.path("bin"))
	a.file("bin/busybox", busybox)
	for _, name := range []string{"cat", "sleep", "sh"} {
		a.link("bin/"+name, "busybox")
	}
	a.data("etc/hosts", []byte("127.0.0.1 localhost\n"))
	for _, m := range k.loaded {
		a.data(wire.ModuleDir+"/"+m.file, m.content)
		plan.Modules = append(plan.Modules, m.file)
	}
	for _, s := range suites {
		at := filepath.Join(wire.Root, s.Dir)
		a.file(filepath.Join(at, s.Binary), w.path("tests/"+s.Binary))
		a.tree(filepath.Join(at, "testdata"), filepath.Join(w.root, s.Dir, "testdata"))
		plan.Suites = append(plan.Suites, s.Suite)
	}
	raw, err := json.Marshal(plan)
	if err != nil {
		return "", err
	}
	a.data(wire.PlanFile, raw)
	if err := a.end(); err != nil {
		return "", err
	}
	return f.Name(), f.Close()
}
