package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// testUpAndDown starts and ends a cluster as make cluster and make cluster-down do: what a person is told in between works as
// it stands there, and the end leaves nothing.
func testUpAndDown(t *testing.T) {
	if kept := cluster.Kept(); kept != "" {
		t.Fatalf("somebody keeps a cluster in %s: make cluster-down ends it", kept)
	}
	play := filepath.Join(t.TempDir(), "play")
	command(t, "go", "build", "-o", play, "../play")
	t.Cleanup(func() { // also of one that is half there
		if kept := cluster.Kept(); kept != "" {
			command(t, play, "down")
		}
	})
	told := command(t, play, "up", cluster.NFTables)
	said := func(field string) []string {
		t.Helper()
		match := regexp.MustCompile(`(?m)^` + field + `  +(\S.*)$`).FindStringSubmatch(told)
		if match == nil {
			t.Fatalf("nothing is said of %q:\n%s", field, told)
		}
		return strings.Fields(match[1])
	}
	kubectl, dir := said("kubectl"), cluster.Kept()
	if pods := command(t, kubectl...); !strings.Contains(pods, "ebpf-cni-") || !strings.Contains(pods, "coredns-") {
		t.Errorf("%v says:\n%s", kubectl, pods)
	}
	if status := command(t, said("on a node")...); !strings.Contains(status, "nftables table ip kube-proxy") || !strings.Contains(status, "No problems.") {
		t.Errorf("the node says:\n%s", status)
	}
	outside := said("outside")[0] + ":8080"
	command(t, kubectl[0], "run", "visitor", "--image="+said("images")[0], "--image-pull-policy=Never", "--restart=Never", "--command", "--",
		"/agnhost", "connect", "--timeout=10s", outside)
	command(t, kubectl[0], "wait", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=2m", "pod/visitor")
	for _, path := range []string{said("kubeconfig")[0], said("logs")[0]} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), play, "up").CombinedOutput(); err == nil || !strings.Contains(string(out), dir) {
		t.Errorf("a second one beside that in %s: %v\n%s", dir, err, out)
	}
	command(t, play, "down")
	if _, err := os.Stat(dir); cluster.Kept() != "" || !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", dir, err)
	}
}

// command runs one that has to work, also at the end of a test, and returns what it prints.
func command(t *testing.T, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*stepLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}
