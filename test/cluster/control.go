package cluster

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config is the administrator's way to the API.
func (c *Cluster) Config() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return nil, err
	}
	config.Dial, config.QPS = c.dialAPI, -1
	return config, nil
}

// Client speaks to the API as the administrator.
func (c *Cluster) Client() (*kubernetes.Clientset, error) {
	config, err := c.Config()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// startControlPlane starts etcd and the control plane on the first node.
func (c *Cluster) startControlPlane(ctx context.Context) (err error) {
	node := c.Nodes[0]
	if c.Kubeconfig, err = c.writeKubeconfig("admin", "admin", "system:masters"); err != nil {
		return err
	}
	if err := node.Start(ctx, "etcd", "etcd", "--data-dir=/var/lib/etcd/data", "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380"); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	for name, groups := range map[string][]string{managerName: {"system:masters"}, schedulerName: nil} {
		if _, err := c.writeKubeconfig(name, "system:"+name, groups...); err != nil {
			return err
		}
	}
	return c.startControllers(ctx)
}

// The programs that lead only while they reach the API server.
const (
	managerName   = "kube-controller-manager"
	schedulerName = "kube-scheduler"
)

func (c *Cluster) startControllers(ctx context.Context) error {
	kubeconfig := func(name string) string { return "--kubeconfig=" + c.file(name+".kubeconfig") }
	args := append([]string{managerName}, c.nodeMasks()...)
	args = append(args, kubeconfig(managerName),
		"--allocate-node-cidrs", "--cluster-cidr="+c.podCIDRs(), "--service-cluster-ip-range="+c.serviceCIDRs(),
		"--leader-elect=false", "--root-ca-file="+c.file("ca.crt"),
		"--service-account-private-key-file="+c.file("service-accounts.key"))
	if err := c.Nodes[0].Start(ctx, managerName, args...); err != nil {
		return err
	}
	return c.Nodes[0].Start(ctx, schedulerName, schedulerName, kubeconfig(schedulerName), "--leader-elect=false")
}

// RestartClients starts anew whoever watches the API server. After it was away for a while they would try again later and
// later: it takes Kubernetes more than a minute to be itself.
func (c *Cluster) RestartClients(ctx context.Context) error {
	for _, name := range []string{managerName, schedulerName} {
		if err := c.Nodes[0].Stop(ctx, name, syscall.SIGTERM); err != nil {
			return err
		}
	}
	if err := c.startControllers(ctx); err != nil {
		return err
	}
	programs := []string{"kubelet", "kube-proxy"}
	if c.Options.KubeProxy == NoProxy {
		programs = programs[:1]
	}
	for _, m := range c.Nodes {
		for _, name := range programs {
			if err := m.Stop(ctx, name, syscall.SIGTERM); err != nil {
				return err
			}
		}
		if err := c.StartKubelet(ctx, m); err != nil {
			return err
		}
		if err := c.StartKubeProxy(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) file(name string) string { return filepath.Join(c.Dir, name) }

// Authority is the certificate of who signs the API server's.
func (c *Cluster) Authority() string { return c.file("ca.crt") }

// StartAPIServer starts the API server, also again, and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	err := c.Nodes[0].Start(ctx, "kube-apiserver", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		"--advertise-address="+c.apiAddr().String(), fmt.Sprint("--secure-port=", apiPort), "--service-cluster-ip-range="+c.serviceCIDRs(),
		"--client-ca-file="+c.file("ca.crt"), "--tls-cert-file="+c.file("apiserver.crt"), "--tls-private-key-file="+c.file("apiserver.key"),
		"--kubelet-client-certificate="+c.file("apiserver.crt"), "--kubelet-client-key="+c.file("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.file("service-accounts.key"),
		"--service-account-signing-key-file="+c.file("service-accounts.key"), "--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", "--allow-privileged", "--kubelet-preferred-address-types=InternalIP")
	if err != nil {
		return err
	}
	client, err := c.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	return Poll(ctx, "the API server is ready", func(ctx context.Context) error {
		if _, err := c.Nodes[0].Running(ctx, "kube-apiserver"); err != nil {
			return err
		}
		return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
}

// waitRegistered waits until every kubelet's Node is there with a podCIDR.
func (c *Cluster) waitRegistered(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	return Poll(ctx, "the nodes are registered", func(ctx context.Context) error {
		for _, m := range c.Nodes {
			if _, err := m.Running(ctx, "kubelet"); err != nil {
				return err
			}
			node, err := client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
			if err != nil {
				return fmt.Errorf("%w\n%s", err, m.LogTail("kubelet", 5))
			}
			if node.Spec.PodCIDR == "" {
				return errors.New(m.Name + " has no podCIDR")
			}
		}
		return nil
	})
}

// Ready says whether a Node can take pods.
func Ready(node *core.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == core.NodeReady {
			return condition.Status == core.ConditionTrue
		}
	}
	return false
}
