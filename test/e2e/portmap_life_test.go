package e2e

import (
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// TestPortmap has the upstream plugin, chained after ours, open ports of the node. Pods that were made so keep them once it is not
// chained any more, and the last one leaves the node without translation, whichever way it ends.
func TestPortmap(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2, Families: families})
	node, far := l.Nodes[0], l.Nodes[1]
	buildPlugin(t, node.CNIBinDir(), install.Portmap)
	startEach(t, l, []string{"--portmap=on"}, nil)
	assertPortMappings(t, node, install.Portmap)
	web := addHosted(t, node, "web", ports(anyPort, both)...)
	lost := addHosted(t, node, "lost", ports(ownPort, both, node.Addrs()...)...)
	eventually(t, switchLimit, "the agent has followed portmap's rules", func() bool { return isBeside(t, node) })
	if serves(t, node) || len(dump(t, node, "hostports")) > 0 {
		t.Error("a port that portmap has opened is ours as well")
	}
	beside, apart := addPod(t, node, "beside"), addPod(t, far, "apart")
	open := func(port uint16, by *lab.Pod, from ...*lab.Namespace) {
		t.Helper()
		for _, family := range families {
			for _, client := range from {
				reaches(t, client, netip.AddrPortFrom(node.AddrOf(family), port))
			}
		}
		if err := by.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
	all := []*lab.Namespace{l.Outside, node.Namespace, far.Namespace, beside.Namespace, apart.Namespace}
	open(anyPort, web, append(all, web.Namespace)...)
	if err := node.Status(t.Context()); err != nil || !hasPortmapRules(t, node) {
		t.Errorf("STATUS: %v; or there are no rules of portmap", err)
	}

	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	startAgain(t, node)
	assertPortMappings(t, node, "ebpf-cni")
	ours := addHosted(t, node, "ours", ports(eachPort, both)...)
	open(anyPort, web, all...)
	open(ownPort, lost, all...)
	open(eachPort, ours, l.Outside, beside.Namespace, apart.Namespace)
	if _, err := node.AddPod(t.Context(), "conflict", lab.PodOptions{HostPorts: ports(eachPort, tcp)}); err == nil {
		t.Error("a port of ours was given away")
	}
	if err := node.DelPod(t.Context(), web); err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		assertRefusedTo(t, l.Outside, netip.AddrPortFrom(node.AddrOf(family), anyPort))
	}
	if err := node.LosePod(lost); err != nil {
		t.Fatal(err)
	}
	if err := node.GC(t.Context(), beside, ours); err != nil {
		t.Fatal(err)
	}
	assertUntranslated(t, node)
	open(eachPort, ours, l.Outside, beside.Namespace, apart.Namespace)
}

// assertPortMappings: of a node's plugins one alone is told of host ports.
func assertPortMappings(t *testing.T, node *lab.Node, want string) {
	t.Helper()
	raw, err := os.ReadFile(node.Conflist())
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		Plugins []struct {
			Type         string
			Capabilities map[string]bool
		}
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, plugin := range list.Plugins {
		if plugin.Capabilities["portMappings"] {
			told = append(told, plugin.Type)
		}
	}
	if !slices.Equal(told, []string{want}) {
		t.Errorf("the plugins %v are told of host ports, want %s:\n%s", told, want, raw)
	}
}

// hasPortmapRules says whether anything of portmap is on a node, in whichever form.
func hasPortmapRules(t *testing.T, node *lab.Node) bool {
	t.Helper()
	rules := ruleset(t, node)
	for _, save := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		out, err := node.Exec(t.Context(), save)
		if err != nil {
			t.Fatal(err)
		}
		rules += string(out)
	}
	return strings.Contains(rules, "CNI-") || strings.Contains(rules, "cni_hostport")
}

// assertUntranslated: nothing is left of portmap, and for the agent it is flows alone, if anything, that netfilter still translates.
func assertUntranslated(t *testing.T, node *lab.Node) {
	t.Helper()
	eventually(t, switchLimit, "portmap's rules are gone", func() bool { return !hasPortmapRules(t, node) })
	if !priv.Long() {
		return // what translates is taken to do so for a while
	}
	eventually(t, netfilter.Linger+switchLimit, "the agent finds no rule that translates", func() bool {
		out, err := node.Ebpfctl(t.Context(), "status")
		return err == nil && (strings.Contains(string(out), "\nnetfilter  does not translate") || strings.Contains(string(out), "flows that earlier rules translated"))
	})
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
	if v, err := install.NewestVersion(dir, install.Portmap); err != nil || v != "1.1.0" {
		t.Errorf("%q, %v", v, err)
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
