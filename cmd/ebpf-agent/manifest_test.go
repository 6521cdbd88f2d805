package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// manifest is what tools/deploy/ebpf-cni.yaml says.
type manifest struct {
	account corev1.ServiceAccount
	role    rbacv1.ClusterRole
	binding rbacv1.ClusterRoleBinding
	policy  admissionv1.ValidatingAdmissionPolicy
	applied admissionv1.ValidatingAdmissionPolicyBinding
	config  corev1.ConfigMap
	daemons appsv1.DaemonSet
}

// readManifest refuses fields that Kubernetes does not know.
func readManifest(t *testing.T) manifest {
	t.Helper()
	content, err := os.ReadFile("../../tools/deploy/ebpf-cni.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var m manifest
	into := []any{&m.account, &m.role, &m.binding, &m.policy, &m.applied, &m.config, &m.daemons}
	documents := bytes.Split(content, []byte("\n---\n"))
	if len(documents) != len(into) {
		t.Fatalf("%d documents, want %d", len(documents), len(into))
	}
	for i, document := range documents {
		if err := yaml.UnmarshalStrict(document, into[i]); err != nil {
			t.Fatalf("document %d: %v", i+1, err)
		}
	}
	return m
}

// The cleanup works where the agent does, with the same rights.
func TestCleanupManifest(t *testing.T) {
	content, err := os.ReadFile("../../tools/deploy/cleanup.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var cleanup appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(content, &cleanup); err != nil {
		t.Fatal(err)
	}
	agents := readManifest(t).daemons.Spec.Template.Spec
	got := cleanup.Spec.Template.Spec
	// It loads no program.
	rights := agents.Containers[0].SecurityContext.Capabilities
	rights.Add = slices.DeleteFunc(rights.Add, func(c corev1.Capability) bool { return c == "SYS_ADMIN" })
	if diff := cmp.Diff(agents.Volumes, got.Volumes); diff != "" {
		t.Errorf("volumes -agent +cleanup:\n%s", diff)
	}
	if diff := cmp.Diff(agents.Tolerations, got.Tolerations); diff != "" || !got.HostNetwork {
		t.Errorf("it does not run wherever the agent does:\n%s", diff)
	}
	for _, c := range append(got.InitContainers, got.Containers...) {
		if diff := cmp.Diff(agents.Containers[0].VolumeMounts, c.VolumeMounts); diff != "" {
			t.Errorf("%s: mounts -agent +cleanup:\n%s", c.Name, diff)
		}
		if diff := cmp.Diff(agents.Containers[0].SecurityContext, c.SecurityContext); diff != "" {
			t.Errorf("%s: rights -agent +cleanup:\n%s", c.Name, diff)
		}
		if c.Image != agents.Containers[0].Image {
			t.Errorf("%s: image %s", c.Name, c.Image)
		}
		var dirs agent.Directories
		status := run(t.Context(), env{
			stdout: io.Discard, stderr: os.Stderr, args: append(slices.Clone(c.Args), "--proc-sys=/proc/sys", "--stay=false"),
			lookup:     func(string) (string, bool) { return "", false },
			executable: func() (string, error) { return "/bin/ebpf-agent", nil },
			cleanup:    func(_ context.Context, d agent.Directories, _ *slog.Logger) error { dirs = d; return nil },
		})
		if status != cli.Fine || dirs.State != "/run/ebpf-cni" || dirs.BPFFS != "/sys/fs/bpf/ebpf-cni" || !slices.Contains(c.Args, "--proc-sys="+agentsProcSys(t)) {
			t.Errorf("%s: %v: status %d, directories %+v", c.Name, c.Args, status, dirs)
		}
	}
}

func agentsProcSys(t *testing.T) string {
	t.Helper()
	return readManifest(t).config.Data[cli.Variable("proc-sys")]
}

// notInManifest are flags that are not the same for every node, or that replace what a pod is given; and those of the way between
// nodes. Earlier manifests wrote them when they had no effect, so that nobody could tell what an operator had chosen from what was
// shipped: what stands there is a choice.
var notInManifest = []string{"node-name", "kubeconfig", "nodes-file", "routing-mode", "vxlan-port", "vxlan-vni"}

// ofRegistry says that a flag is for networks without Kubernetes.
func ofRegistry(f cli.Flag) bool {
	return slices.ContainsFunc(new(options).registryFlags(), func(r cli.Flag) bool { return r.Name == f.Name })
}

func TestManifestHasEverySetting(t *testing.T) {
	data := readManifest(t).config.Data
	for _, f := range new(options).flags() {
		if slices.Contains(notInManifest, f.Name) || ofRegistry(f) {
			continue
		}
		value, ok := data[cli.Variable(f.Name)]
		if !ok {
			t.Errorf("the ConfigMap lacks %s", cli.Variable(f.Name))
		}
		delete(data, cli.Variable(f.Name))
		// Where the default depends on what this build can do, or the container differs from the host.
		if value != f.Default && f.Name != "proc-sys" && f.Name != "cgroup" {
			t.Errorf("%s is %q, the default of --%s is %q", cli.Variable(f.Name), value, f.Name, f.Default)
		}
	}
	if len(data) > 0 {
		t.Errorf("the ConfigMap has what the agent does not know: %v", slices.Collect(maps.Keys(data)))
	}
}

// What the tunnel drops is explained where operators look for it.
func TestTunnelDropsAreExplained(t *testing.T) {
	for _, name := range []string{"between-nodes.md", "troubleshooting.md"} {
		page, err := os.ReadFile("../../tools/deploy/" + name)
		if err != nil {
			t.Fatal(err)
		}
		for r := drops.TunnelPort; r <= drops.TunnelFailed; r++ {
			if !bytes.Contains(page, []byte("`"+r.String()+"`")) {
				t.Errorf("%s does not say what %s is", name, r)
			}
		}
	}
}

func TestManifestIsAccepted(t *testing.T) {
	m := readManifest(t)
	m.config.Data[cli.Variable("proc-sys")] = "/proc/sys" // elsewhere there is no such directory
	m.config.Data[cli.Variable("nodes-file")] = "manifest_test.go"
	var stderr bytes.Buffer
	var got agent.Config
	status := run(t.Context(), env{
		stdout: &stderr, stderr: &stderr,
		lookup:     func(name string) (string, bool) { v, ok := m.config.Data[name]; return v, ok },
		hostname:   func() (string, error) { return "n1", nil },
		executable: func() (string, error) { return "/bin/ebpf-agent", nil },
		run:        func(_ context.Context, c agent.Config) error { got = c; return nil },
	})
	if status != cli.Fine {
		t.Fatalf("status %d: %s", status, &stderr)
	}
	if got.Listen != "127.0.0.1:9965" || got.Conf != "/etc/cni/net.d" || got.Masquerade != [wire.Families]bool{true, true} {
		t.Errorf("the agent is told %+v", got)
	}
}

// The rights are as few as they can be: more of them is a decision.
func TestManifestRights(t *testing.T) {
	m := readManifest(t)
	var rights []string
	for _, r := range m.role.Rules {
		rights = append(rights, strings.Join(r.Verbs, ",")+" "+strings.Join(r.Resources, ","))
	}
	few := []string{
		"get,list,watch nodes", "patch nodes/status", "list,watch services", "list,watch endpointslices", "list,watch servicecidrs", "create events",
	}
	if !slices.Equal(rights, few) {
		t.Errorf("the account may %v, want %v", rights, few)
	}
	if m.applied.Spec.PolicyName != m.policy.Name || !slices.Equal(m.applied.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
		t.Errorf("the policy %s is applied by %+v", m.policy.Name, m.applied.Spec)
	}
	pod := m.daemons.Spec.Template.Spec
	if len(pod.Containers) != 1 || len(pod.InitContainers) != 0 || pod.HostPID || pod.HostIPC {
		t.Fatalf("pod %+v", pod)
	}
	s := pod.Containers[0].SecurityContext
	if *s.Privileged || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
		t.Errorf("security context %+v", s)
	}
	want := corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"BPF", "NET_ADMIN", "PERFMON", "SYS_ADMIN"}}
	if !slices.Equal(s.Capabilities.Add, want.Add) || !slices.Equal(s.Capabilities.Drop, want.Drop) {
		t.Errorf("capabilities %+v, want %+v", s.Capabilities, want)
	}
}

