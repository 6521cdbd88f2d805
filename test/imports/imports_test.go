// Package imports holds the project's packages to the order in which they may
// build on each other.
package imports

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/ebpf-cni/ebpf-cni"

// rules says what each package may import beside the standard library: first
// of this module, then of others. A pattern is a path, or a path and "/..." for
// it and all below it; the rule that names a package most closely is its rule.
// Only test, tools and _test.go files are free, and nothing imports them. Nor may
// they import what is in a module of its own, as the lab is.
var rules = map[string][]string{
	"bpf": {"github.com/cilium/ebpf/..."},

	"maps/raw":      {"github.com/cilium/ebpf/..."},
	"maps/typed":    {"maps/raw", "maps/wire", "github.com/cilium/ebpf/..."},
	"maps/wire":     {},
	"maps/flow":     {"maps/wire"},
	"maps/counters": {"maps/typed", "maps/wire", "github.com/cilium/ebpf/..."},
	"maps/...":      {"maps/counters", "maps/flow", "maps/typed", "maps/wire", "github.com/cilium/ebpf/..."},
	"maps/bridges":  {"maps/destinations", "maps/endpoints", "maps/typed", "maps/wire"}, // an endpoint for a destination
	"maps/sources":  {"maps/destinations", "maps/typed", "maps/wire"},                   // a key has a destination's prefix
	"maps/registry": {"maps/..."},

	// The plugin links what stands here: no Kubernetes, no BPF objects.
	"cni": {
		"maps/...", "pkg/attach", "pkg/bpffs", "pkg/device", "pkg/endpoint/...",
		"github.com/containernetworking/cni/...", "github.com/containernetworking/plugins/...",
		"github.com/cilium/ebpf/...", "golang.org/x/sys/unix",
	},
	"pkg/endpoint/ipam": {
		"pkg/bpffs",
		"github.com/containernetworking/cni/...", "github.com/containernetworking/plugins/...",
		"golang.org/x/sys/unix",
	},
	"pkg/dockeropts": {"pkg/install"},
	"pkg/install":    {"golang.org/x/sys/unix"},
	"pkg/health":     {},
	"pkg/guard":      {},
	"pkg/netfilter":  {"github.com/vishvananda/netlink/...", "golang.org/x/sys/unix"},
	"pkg/endpoint": {
		"pkg/endpoint/ipam", "maps/...", "pkg/attach", "pkg/bpffs", "pkg/device", "pkg/guard",
		"github.com/containernetworking/cni/...", "github.com/cilium/ebpf/...", "golang.org/x/sys/unix",
	},

	"pkg/bpffs":  {"github.com/cilium/ebpf/...", "golang.org/x/sys/unix"},
	"pkg/device": {"github.com/vishvananda/netlink/...", "github.com/vishvananda/netns", "golang.org/x/sys/unix"},
	"pkg/attach": {
		"pkg/bpffs",
		"github.com/cilium/ebpf/...", "github.com/vishvananda/netlink/...", "golang.org/x/sys/unix",
	},
	// Plain values in, plain values out.
	"pkg/plan":    {"maps/...", "github.com/gaissmai/bart"},
	"pkg/service": {"maps/...", "pkg/guard"},
	// For the types of the objects.
	"pkg/source": {
		"maps/wire", "pkg/plan", "pkg/service", "golang.org/x/sync/errgroup", "google.golang.org/protobuf/encoding/protowire", "k8s.io/...", "sigs.k8s.io/yaml/...", "github.com/fsnotify/fsnotify",
	},
	// A source of Nodes that writes as well: its own lease.
	"pkg/lease": {
		"maps/wire", "pkg/install", "pkg/plan", "pkg/source", "go.etcd.io/etcd/...", "go.uber.org/zap", "google.golang.org/grpc/...",
	},
	"pkg/datapath": {
		"bpf", "maps/...", "pkg/attach", "pkg/bpffs", "pkg/datapath/migrate",
		"github.com/cilium/ebpf/...", "golang.org/x/sync/errgroup", "golang.org/x/sys/unix",
	},
	// Knows no program: the specs of the maps are passed in.
	"pkg/datapath/migrate": {"maps/...", "pkg/bpffs", "github.com/cilium/ebpf/...", "golang.org/x/sys/unix"},
	"pkg/observe": {
		"maps/...", "pkg/attach", "pkg/bpffs", "pkg/device", "pkg/endpoint",
		"github.com/cilium/ebpf/...", "github.com/prometheus/client_golang/...", "golang.org/x/sys/unix", "sigs.k8s.io/yaml/...",
	},
	"pkg/agent/...": {
		"maps/...", "pkg/...",
		"github.com/gaissmai/bart", "github.com/prometheus/client_golang/...", "golang.org/x/sync/errgroup", "golang.org/x/sys/unix", "k8s.io/...",
	},

	"cmd/internal/cli": {"github.com/spf13/cobra", "github.com/spf13/pflag"},
	"cmd/ebpf-agent":   {"cmd/internal/cli", "maps/wire", "pkg/agent/...", "github.com/spf13/cobra", "github.com/spf13/pflag", "golang.org/x/sys/unix"},
	"cmd/ebpf-cni":     {"cni"},
	"cmd/ebpfctl": {
		"cmd/internal/cli", "maps/...", "pkg/attach", "pkg/bpffs", "pkg/dockeropts", "pkg/endpoint/ipam", "pkg/observe",
		"github.com/spf13/cobra", "sigs.k8s.io/yaml/...",
	},
}

