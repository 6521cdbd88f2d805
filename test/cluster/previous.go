package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// sources are what the binaries of this project are made from.
var sources = []string{"bpf", "maps", "pkg", "cni", "cmd", "go.mod", "go.sum"}

const manifestSource = "tools/deploy/ebpf-cni.yaml"

// AddPrevious gives every node the image of this project as it was before the commit that last changed the binaries,
// under a name, and returns the manifest of that time, which asks for this image.
func (c *Cluster) AddPrevious(ctx context.Context, name string) (manifest string, err error) {
	base, err := previousCommit(ctx)
	if err != nil {
		return "", err
	}
	dir := c.file("previous")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	archive := filepath.Join(dir, "source.tar")
	args := append([]string{"archive", "--output=" + archive, base}, append(sources, manifestSource)...)
	if _, err := git(ctx, args...); err != nil {
		return "", err
	}
	for _, argv := range [][]string{
		{"tar", "-xf", archive},
		{"go", "build", "-ldflags", "-s -w -X main.version=" + base[:12], "-o", "bin/", "./cmd/..."},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath -buildvcs=false")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build commit %s: %w\n%s", base, err, out)
		}
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

// previousCommit is the one before the commit that last changed the binaries.
func previousCommit(ctx context.Context) (string, error) {
	last, err := git(ctx, append([]string{"log", "-1", "--format=%H", "--"}, sources...)...)
	if err != nil {
		return "", err
	}
	if last == "" {
		return "", errors.New("find the previous commit: no commit has touched the sources")
	}
	base, err := git(ctx, "rev-parse", "--verify", "--quiet", last+"^")
	if err != nil {
		return "", fmt.Errorf("find the commit before %s: this checkout does not have it; git fetch --deepen=100 gets more of the history: %w", last, err)
	}
	return base, nil
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