// What the agent is told of paths must be where the container has them; of what
// the plugin is told too, the host must have the same.
func TestManifestPaths(t *testing.T) {
	m := readManifest(t)
	pod := m.daemons.Spec.Template.Spec
	host, isFile := map[string]string{}, map[string]bool{}
	for _, v := range pod.Volumes {
		host[v.Name] = v.HostPath.Path
		isFile[v.Name] = *v.HostPath.Type == corev1.HostPathFileOrCreate // nothing is mounted below
	}
	mounted := map[string]string{}
	for _, v := range pod.Containers[0].VolumeMounts {
		if !isFile[v.Name] && (v.MountPropagation == nil || *v.MountPropagation != corev1.MountPropagationHostToContainer) {
			t.Errorf("%s is mounted without HostToContainer", v.MountPath)
		}
		mounted[v.MountPath] = host[v.Name]
	}
	for in, want := range map[string]string{
		"/sys/fs/bpf": "/sys/fs/bpf", m.config.Data[cli.Variable("state-dir")]: "/run/ebpf-cni",
		m.config.Data[cli.Variable("cni-conf-dir")]: "/etc/cni/net.d", m.config.Data[cli.Variable("cni-bin-dir")]: "/opt/cni/bin",
		m.config.Data[cli.Variable("proc-sys")] + "/net": "/proc/sys/net", "/run/netns": "/run/netns", "/var/run/netns": "/run/netns",
		"/run/xtables.lock": "/run/xtables.lock",
	} {
		if mounted[in] != want {
			t.Errorf("%s of the container is %q of the host, want %q", in, mounted[in], want)
		}
	}
	for _, p := range []*corev1.Probe{pod.Containers[0].LivenessProbe, pod.Containers[0].ReadinessProbe, pod.Containers[0].StartupProbe} {
		if address := p.HTTPGet.Host + ":" + p.HTTPGet.Port.String(); address != m.config.Data[cli.Variable("listen")] {
			t.Errorf("a probe asks %s, the agent listens on %s", address, m.config.Data[cli.Variable("listen")])
		}
	}
}