// clock names what of package time asks which time it is or waits for one.
var clock = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTicker", "NewTimer"}

func TestImports(t *testing.T) {
	files := goFiles(t, "../..", noTest)
	seen := map[string]bool{}
	for _, file := range files {
		dir := path.Dir(file.path)
		seen[dir] = true
		for _, finding := range check(dir, file.imports()) {
			t.Errorf("%s: %s", file.path, finding)
		}
	}
	for _, must := range []string{"bpf", "cni", "pkg/agent", "pkg/plan", "maps/wire", "cmd/ebpf-cni"} {
		if !seen[must] {
			t.Errorf("no Go file of %s was looked at: the test reads the wrong tree", must)
		}
	}
}

// The lab, what is built on it, and what they require are no matter of whoever
// installs a command: not even a test of the product's module may need them.
func TestModuleNeedsNoOtherOfOurs(t *testing.T) {
	for _, file := range goFiles(t, "../..", anyFile) {
		for _, imp := range file.imports() {
			if dir, ours := strings.CutPrefix(imp, module+"/"); ours && inOtherModule("../..", dir) {
				t.Errorf("%s: imports %s, which is in a module of its own", file.path, imp)
			}
		}
	}
	if !inOtherModule("../..", "test/lab") {
		t.Error("the lab is in the product's module: the test reads the wrong tree")
	}
	content, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(content), "replace") {
		t.Error("go.mod replaces a module: go install NAME@VERSION refuses that")
	}
}

func TestPlansHaveNoClock(t *testing.T) {
	for _, dir := range []string{"pkg/plan", "pkg/service"} {
		for _, file := range goFiles(t, "../../"+dir, noTest) {
			for _, finding := range file.uses("time", clock) {
				t.Errorf("%s: %s; a plan is a function of its input, pass the time in", dir, finding)
			}
		}
	}
}

func TestCheckRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		dir      string
		imported string
	}{
		"client-go in the plugin":       {"cni", "k8s.io/client-go/rest"},
		"the objects in the plugin":     {"cni", module + "/bpf"},
		"the objects in attach":         {"pkg/attach", module + "/bpf"},
		"map access in the plan":        {"pkg/plan", "github.com/cilium/ebpf"},
		"netlink in the plan":           {"pkg/plan", "github.com/vishvananda/netlink"},
		"one map's package in another":  {"maps/snat", module + "/maps/conntrack"},
		"the list in what it lists":     {"maps/snat", module + "/maps/registry"},
		"the programs in a migration":   {"pkg/datapath/migrate", module + "/bpf"},
		"the lab in a product":          {"pkg/agent", module + "/test/lab"},
		"the plugin in the agent":       {"pkg/agent", module + "/cni"},
		"another command's package":     {"cmd/ebpf-cni", module + "/pkg/agent"},
		"a name that only starts alike": {"cni", module + "/pkg/bpffsx"},
		"netlink in the agent":          {"pkg/agent", "github.com/vishvananda/netlink"},
		"the source in the plan":        {"pkg/plan", module + "/pkg/source"},
		"a package without a rule":      {"pkg/unheard", "fmt"},
	} {
		t.Run(name, func(t *testing.T) {
			if len(check(c.dir, []string{c.imported})) == 0 {
				t.Errorf("%s may import %s", c.dir, c.imported)
			}
		})
	}
}

// check returns a sentence for every import that the rule for dir forbids.
func check(dir string, imported []string) (findings []string) {
	if top, _, _ := strings.Cut(dir, "/"); top == "test" || top == "tools" {
		return nil
	}
	allowed, ok := ruleFor(dir)
	if !ok {
		return []string{fmt.Sprintf("package %s has no rule in test/imports; say there what it may import", dir)}
	}
	for _, imp := range imported {
		name, ours := strings.CutPrefix(imp, module+"/")
		if standard := !ours && !strings.Contains(strings.Split(imp, "/")[0], "."); standard {
			continue
		}
		if !slices.ContainsFunc(allowed, func(pattern string) bool { return matches(pattern, name) }) {
			findings = append(findings, fmt.Sprintf("package %s may not import %s (rules: test/imports)", dir, imp))
		}
	}
	return findings
}

func ruleFor(dir string) (allowed []string, ok bool) {
	if allowed, ok = rules[dir]; ok {
		return allowed, true
	}
	longest := ""
	for pattern := range rules {
		if matches(pattern, dir) && len(pattern) > len(longest) {
			longest = pattern
		}
	}
	return rules[longest], longest != ""
}

func matches(pattern, name string) bool {
	base, below := strings.CutSuffix(pattern, "/...")
	return name == base || below && strings.HasPrefix(name, base+"/")
}

type goFile struct {
	path   string // from the top of the tree, with slashes
	syntax *ast.File
}

func anyFile(string) bool     { return true }
func noTest(name string) bool { return !strings.HasSuffix(name, "_test.go") }

// goFiles parses the Go files of the module below root whose names are wanted.
func goFiles(t *testing.T, root string, wanted func(name string) bool) (files []goFile) {
	t.Helper()
	err := filepath.WalkDir(root, func(at string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if at != root && (strings.HasPrefix(name, ".") || name == "testdata" || hasGoMod(at)) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || !wanted(name) {
			return nil
		}
		syntax, err := parser.ParseFile(token.NewFileSet(), at, nil, 0)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, at)
		if err != nil {
			return err
		}
		files = append(files, goFile{filepath.ToSlash(rel), syntax})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatalf("no Go files in %s", root)
	}
	return files
}

// hasGoMod says whether dir is a module of its own.
func hasGoMod(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// inOtherModule says whether dir, seen from root, is in a module below root.
func inOtherModule(root, dir string) bool {
	for ; dir != "."; dir = path.Dir(dir) {
		if hasGoMod(filepath.Join(root, dir)) {
			return true
		}
	}
	return false
}

func (f goFile) imports() (imported []string) {
	for _, spec := range f.syntax.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			panic(err) // the parser has let it pass
		}
		imported = append(imported, name)
	}
	return imported
}

// uses returns a sentence for each use of one of names of the package imported as pkg.
func (f goFile) uses(pkg string, names []string) (findings []string) {
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == pkg && slices.Contains(names, sel.Sel.Name) {
			findings = append(findings, fmt.Sprintf("%s uses %s.%s", f.path, pkg, sel.Sel.Name))
		}
		return true
	})
	return findings
}
