package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const agentUnit = "etc/systemd/system/ebpf-agent.service"

// dockersUnit is as much of Docker's unit as Debian's has for what the agent's unit is about.
const dockersUnit = "[Service]\nType=notify\nExecStart=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS\n"

// TestUnits has systemd read the units as they lie on a node.
func TestUnits(t *testing.T) {
	if said := verify(t, func(unit string) string { return unit }); said != "" {
		t.Errorf("systemd says:\n%s", said)
	}
	for name, c := range map[string]struct{ old, now, want string }{
		"a key that is none":    {"RestartSec", "RestartSek", "Unknown key"},
		"no such program":       {"bin/ebpf-agent", "bin/ebpf-agent2", "is not executable"},
		"each after the other":  {"Before=docker", "After=docker", "ordering cycle"},
		"the wrong type":        {"=notify", "=notifies", "Failed to parse"},
		"time in words":         {"infinity", "forever", "Failed to parse"},
		"a variable's file rel": {"EnvironmentFile=/", "EnvironmentFile=", "not absolute"},
	} {
		t.Run(name, func(t *testing.T) {
			if said := verify(t, func(unit string) string { return strings.Replace(unit, c.old, c.now, 1) }); !strings.Contains(said, c.want) {
				t.Errorf("systemd does not say %q of what is wrong, so that it would find nothing:\n%s", c.want, said)
			}
		})
	}
}

// verify returns what systemd says of the units on a node with Docker, with the agent's changed.
func verify(t *testing.T, change func(unit string) string) string {
	t.Helper()
	program, err := exec.LookPath("systemd-analyze") //nolint:misspell // its name
	if err != nil {
		if os.Getenv("REQUIRE_PRIVILEGED") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	root := t.TempDir()
	if err := os.CopyFS(root, os.DirFS("docker")); err != nil {
		t.Fatal(err)
	}
	write := func(name, content string, mode os.FileMode) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range []string{"bin/sh", "usr/local/bin/ebpf-agent", "usr/sbin/dockerd"} {
		write(program, "", 0o755)
	}
	for _, target := range []string{"sysinit", "basic", "shutdown", "multi-user", "network-online"} {
		write("lib/systemd/system/"+target+".target", "[Unit]\n", 0o644)
	}
	write("lib/systemd/system/docker.service", dockersUnit, 0o644)
	write(agentUnit, change(read(t, agentUnit)), 0o644)
	out, err := exec.CommandContext(t.Context(), program, "verify", "--man=no", "--root="+root, "ebpf-agent.service", "docker.service").CombinedOutput()
	if err != nil && len(out) == 0 {
		t.Fatal(err)
	}
	return string(out)
}

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("docker", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
