package e2e

import (
	"net/netip"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// TestPortmap has the upstream portmap plugin, chained after ours, open a port of the node that a pod answers.
func TestPortmap(t *testing.T) {
	t.Parallel()
	const hostPort, podPort = 8080, 80
	l := lab.ForTest(t, lab.Options{Nodes: 2, AgentFlags: []string{"--portmap=on"}})
	node, far := l.Nodes[0], l.Nodes[1]
	for _, n := range l.Nodes {
		buildPlugin(t, n.CNIBinDir(), install.Portmap)
	}
	startAgents(t, l)
	web, err := node.AddPod(t.Context(), "web", lab.PodOptions{Capabilities: map[string]any{"portMappings": []map[string]any{
		{"hostPort": hostPort, "containerPort": podPort, "protocol": "tcp"},
		{"hostPort": hostPort, "containerPort": podPort, "protocol": "udp"},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := web.Serve(podPort); err != nil {
		t.Fatal(err)
	}
	eventually(t, switchLimit, "the agent has followed portmap's rules", func() bool { return isBeside(t, node) })
	beside, apart := addPod(t, node, "beside"), addPod(t, far, "apart")
	for _, family := range l.Options.Families {
		at := netip.AddrPortFrom(node.AddrOf(family), hostPort)
		for _, from := range []*lab.Namespace{l.Outside, node.Namespace, far.Namespace, beside.Namespace, apart.Namespace, web.Namespace} {
			reaches(t, from, at)
		}
	}
	if err := web.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if err := node.Status(t.Context()); err != nil {
		t.Error(err)
	}
	if err := node.GC(t.Context(), web, beside); err != nil {
		t.Error(err)
	}
	for _, family := range l.Options.Families {
		reaches(t, l.Outside, netip.AddrPortFrom(node.AddrOf(family), hostPort))
	}
	if err := node.DelPod(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	for _, family := range l.Options.Families {
		if _, err := l.Outside.TCP(within(t, 2*time.Second), netip.AddrPortFrom(node.AddrOf(family), hostPort)); err == nil {
			t.Errorf("%v: the port is open although the pod is gone", family)
		}
	}
}

// reaches exchanges TCP and UDP.
func reaches(t *testing.T, from *lab.Namespace, to netip.AddrPort) {
	t.Helper()
	if _, err := from.TCP(within(t, 3*time.Second), to); err != nil {
		t.Errorf("TCP from %s: %v", from.Netns(), err)
	}
	if _, err := from.UDP(within(t, 3*time.Second), to, 64); err != nil {
		t.Errorf("UDP from %s: %v", from.Netns(), err)
	}
}

// TestFindsUpstreamPortmap has the plugin that go.mod names found, and what it speaks read from it.
func TestFindsUpstreamPortmap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	buildPlugin(t, dir, install.Portmap)
	if c, err := install.FindPortmap(dir); err != nil || c == nil || c.Version != "1.1.0" {
		t.Errorf("%v, %v", c, err)
	}
}

// buildPlugin puts one of the upstream plugins that go.mod names into dir.
func buildPlugin(t *testing.T, dir, name string) {
	t.Helper()
	build := exec.Command("go", "build", "-o", filepath.Join(dir, name), "github.com/containernetworking/plugins/plugins/meta/"+name)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
}
