package cluster

import (
	"context"
	_ "embed" // the manifest of CoreDNS
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AgentImage is the image that the project's manifest names.
const AgentImage = "localhost/ebpf-cni:latest"

// The DaemonSet that the project's manifest makes.
const (
	Namespace = "kube-system"
	DaemonSet = "ebpf-cni"
	// AgentLabel selects its pods.
	AgentLabel = "app.kubernetes.io/name=ebpf-cni"
)

//go:embed coredns.yaml
var coreDNS string

// installLimit is how long the nodes and what runs on them may take to become ready.
const installLimit = 5 * time.Minute

// Install applies the project's manifest, as it is unless there is no kube-proxy, and waits until every agent and every node is ready.
func (c *Cluster) Install(ctx context.Context) error {
	manifest, err := c.manifest(ctx)
	if err != nil {
		return err
	}
	// What others have set since an earlier time is set back.
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "--force-conflicts", "-f", manifest); err != nil {
		return err
	}
	return c.WaitReady(ctx)
}

// SetRoutingMode changes the DaemonSet, as kubectl takes it, and waits until all agents have followed. Without a mode they take the
// one that they have by default.
func (c *Cluster) SetRoutingMode(ctx context.Context, mode string) error {
	setting := "EBPF_AGENT_ROUTING_MODE-"
	if mode != "" {
		setting = "EBPF_AGENT_ROUTING_MODE=" + mode
	}
	if _, err := c.Kubectl(ctx, "-n", Namespace, "set", "env", "daemonset/"+DaemonSet, setting); err != nil {
		return err
	}
	return c.WaitReady(ctx)
}

// Uninstall deletes what Install has applied, and waits until it is gone.
func (c *Cluster) Uninstall(ctx context.Context) error {
	manifest, err := c.manifest(ctx)
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "delete", "--ignore-not-found", "--cascade=foreground", "--timeout=60s", "-f", manifest)
	return err
}

// manifest is the cluster's copy of the project's manifest: machines see the files of the checkout as they were. Where no kube-proxy makes
// the API server's Service reachable for a host, it is what the chart makes of settings for that.
func (c *Cluster) manifest(ctx context.Context) (string, error) {
	const name = "ebpf-cni"
	path := c.file(name + ".yaml")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if c.Options.KubeProxy == NoProxy {
		return c.Chart(ctx, name, fmt.Sprintf("settings.api-server=https://%s", netip.AddrPortFrom(c.apiAddr(), apiPort)))
	}
	root, err := checkout()
	if err != nil {
		return "", err
	}
	return path, copyFile(filepath.Join(root, "tools/deploy/ebpf-cni.yaml"), path)
}

// Chart writes what the project's chart makes of values, as Helm takes them, to a file that the nodes see.
func (c *Cluster) Chart(ctx context.Context, name string, values ...string) (file string, err error) {
	root, err := checkout()
	if err != nil {
		return "", err
	}
	render := exec.CommandContext(ctx, "go", "run", "./render", "-set", strings.Join(values, ","))
	render.Dir = filepath.Join(root, "tools/deploy")
	text, err := render.Output()
	if err != nil {
		return "", fmt.Errorf("render the chart with %q: %w", values, err)
	}
	file = c.file(name + ".yaml")
	return file, os.WriteFile(file, text, 0o600)
}

// WaitReady waits until the DaemonSet has rolled out and every node is ready.
func (c *Cluster) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	if err := c.RolledOut(ctx, "daemonset/"+DaemonSet); err != nil {
		return err
	}
	return Poll(ctx, "the nodes are ready", func(ctx context.Context) error {
		for _, m := range c.Nodes {
			if err := c.NodeReady(ctx, m.Name); err != nil {
				return err
			}
		}
		return nil
	})
}

// RolledOut waits until a DaemonSet or Deployment of the cluster's own is what it is to be, and tells with an error what its
// pods have to say.
func (c *Cluster) RolledOut(ctx context.Context, workload string) error {
	_, err := c.Kubectl(ctx, "-n", Namespace, "rollout", "status", workload, "--timeout="+installLimit.String())
	if err == nil {
		return nil
	}
	story, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	pods, _ := c.Kubectl(story, "-n", Namespace, "get", "pods", "-o", "wide")
	events, _ := c.Kubectl(story, "-n", Namespace, "get", "events", "--sort-by=.lastTimestamp")
	logs, _ := c.Kubectl(story, "-n", Namespace, "logs", "--tail=20", workload)
	return fmt.Errorf("%w\n%s\n%s\n%s", err, pods, events, logs)
}

// NodeReady is nil when the API has a Node as ready.
func (c *Cluster) NodeReady(ctx context.Context, name string) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err == nil && !Ready(node) {
		err = errors.New(name + " is not ready")
	}
	return err
}

// InstallDNS starts CoreDNS and waits until it is ready, which takes a pod network.
func (c *Cluster) InstallDNS(ctx context.Context) error {
	file := c.file("coredns.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, coreDNS, coreDNSImage, c.DNS()), 0o644); err != nil {
		return fmt.Errorf("write the manifest of CoreDNS: %w", err)
	}
	if _, err := c.Kubectl(ctx, "apply", "--server-side", "-f", file); err != nil {
		return err
	}
	return c.RolledOut(ctx, "deployment/coredns")
}

// Kubectl runs kubectl as the administrator and returns what it printed.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.Nodes[0].Run(ctx, append([]string{"kubectl", "--kubeconfig=" + c.Kubeconfig}, args...)...)
}

// WriteScripts leaves two commands in the cluster's directory, for people: kubectl, run where the API server can be
// reached, since the real machine has no way there; and on NODE COMMAND..., which runs a command on a node.
func (c *Cluster) WriteScripts() (kubectl, on string, err error) {
	kubectl, on = c.file("kubectl"), c.file("on")
	err = os.WriteFile(kubectl, fmt.Appendf(nil, "#!/bin/sh\nexec nsenter --net=/proc/%d/ns/net %s --kubeconfig=%s \"$@\"\n",
		c.Nodes[0].pid, c.Program("kubectl"), c.Kubeconfig), 0o755)
	if err != nil {
		return "", "", err
	}
	script := "#!/bin/sh\nnode=$1; shift\ncase $node in\n"
	for _, m := range append([]*Machine{c.Fabric}, c.Nodes...) {
		script += fmt.Sprintf("%s) pid=%d ;;\n", m.Name, m.pid)
	}
	script += "*) echo \"usage: $0 NODE COMMAND...\" >&2; exit 2 ;;\nesac\n"
	script += fmt.Sprintf("export PATH=%s:$PATH\nexec nsenter -t $pid -a -w/ \"$@\"\n", c.file("bin"))
	return kubectl, on, os.WriteFile(on, []byte(script), 0o755)
}
