package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
)

// What the unit for nodes with Docker comes with is taken by the agent as it stands.
func TestSettingsOfTheUnit(t *testing.T) {
	content, err := os.ReadFile("../../tools/deploy/docker/etc/default/ebpf-agent")
	if err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{}
	for line := range strings.Lines(string(content)) {
		if name, value, is := strings.Cut(strings.TrimSpace(line), "="); is && !strings.HasPrefix(name, "#") {
			variables[name] = value
		}
	}
	for _, f := range new(options).flags() {
		if value, given := variables[cli.Variable(f.Name)]; given && value == f.Default && value != "" {
			t.Errorf("%s=%s is the default", cli.Variable(f.Name), value)
		}
	}
	for name := range variables {
		if !slices.ContainsFunc(new(options).flags(), func(f cli.Flag) bool { return cli.Variable(f.Name) == name }) {
			t.Errorf("%s is no flag", name)
		}
	}
	c := call(t, nil, variables)
	if c.status != cli.Fine || c.config == nil {
		t.Fatalf("status %d: %s", c.status, c.stderr)
	}
	if c.config.Registry == nil || !slices.Equal(c.config.Bridges, []string{"docker0"}) || c.config.Bin != "" {
		t.Errorf("%+v: want subnets from etcd, docker0 attached, and no plugin", c.config)
	}
}
