package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// manifestCapabilities are those that the DaemonSet names.
func manifestCapabilities(t *testing.T) []corev1.Capability {
	t.Helper()
	content, err := os.ReadFile("../../tools/deploy/ebpf-cni.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(content), "\n---\n") {
		var daemons appsv1.DaemonSet
		if err := yaml.Unmarshal([]byte(document), &daemons); err != nil || daemons.Kind != "DaemonSet" {
			continue
		}
		return daemons.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add
	}
	t.Fatal("the manifest has no DaemonSet")
	return nil
}

// restrictedAgent is an executable that runs the agent as root with the given
// capabilities and no way to more, as the container runtime does.
func restrictedAgent(t *testing.T, node *lab.Node, capabilities []corev1.Capability) string {
	t.Helper()
	agent, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	set := "-all"
	for _, c := range capabilities {
		set += ",+" + strings.ToLower(string(c))
	}
	path := filepath.Join(t.TempDir(), "agent")
	script := fmt.Sprintf("#!/bin/sh\nexec setpriv --bounding-set=%[1]s --inh-caps=%[1]s --ambient-caps=%[1]s --no-new-privs %s \"$@\"\n", set, agent)
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	return path
}

// neededCapabilities are those of the manifest, less the one that the chart's sysAdmin takes away where nf_conntrack is no module.
func neededCapabilities(t *testing.T) []corev1.Capability {
	t.Helper()
	all := manifestCapabilities(t)
	if _, err := os.Stat("/sys/kernel/btf/nf_conntrack"); err == nil {
		return all
	}
	return slices.DeleteFunc(all, func(c corev1.Capability) bool { return c == "SYS_ADMIN" })
}

// TestManifestsRights runs the agent through its life with as few capabilities as
// the DaemonSet may have: each of its ways into the kernel must do with them.
func TestManifestsRights(t *testing.T) {
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := lab.ForTest(t, lab.Options{Nodes: 1})
		node := l.Nodes[0]
		agent := restrictedAgent(t, node, neededCapabilities(t))
		start := func(flags ...string) {
			t.Helper()
			if err := node.StartAgentBinary(agent, append(flags, attach)...); err != nil {
				t.Fatal(err)
			}
			if err := node.WaitReady(within(t, readyLimit)); err != nil {
				t.Fatal(err)
			}
		}
		start()
		assertHolds(t, node, neededCapabilities(t))
		a, b := addPod(t, node, "a"), addPod(t, node, "b")
		inside, outside := serve(t, b.Namespace), serve(t, l.Outside)
		assertReaches(t, a.Namespace, inside, a.Addr())
		assertReaches(t, a.Namespace, outside, node.Addr())
		stop := func() {
			t.Helper()
			if _, err := node.StopAgent(); err != nil {
				t.Fatal(err)
			}
		}
		applyRules(t, node, masqueradeRule(firstFamily(l)), "nft", "-f")
		eventually(t, switchLimit, "the agent has followed the rule", func() bool { return isBesideMasquerading(t, node) })
		assertReaches(t, a.Namespace, inside, a.Addr())
		assertReaches(t, a.Namespace, outside, node.Addr())
		stop()
		start("--services=on")
		if pins := socketPins(t, node); len(pins) != 9 {
			t.Errorf("on the cgroup are %v", pins)
		}
		stop()
		start("--snat-entries=100000") // the maps move
		assertReaches(t, a.Namespace, outside, node.Addr())

		uplink := filepath.Join(node.BPFFS(), "maps", "snat")
		if err := os.Remove(uplink); err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, "the pin is back", func() bool { _, err := os.Stat(uplink); return err == nil })
		if err := node.LosePod(b); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, "the lost pod is released", func() bool { return len(dump(t, node, "endpoints")) == len(l.Options.Families) })
		stop()
		if out, err := node.Exec(t.Context(), agent, "cleanup", "--bpffs="+node.BPFFS(), "--state-dir="+node.StateDir(),
			"--cni-conf-dir="+node.ConfDir(), "--cni-bin-dir="+node.CNIBinDir()); err != nil {
			t.Fatalf("cleanup: %v\n%s", err, out)
		}
	})
}

// assertHolds has the kernel say that the agent can do no more.
func assertHolds(t *testing.T, node *lab.Node, capabilities []corev1.Capability) {
	t.Helper()
	numbers := map[corev1.Capability]uint{"NET_ADMIN": 12, "SYS_ADMIN": 21, "PERFMON": 38, "BPF": 39}
	var want uint64
	for _, c := range capabilities {
		want |= 1 << numbers[c]
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", node.AgentPID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{"CapPrm", "CapBnd"} {
		if line := fmt.Sprintf("\n%s:\t%016x\n", set, want); !strings.Contains(string(status), line) {
			t.Errorf("the agent's capabilities are not those of the manifest: no %q in\n%s", line, status)
		}
	}
}
