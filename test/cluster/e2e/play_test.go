package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// testUpAndDown starts and ends a cluster as make cluster and make cluster-down do: what a person is told in between works as
// it stands there, and the end leaves no cluster.
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
	told := command(t, play, "up", "-proxy=nftables", "-family=ipv6", "-mode=vxlan")
	said := func(field string) []string {
		t.Helper()
		match := regexp.MustCompile(`(?m)^` + field + `  +(\S.*)$`).FindStringSubmatch(told)
		if match == nil {
			t.Fatalf("nothing is said of %q:\n%s", field, told)
		}
		return strings.Fields(match[1])
	}
	kubectl, dir := said("kubectl"), cluster.Kept()
	if dir == "" {
		t.Fatal("none is kept")
	}
	if pods := command(t, kubectl...); !strings.Contains(pods, "ebpf-cni-") || !strings.Contains(pods, "coredns-") {
		t.Errorf("%v says:\n%s", kubectl, pods)
	}
	err := cluster.Poll(within(t, stepLimit), "the node is well, beside kube-proxy", func(ctx context.Context) error {
		status, err := try(ctx, said("on a node"))
		if err == nil && (!strings.Contains(status, "nftables table ip kube-proxy") || !strings.Contains(status, "No problems.")) {
			err = errors.New(status)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	outside := "[" + said("outside")[0] + "]:8080"
	command(t, kubectl[0], "run", "visitor", "--image="+said("images")[0], "--image-pull-policy=Never", "--restart=Never", "--command", "--",
		"/agnhost", "connect", "--timeout=10s", outside)
	command(t, kubectl[0], "wait", "--for=jsonpath={.status.phase}=Succeeded", "--timeout="+stepLimit.String(), "pod/visitor")
	for _, path := range []string{said("kubeconfig")[0], said("logs")[0]} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if _, err := try(within(t, stepLimit), []string{play, "up"}); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second one beside that in %s: %v", dir, err)
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
	out, err := try(ctx, argv)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// try runs a command. Its error tells what it printed.
func try(ctx context.Context, argv []string) (string, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out), err
}
