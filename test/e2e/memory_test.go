package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// limitedAgent is an executable that runs the agent in a cgroup with a limit of memory, in bytes, as a container runtime does.
func limitedAgent(t *testing.T, node *lab.Node, limit int) string {
	t.Helper()
	root, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		root, file = "/sys/fs/cgroup", "memory.max"
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
			t.Fatal(err)
		}
	}
	group := filepath.Join(root, "ebpf-cni-"+node.Netns())
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, answerLimit, "the cgroup is removed", func() bool { return !errors.Is(os.Remove(group), unix.EBUSY) })
	})
	if err := os.WriteFile(filepath.Join(group, file), fmt.Append(nil, limit), 0); err != nil {
		t.Fatal(err)
	}
	agent, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "agent")
	script := fmt.Sprintf("#!/bin/sh\necho $$ > %s/cgroup.procs && exec %s \"$@\"\n", group, agent)
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	return path
}

// The kernel charges maps to the container that makes them. Where that has less memory than they take, the agent says so.
func TestMemoryLimitThatDoesNotHoldTheMaps(t *testing.T) {
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	if err := node.StartAgentBinary(limitedAgent(t, node, 48<<20)); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyLimit, "the agent ends", func() bool { return !node.AgentRunning() })
	if said := node.LogTail(1); !strings.Contains(said, "make map ") || !strings.Contains(said, "memory limit of the container") {
		t.Errorf("the agent says\n%s", said)
	}
	startAgents(t, l)
}
