package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// The cgroup is given or found. Only with Services it has to be there.
func TestCgroup(t *testing.T) {
	for _, arg := range []string{"--cgroup=/proc", "--cgroup=/nowhere"} {
		if c := call(t, nil, nil, "--nodes-file=$NODES", arg); c.status != 0 || c.config.Cgroup != "" || !strings.HasPrefix(fmt.Sprint(c.config.NoCgroup), "--cgroup \"/") {
			t.Errorf("without Services, %s: status %d, %q", arg, c.status, c.stderr)
		}
	}
	for found, err := range map[string]error{"": agent.ErrNoCgroup, "/found": nil} {
		o := options{config: agent.Config{Services: agent.ServicesOff}}
		if failed := o.findCgroup(env{findCgroup: func() (string, error) { return found, err }}); failed != nil || o.config.Cgroup != found || !errors.Is(o.config.NoCgroup, err) {
			t.Errorf("without Services, %q is found, %v: %q is taken, %v", found, err, o.config.Cgroup, failed)
		}
	}
	for _, arg := range []string{"--cgroup=/proc", "--cgroup=/nowhere", "--cgroup=relative"} {
		c := call(t, nil, nil, "--nodes-file=$NODES", "--services=on", arg)
		if c.status != 2 || !strings.HasPrefix(c.stderr, "ebpf-agent: --cgroup ") || strings.Count(c.stderr, "\n") != 1 {
			t.Errorf("%s: status %d, %q", arg, c.status, c.stderr)
		}
	}
	var stderr bytes.Buffer
	status := run(t.Context(), env{
		stdout: io.Discard, stderr: &stderr, args: []string{"--node-name=n1", "--nodes-file=cli_test.go", "--services=on"},
		lookup:     func(string) (string, bool) { return "", false },
		findCgroup: func() (string, error) { return "", agent.ErrNoCgroup },
	})
	if says := stderr.String(); status != 2 || !strings.HasPrefix(says, "ebpf-agent: --cgroup: not given") || strings.Count(says, "\n") != 1 {
		t.Errorf("none is found: status %d, %q", status, says)
	}
}
