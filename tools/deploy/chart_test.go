package deploy

import (
	"flag"
	"os"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
)

var update = flag.Bool("update", false, "write the manifests as the chart renders them")

// The heads of the manifests, with what somebody who has no chart needs to know.
const (
	agentHead = `# ebpf-cni on a cluster: kubectl apply -f ebpf-cni.yaml
# tools/deploy/install.md says what to set here and what to check, tools/deploy/troubleshooting.md what goes wrong.
# This is what the chart renders by default (tools/deploy/chart).
`
	cleanupHead = `# Removes everything that ebpf-cni ever made, on every node, live pods' links included:
#   kubectl delete -f ebpf-cni.yaml
#   kubectl apply -f cleanup.yaml
#   kubectl -n kube-system rollout status daemonset ebpf-cni-cleanup
#   kubectl delete -f cleanup.yaml
# A pod that is ready has cleaned its node; the logs of one that is not say what stands in the way. Image and
# volumes must be those of the DaemonSet before.
# This is what the chart renders with cleanup=true (tools/deploy/chart).
`
)

func TestManifestsAreTheChart(t *testing.T) {
	for file, want := range map[string]string{
		"ebpf-cni.yaml": agentHead + render(t, "agent.yaml", map[string]any{"restartOnChange": false}),
		"cleanup.yaml":  cleanupHead + render(t, "cleanup.yaml", map[string]any{"cleanup": true}),
	} {
		if *update {
			if err := os.WriteFile(file, []byte(want), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		have, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if string(have) != want {
			t.Errorf("%s is not what the chart renders: change the chart and run `go -C tools/deploy test . -update`; rendered:\n%s", file, want)
		}
	}
}

func TestChartRendersOneOrTheOther(t *testing.T) {
	if text := render(t, "agent.yaml", map[string]any{"cleanup": true}); text != "" {
		t.Errorf("agents beside the cleanup:\n%s", text)
	}
	if text := render(t, "cleanup.yaml", nil); text != "" {
		t.Errorf("a cleanup beside the agents:\n%s", text)
	}
}

func TestChartValues(t *testing.T) {
	text := render(t, "agent.yaml", map[string]any{
		"image":    map[string]any{"name": "registry.example/ebpf-cni:v1"},
		"settings": map[string]any{"mtu": 1400, "cluster-cidr": "10.244.0.0/16", "api-server": "https://192.0.2.1:6443,https://[2001:db8::1]:6443"},
		"host":     map[string]any{"cniBin": "/var/lib/rancher/k3s/data/cni", "bpffs": "/bpf"},
		"port":     9000,
		// More than the one that is there.
		"nodeSelector": map[string]any{"pod-network": "ebpf-cni"},
	})
	for _, want := range []string{
		"image: registry.example/ebpf-cni:v1\n", `EBPF_AGENT_MTU: "1400"`, `EBPF_AGENT_CLUSTER_CIDR: "10.244.0.0/16"`, `EBPF_AGENT_ATTACH: "auto"`,
		`EBPF_AGENT_API_SERVER: "https://192.0.2.1:6443,https://[2001:db8::1]:6443"`,
		"path: /var/lib/rancher/k3s/data/cni\n", `EBPF_AGENT_BPFFS: "/bpf/ebpf-cni"`, "mountPath: /bpf\n",
		`EBPF_AGENT_LISTEN: "127.0.0.1:9000"`, "checksum/settings: ",
		"nodeSelector:\n        kubernetes.io/os: linux\n        pod-network: ebpf-cni\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(text, "9965") {
		t.Error("the usual port, although another is set")
	}
	other := render(t, "agent.yaml", map[string]any{"settings": map[string]any{"mtu": 1500}})
	if checksum(text) == checksum(other) {
		t.Error("other settings have the same checksum: agents would not be restarted")
	}
}

// The way between nodes is in the ConfigMap only if somebody has chosen it; numbers are written as such, however large, also from a file
// of values.
func TestChartSettingsFromAFile(t *testing.T) {
	if text := render(t, "agent.yaml", nil); strings.Contains(text, `EBPF_AGENT_ROUTING_MODE: "`) || strings.Contains(text, `EBPF_AGENT_VXLAN_PORT: "`) ||
		strings.Contains(text, `EBPF_AGENT_VXLAN_VNI: "`) {
		t.Errorf("the chart chooses a way between nodes:\n%s", text)
	}
	values, err := common.ReadValues([]byte("settings: {routing-mode: vxlan, vxlan-port: 4790, vxlan-vni: 16777215, snat-entries: 1048576, masquerade: false}"))
	if err != nil {
		t.Fatal(err)
	}
	text := render(t, "agent.yaml", values)
	for _, want := range []string{
		`EBPF_AGENT_ROUTING_MODE: "vxlan"`, `EBPF_AGENT_VXLAN_PORT: "4790"`, `EBPF_AGENT_VXLAN_VNI: "16777215"`,
		`EBPF_AGENT_SNAT_ENTRIES: "1048576"`, `EBPF_AGENT_MASQUERADE: "false"`, `EBPF_AGENT_MTU: "0"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q:\n%s", want, text)
		}
	}
}

// Plugins to chain stand in a file of the agent's; other ones restart it.
func TestChartChain(t *testing.T) {
	const usual = `EBPF_AGENT_CNI_CHAIN: ""`
	if text := render(t, "agent.yaml", nil); !strings.Contains(text, usual) || strings.Contains(text, "chain.json") {
		t.Errorf("by default:\n%s", text)
	}
	chained := func(plugins ...any) string { return render(t, "agent.yaml", map[string]any{"cniChain": plugins}) }
	text := chained(map[string]any{"type": "tuning", "sysctl": map[string]any{"net.core.somaxconn": "500"}})
	for _, want := range []string{
		`EBPF_AGENT_CNI_CHAIN: "/etc/ebpf-cni/chain.json"`, `chain.json: "[{\"sysctl\":{\"net.core.somaxconn\":\"500\"},\"type\":\"tuning\"}]"`,
		"mountPath: /etc/ebpf-cni\n", "name: ebpf-cni-chain\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if checksum(text) == checksum(chained(map[string]any{"type": "sbr"})) {
		t.Error("other plugins have the same checksum: agents would not be restarted")
	}
	if text := render(t, "cleanup.yaml", map[string]any{"cleanup": true, "cniChain": []any{map[string]any{"type": "sbr"}}}); strings.Contains(text, "chain") {
		t.Errorf("the cleanup mounts what its release has not:\n%s", text)
	}
}

// What takes rights away is in force unless somebody says otherwise.
func TestChartRights(t *testing.T) {
	const policy, right = "kind: ValidatingAdmissionPolicy\n", "- SYS_ADMIN\n"
	usual := render(t, "agent.yaml", nil)
	other := render(t, "agent.yaml", map[string]any{"ownNodeOnly": false, "sysAdmin": false})
	for _, text := range []string{policy, right} {
		if !strings.Contains(usual, text) || strings.Contains(other, text) {
			t.Errorf("%q: by default %t, turned off %t", text, strings.Contains(usual, text), strings.Contains(other, text))
		}
	}
	documents := func(text string) int { return strings.Count("---\n"+text, "---\n") }
	if got, want := documents(other), documents(usual)-2; got != want || strings.Contains(other, "---\n---\n") {
		t.Errorf("without the policy %d documents, want %d:\n%s", got, want, other)
	}
}

func checksum(text string) string {
	_, rest, _ := strings.Cut(text, "checksum/settings: ")
	sum, _, _ := strings.Cut(rest, "\n")
	return sum
}

// render returns one template of the chart as Helm renders it in kube-system.
func render(t *testing.T, template string, values map[string]any) string {
	t.Helper()
	texts, err := Render(t.Context(), "chart", values)
	if err != nil {
		t.Fatal(err)
	}
	return texts[template]
}
