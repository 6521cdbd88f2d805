package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// sources are what the binaries of this project are made from, and noSources what lies among them and is not.
var (
	sources   = []string{"bpf", "maps", "pkg", "cni", "cmd", "go.mod", "go.sum"}
	noSources = []string{":(exclude,glob)**/*_test.go", ":(exclude,glob)**/testdata/**"}
)

const manifestSource = "tools/deploy/ebpf-cni.yaml"

// farBack is how many commits that have touched the sources are looked through for one that has changed the binaries.
const farBack = 5

// AddPrevious gives every node the image of this project as it was before the commit that last changed the binaries,
// under a name, and returns the manifest of that time, which asks for this image.
func (c *Cluster) AddPrevious(ctx context.Context, name string) (manifest string, err error) {
	dir, base, err := c.checkoutPrevious(ctx)
	if err != nil {
		return "", err
	}
	if _, err := goIn(ctx, dir, "build", "-ldflags", "-s -w -X main.version="+base[:12], "-o", "bin/", "./cmd/..."); err != nil {
		return "", err
	}
	if err := c.AddAgentImage(ctx, name, filepath.Join(dir, "bin")); err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(dir, manifestSource))
	if err != nil {
		return "", err
	}
	manifest = c.file("previous.yaml")
	return manifest, os.WriteFile(manifest, []byte(strings.ReplaceAll(string(text), AgentImage, name)), 0o644)
}

// checkoutPrevious leaves in a directory the newest commit of which other binaries would be made than of this checkout.
func (c *Cluster) checkoutPrevious(ctx context.Context) (dir, commit string, err error) {
	root, err := checkout()
	if err != nil {
		return "", "", err
	}
	now, err := packages(ctx, root)
	if err != nil {
		return "", "", err
	}
	touched, err := touching(ctx)
	if err != nil {
		return "", "", err
	}
	for _, last := range touched {
		if commit, err = git(ctx, "rev-parse", "--verify", "--quiet", last+"^"); err != nil {
			return "", "", fmt.Errorf("find the commit before %s: this checkout does not have it; git fetch --deepen=100 gets more of the history: %w", last, err)
		}
		dir = c.file("previous-" + commit[:12])
		if err := extract(ctx, commit, dir); err != nil {
			return "", "", err
		}
		then, err := packages(ctx, dir)
		if err != nil {
			return "", "", err
		}
		if then != now {
			return dir, commit, nil
		}
	}
	return "", "", fmt.Errorf("find the previous binaries: the last %d commits that touched the sources have not changed them", len(touched))
}

// touching lists the last commits that have touched the sources, the newest first.
func touching(ctx context.Context) ([]string, error) {
	args := []string{"log", fmt.Sprintf("-%d", farBack), "--format=%H", "--"}
	list, err := git(ctx, slices.Concat(args, sources, noSources)...)
	if err == nil && list == "" {
		err = errors.New("find the previous binaries: no commit has touched the sources")
	}
	return strings.Fields(list), err
}

// extract writes a commit's sources to a new directory.
func extract(ctx context.Context, commit, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	archive := filepath.Join(dir, "source.tar")
	args := []string{"archive", "--output=" + archive, commit, manifestSource}
	if _, err := git(ctx, append(args, sources...)...); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xf", archive, "-C", dir).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack commit %s: %w\n%s", commit, err, out)
	}
	return nil
}

// packages lists what the binaries of a tree are linked from, each package with the hash of what was compiled.
func packages(ctx context.Context, dir string) (string, error) {
	list, err := goIn(ctx, dir, "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.BuildID}}", "./cmd/...")
	if err != nil {
		return "", err
	}
	var all strings.Builder
	for line := range strings.Lines(list) {
		name, id, _ := strings.Cut(line, " ")
		// The first half of an ID is of what went in: the names of directories too.
		all.WriteString(name + id[strings.LastIndex(id, "/")+1:])
	}
	return all.String(), nil
}

// goIn runs the go tool in a tree of sources, with the settings of make build.
func goIn(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath -buildvcs=false")
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s in %s: %w\n%s", args[0], dir, err, said.String())
	}
	return string(out), nil
}

// git runs git in this checkout.
func git(ctx context.Context, args ...string) (string, error) {
	root, err := checkout()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		var said []byte
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			said = exit.Stderr
		}
		return "", fmt.Errorf("git %s: %w %s", args[0], err, said)
	}
	return strings.TrimSpace(string(out)), nil
}
