package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
  conf_dir = %q
  bin_dir = %q
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = %q
`

const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %s}}
authorization: {mode: Webhook}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
clusterDNS: ["%s"]
clusterDomain: cluster.local
enforceNodeAllocatable: []
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: "0%%", nodefs.available: "0%%", nodefs.inodesFree: "0%%", imagefs.available: "0%%", imagefs.inodesFree: "0%%"}
staticPodPath: %s
`

// The conntrack table's size is the whole computer's: kube-proxy keeps its hands off.
const kubeProxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: %s
clusterCIDR: %s
clientConnection: {kubeconfig: %s}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`

// Manifests is the directory of the node's static pods.
func (m *Machine) Manifests() string { return m.path("manifests") }

// startNode starts containerd, the kubelet and, unless there is none, kube-proxy on a machine.
func (c *Cluster) startNode(ctx context.Context, m *Machine) error {
	if err := c.prepareContainerd(ctx, m); err != nil {
		return err
	}
	if _, err := c.writeKubeconfig(m.Name, "system:node:"+m.Name, "system:nodes"); err != nil {
		return err
	}
	if err := m.write("kubelet.yaml", fmt.Sprintf(kubeletConfig, c.file("ca.crt"), c.DNS(), m.Manifests())); err != nil {
		return err
	}
	if err := c.StartKubelet(ctx, m); err != nil {
		return err
	}
	if c.Options.KubeProxy == NoProxy {
		return nil
	}
	if err := c.configureKubeProxy(m, c.Options.KubeProxy); err != nil {
		return err
	}
	return c.StartKubeProxy(ctx, m)
}

// The modes of kube-proxy.
const (
	IPTables = "iptables"
	NFTables = "nftables"
	// NoProxy is that there is none: the agents have their programs serve Services.
	NoProxy = "none"
)

func (c *Cluster) configureKubeProxy(m *Machine, mode string) error {
	kubeconfig, err := c.writeKubeconfig("kube-proxy", "system:kube-proxy")
	if err != nil {
		return err
	}
	return m.write("kube-proxy.yaml", fmt.Sprintf(kubeProxyConfig, mode, m.Name, c.podCIDRs(), kubeconfig))
}

// SwitchKubeProxy restarts a node's kube-proxy in another mode. It takes away by itself what it left in the one before.
func (c *Cluster) SwitchKubeProxy(ctx context.Context, m *Machine, mode string) error {
	if err := m.Stop(ctx, "kube-proxy", syscall.SIGTERM); err != nil {
		return err
	}
	if err := c.configureKubeProxy(m, mode); err != nil {
		return err
	}
	return c.StartKubeProxy(ctx, m)
}

// StartKubeProxy starts a node's kube-proxy, also again after Stop, where the cluster has one.
func (c *Cluster) StartKubeProxy(ctx context.Context, m *Machine) error {
	if c.Options.KubeProxy == NoProxy {
		return nil
	}
	return m.Start(ctx, "kube-proxy", "kube-proxy", "--config="+m.path("kube-proxy.yaml"))
}

// StartKubelet starts a node's kubelet, also again after Stop.
func (c *Cluster) StartKubelet(ctx context.Context, m *Machine) error {
	var addrs []string
	for _, addr := range m.Addrs {
		addrs = append(addrs, addr.String())
	}
	return m.Start(ctx, "kubelet", "kubelet", "--config="+m.path("kubelet.yaml"), "--kubeconfig="+c.file(m.Name+".kubeconfig"),
		"--hostname-override="+m.Name, "--node-ip="+strings.Join(addrs, ","))
}

// StartContainerd starts a node's containerd, also again after Stop, and waits until it answers: a kubelet that does not
// find it gives up.
func (c *Cluster) StartContainerd(ctx context.Context, m *Machine) error {
	if err := m.Start(ctx, "containerd", "containerd", "--config="+m.path("containerd.toml")); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	err := Poll(ctx, "containerd of "+m.Name+" answers", func(ctx context.Context) error {
		if _, err := m.Running(ctx, "containerd"); err != nil {
			return err
		}
		_, err := m.Run(ctx, "ctr", "version")
		return err
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, m.LogTail("containerd", 20))
	}
	return nil
}

// Where containerd looks for lists and plugins unless it is told otherwise.
const (
	defaultCNIConf = "/etc/cni/net.d"
	defaultCNIBin  = "/opt/cni/bin"
)

// ConfigureContainerd writes containerd's configuration by the cluster's options, and gives it the loopback plugin.
func (c *Cluster) ConfigureContainerd(ctx context.Context, m *Machine) error {
	conf, bin := c.Options.CNIConf, c.Options.CNIBin
	if err := m.write("containerd.toml", fmt.Sprintf(containerdConfig, PauseImage, conf, bin, c.Program("runc"))); err != nil {
		return err
	}
	_, err := m.Run(ctx, "install", "-D", c.Program("loopback"), filepath.Join(bin, "loopback"))
	return err
}

// prepareContainerd starts containerd and gives it the images.
func (c *Cluster) prepareContainerd(ctx context.Context, m *Machine) error {
	if err := c.ConfigureContainerd(ctx, m); err != nil {
		return err
	}
	if err := c.StartContainerd(ctx, m); err != nil {
		return err
	}
	for _, name := range imageFiles() {
		if err := c.importImage(ctx, m, name); err != nil {
			return err
		}
	}
	return nil
}

// importImage gives a node's containerd an image from a file of the cluster's directory.
func (c *Cluster) importImage(ctx context.Context, m *Machine, file string) error {
	if _, err := m.Run(ctx, "ctr", "-n", "k8s.io", "images", "import", c.file(file)); err != nil {
		return fmt.Errorf("give %s the image %s: %w\n%s", m.Name, file, err, m.LogTail("containerd", 20))
	}
	return nil
}

func (m *Machine) write(name, content string) error {
	return os.WriteFile(m.path(name), []byte(content), 0o644)
}
