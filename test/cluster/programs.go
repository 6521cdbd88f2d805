package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// KubernetesVersion is what go.mod requires; the programs are told, since they parse their own version.
const KubernetesVersion = "v1.36.3"

// built are the programs that are compiled here, by package.
var built = map[string]string{
	"kube-apiserver":          "k8s.io/kubernetes/cmd/kube-apiserver",
	"kubelet":                 "k8s.io/kubernetes/cmd/kubelet",
	"kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
	"kube-scheduler":          "k8s.io/kubernetes/cmd/kube-scheduler",
	"kube-proxy":              "k8s.io/kubernetes/cmd/kube-proxy",
	"kubectl":                 "k8s.io/kubernetes/cmd/kubectl",
	"agnhost":                 "k8s.io/kubernetes/test/images/agnhost",
	"loopback":                "github.com/containernetworking/plugins/plugins/main/loopback",
	"coredns":                 "./coredns",
	"pause":                   "./pause",
	"greet":                   "./greet",
	"flanneld":                "./flanneld",
	"flannel":                 "github.com/containernetworking/plugins/plugins/meta/flannel",
	"bridge":                  "github.com/containernetworking/plugins/plugins/main/bridge",
	"host-local":              "github.com/containernetworking/plugins/plugins/ipam/host-local",
	"portmap":                 "github.com/containernetworking/plugins/plugins/meta/portmap",
}

// ownModules are the directories of programs whose requirements stand in a go.mod of their own.
var ownModules = map[string]string{
	"flanneld": "flannel", "flannel": "flannel", "bridge": "flannel", "host-local": "flannel", "portmap": "flannel",
}

// packaged are those that are installed, or that tools/setup.sh has unpacked into the cache.
var packaged = []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc", "etcd"}

// PreparePrograms makes the cache hold every program and returns the directories that they are in, for a PATH. The first
// time it compiles Kubernetes, which takes minutes.
func PreparePrograms(ctx context.Context) ([]string, error) {
	cache, unlock, err := openCache()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := buildAll(ctx, cache.programs); err != nil {
		return nil, err
	}
	unpacked := []string{filepath.Join(cache.debian, "usr/bin"), filepath.Join(cache.debian, "usr/sbin")}
	return append([]string{cache.programs}, unpacked...), checkPackaged(unpacked)
}

// checkPackaged looks for packaged programs in those directories and in the PATH.
func checkPackaged(dirs []string) error {
	for _, name := range packaged {
		_, err := exec.LookPath(name)
		for _, dir := range dirs {
			if err != nil {
				_, err = exec.LookPath(filepath.Join(dir, name))
			}
		}
		if err != nil {
			return fmt.Errorf("find %s: it is neither installed nor in %s: run tools/setup.sh cluster", name, strings.Join(dirs, " or "))
		}
	}
	return nil
}

// cacheDirs are where programs are kept.
type cacheDirs struct{ programs, debian string }

// openCache makes the cache's directories, and keeps others from building in them.
func openCache() (dirs cacheDirs, unlock func(), err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return dirs, nil, fmt.Errorf("find the cache for Kubernetes' programs: %w", err)
	}
	cache = filepath.Join(cache, "ebpf-cni")
	dirs = cacheDirs{programs: filepath.Join(cache, "kubernetes-"+KubernetesVersion), debian: filepath.Join(cache, "debian")}
	if err := os.MkdirAll(dirs.programs, 0o755); err != nil {
		return dirs, nil, fmt.Errorf("make the cache for Kubernetes' programs: %w", err)
	}
	unlock, err = lockCache(cache)
	return dirs, unlock, err
}

