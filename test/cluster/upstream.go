package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// upstream are the programs, by package, that only Kubernetes' own tests take: who runs them, and what they want in an image.
var upstream = map[string]string{
	"ginkgo":                 "github.com/onsi/ginkgo/v2/ginkgo",
	"regression-issue-74839": "k8s.io/kubernetes/test/images/regression-issue-74839",
}

// UpstreamTests is the program that holds Kubernetes' own tests.
const UpstreamTests = "e2e.test"

// imagePackages are Debian's, of which images of more than one program consist. Of those that busybox has as well, wget is here
// since Debian 12's busybox dies of its option -T.
var imagePackages = []string{
	"bash", "bind9-dnsutils", "busybox", "coreutils", "curl", "dash", "grep", "hostname", "iproute2", "libc-bin", "netcat-openbsd",
	"nginx-light", "sed", "wget",
}

// Certificate are the files by which agnhost serves TLS, as upstream's image has them.
var Certificate = []string{"localhost.crt", "localhost.key"}

// PrepareUpstream makes the cache hold what Kubernetes' own tests take beside a cluster's programs, and returns the directory of
// their programs and Certificate, and a base for images, with the commands that tests call in pods. The first time it compiles, for minutes.
func PrepareUpstream(ctx context.Context) (programs, base string, err error) {
	cache, unlock, err := openCache()
	if err != nil {
		return "", "", err
	}
	defer unlock()
	module, err := moduleDir()
	if err != nil {
		return "", "", err
	}
	if err := build(ctx, module, cache.programs, upstream); err != nil {
		return "", "", err
	}
	tests := map[string]string{UpstreamTests: "k8s.io/kubernetes/test/e2e"}
	if err := compile(ctx, module, cache.programs, tests, "test", "-c"); err != nil {
		return "", "", err
	}
	if err := copyCertificate(ctx, module, cache.programs); err != nil {
		return "", "", err
	}
	base = filepath.Join(cache.programs, "base.tar")
	return cache.programs, base, packBase(ctx, filepath.Join(module, "base.sh"), base)
}

// copyCertificate puts the files beside the programs.
func copyCertificate(ctx context.Context, module, dir string) error {
	source, err := goIn(ctx, module, "list", "-m", "-f", "{{.Dir}}/test/images/agnhost/porter", "k8s.io/kubernetes")
	if err != nil {
		return err
	}
	for _, name := range Certificate {
		content, err := os.ReadFile(filepath.Join(strings.TrimSpace(source), name))
		if err != nil {
			return fmt.Errorf("read what agnhost serves TLS by: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return fmt.Errorf("keep what agnhost serves TLS by: %w", err)
		}
	}
	return nil
}

// packBase makes the base of images from Debian's packages, unless it is there from the same script and packages.
func packBase(ctx context.Context, script, target string) error {
	content, err := os.ReadFile(script)
	if err != nil {
		return fmt.Errorf("make the base of images: %w", err)
	}
	key := strings.Join(imagePackages, " ") + "\n" + string(content)
	if isBuilt(target, key) {
		return nil
	}
	cmd := exec.CommandContext(ctx, script, slices.Concat([]string{target}, imagePackages)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make the base of images from Debian's packages: %w\n%s", err, out)
	}
	if err := os.WriteFile(stampOf(target), []byte(key), 0o644); err != nil {
		return fmt.Errorf("note what the base of images was made from: %w", err)
	}
	return nil
}