// lockCache makes builders wait for each other.
func lockCache(cache string) (unlock func(), err error) {
	lock, err := os.OpenFile(filepath.Join(cache, "cluster.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return func() { lock.Close() }, nil
}

func buildAll(ctx context.Context, dir string) error {
	root, err := moduleDir()
	if err != nil {
		return err
	}
	byModule := map[string]map[string]string{}
	for name, pkg := range built {
		module := filepath.Join(root, ownModules[name])
		if byModule[module] == nil {
			byModule[module] = map[string]string{}
		}
		byModule[module][name] = pkg
	}
	for _, module := range slices.Sorted(maps.Keys(byModule)) {
		if err := build(ctx, module, dir, byModule[module]); err != nil {
			return err
		}
	}
	return nil
}

// build compiles a module's programs, given by name with their packages, into a directory, but for those that are there and
// come from the same requirements: a file beside each says from which. All at once, so that one is linked while another's
// packages are compiled. By rename, so that what is there is whole.
func build(ctx context.Context, module, dir string, programs map[string]string) error {
	return compile(ctx, module, dir, programs, "build")
}

// compile is build by a command of go, with its flags.
func compile(ctx context.Context, module, dir string, programs map[string]string, command ...string) error {
	keys := map[string]string{}
	for name, pkg := range programs {
		key, err := sourceKey(module, pkg)
		if err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
		if !isBuilt(filepath.Join(dir, name), key) {
			keys[name] = key
		}
	}
	if len(keys) == 0 {
		return nil
	}
	fresh := filepath.Join(dir, "new")
	if err := errors.Join(os.RemoveAll(fresh), os.Mkdir(fresh, 0o755)); err != nil { // a killed run leaves it
		return fmt.Errorf("make a directory to build in: %w", err)
	}
	defer os.RemoveAll(fresh)
	names := slices.Sorted(maps.Keys(keys))
	fmt.Fprintln(os.Stderr, "building", strings.Join(names, ", "))
	args := slices.Concat(command, []string{"-ldflags", linkerFlags(), "-o", fresh + "/"})
	for _, name := range names {
		args = append(args, programs[name])
	}
	if _, err := goIn(ctx, module, args...); err != nil {
		return err
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if err := os.Rename(filepath.Join(fresh, name), path); err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
		if err := os.WriteFile(stampOf(path), []byte(keys[name]), 0o644); err != nil {
			return fmt.Errorf("note what %s was built from: %w", name, err)
		}
	}
	return nil
}

// stampOf is the file that says what a program was built from.
func stampOf(path string) string { return path + ".source" }

func isBuilt(path, key string) bool {
	have, err := os.ReadFile(stampOf(path))
	if err != nil || string(have) != key {
		return false
	}
	_, err = os.Stat(path)
	return err == nil
}

// sourceKey stands for all that a program is made from: the requirements, our own source, the compiler.
func sourceKey(module, pkg string) (string, error) {
	files := []string{filepath.Join(module, "go.mod")}
	if strings.HasPrefix(pkg, "./") {
		own, err := goFiles(filepath.Join(module, pkg))
		if err != nil {
			return "", err
		}
		files = append(files, own...)
	}
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.Version(), linkerFlags(), pkg)
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		// Who requires a module, this one or another, says nothing about its version, nor does the place in the list.
		lines := strings.Split(strings.ReplaceAll(string(content), " // indirect", ""), "\n")
		if strings.HasSuffix(file, "go.mod") {
			slices.Sort(lines)
		}
		fmt.Fprintln(sum, lines)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// goFiles are those in and below a directory, in order.
func goFiles(dir string) (files []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && filepath.Ext(path) == ".go" {
			files = append(files, path)
		}
		return err
	})
	return files, err
}

// linkerFlags tell the programs their version.
func linkerFlags() string {
	flags := "-s -w"
	for _, v := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, setting := range []string{
			"gitVersion=" + KubernetesVersion, "gitMajor=1", "gitMinor=36", "gitTreeState=clean",
			"gitCommit=unknown", "buildDate=1970-01-01T00:00:00Z",
		} {
			flags += " -X " + v + "." + setting
		}
	}
	return flags
}

// moduleDir is where this module's go.mod is, seen from a test or from the command.
func moduleDir() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	dir := filepath.Dir(strings.TrimSpace(string(out)))
	if err == nil && filepath.Base(dir) != "cluster" {
		err = fmt.Errorf("the working directory belongs to %s: run this in test/cluster", dir)
	}
	return dir, err
}

// checkout is the directory of the project.
func checkout() (string, error) {
	module, err := moduleDir()
	return filepath.Join(module, "../.."), err
}

// ReadTestdata reads a file of test/testdata, which is of another module.
func ReadTestdata(name string) ([]byte, error) {
	root, err := checkout()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(root, "test/testdata", name))
}
