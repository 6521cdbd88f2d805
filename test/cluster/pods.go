package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	core "k8s.io/api/core/v1"
	kerrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Where agnhost netexec answers, in pods and in the world.
const (
	HTTPPort = 8080
	UDPPort  = 8081
)

// podLimit is how long a pod may take to be ready, and to be gone.
const podLimit = 3 * time.Minute

// Pod is a pod of the default namespace that answers on HTTPPort and UDPPort.
type Pod struct {
	Name string
	Node *Machine
	// Addrs are all its addresses, Addr that of the cluster's first family.
	Addrs []netip.Addr
	Addr  netip.Addr
	// HostNetwork says that its network is its node's.
	HostNetwork bool

	// netns is where its network was found last.
	netns atomic.Pointer[string]
}

// AddPod runs a pod on a node, of the scheduler's choice when that is nil, and waits until it is ready.
func (c *Cluster) AddPod(ctx context.Context, name string, node *Machine, labels map[string]string) (*Pod, error) {
	return c.AddPodWith(ctx, name, node, labels, func(*core.PodSpec) {})
}

// AddHostPod is AddPod for a pod in its node's network, which asks the cluster's DNS all the same.
func (c *Cluster) AddHostPod(ctx context.Context, name string, node *Machine, labels map[string]string) (*Pod, error) {
	return c.AddPodWith(ctx, name, node, labels, func(spec *core.PodSpec) {
		spec.HostNetwork, spec.DNSPolicy = true, core.DNSClusterFirstWithHostNet
	})
}

// AddPodWith is AddPod for one that has something changed.
func (c *Cluster) AddPodWith(ctx context.Context, name string, node *Machine, labels map[string]string, change func(*core.PodSpec)) (*Pod, error) {
	client, err := c.Client()
	if err != nil {
		return nil, err
	}
	pod := netexec(name, node, labels)
	change(&pod.Spec)
	pods := client.CoreV1().Pods(metav1.NamespaceDefault)
	if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("add pod %s: %w", pod.Name, err)
	}
	return c.ReadyPod(ctx, pod.Name)
}

// ReadyPod waits until a pod that exists is ready.
func (c *Cluster) ReadyPod(ctx context.Context, name string) (*Pod, error) {
	client, err := c.Client()
	if err != nil {
		return nil, err
	}
	pods := client.CoreV1().Pods(metav1.NamespaceDefault)
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	var pod *core.Pod
	err = Poll(ctx, "pod "+name+" is ready", func(ctx context.Context) error {
		if pod, err = pods.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		return podReady(pod)
	})
	if err != nil {
		events, _ := c.Kubectl(context.WithoutCancel(ctx), "get", "events", "--field-selector=involvedObject.name="+name)
		return nil, fmt.Errorf("%w\n%s", err, events)
	}
	addrs, err := Addresses(pod)
	if err != nil {
		return nil, err
	}
	return &Pod{Name: name, Node: c.Node(pod.Spec.NodeName), Addrs: addrs, Addr: c.choose(addrs), HostNetwork: pod.Spec.HostNetwork}, nil
}

// Addresses are those that the API has for a pod.
func Addresses(pod *core.Pod) (all []netip.Addr, err error) {
	for _, one := range pod.Status.PodIPs {
		addr, err := netip.ParseAddr(one.IP)
		if err != nil {
			return nil, fmt.Errorf("an address of pod %s: %w", pod.Name, err)
		}
		all = append(all, addr)
	}
	return all, nil
}

func netexec(name string, node *Machine, labels map[string]string) *core.Pod {
	grace := int64(1)
	pod := &core.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: core.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers: []core.Container{{
				Name: "netexec", Image: AgnhostImage, ImagePullPolicy: core.PullNever,
				Args: []string{"netexec", "--http-port=" + strconv.Itoa(HTTPPort), "--udp-port=" + strconv.Itoa(UDPPort)},
				ReadinessProbe: &core.Probe{
					PeriodSeconds: 1,
					ProbeHandler:  core.ProbeHandler{HTTPGet: &core.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(HTTPPort)}},
				},
				// Without a request, a pod starves as soon as anything else is at work.
				Resources: core.ResourceRequirements{Requests: core.ResourceList{core.ResourceCPU: resource.MustParse("20m")}},
			}},
		},
	}
	if node != nil {
		pod.Spec.NodeName = node.Name
	}
	return pod
}

// podReady is nil when a pod is ready.
func podReady(pod *core.Pod) error {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == core.PodReady && condition.Status == core.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("pod %s is %s, not ready", pod.Name, pod.Status.Phase)
}

// Node is the node of that name; nil when there is none.
func (c *Cluster) Node(name string) *Machine {
	for _, m := range c.Nodes {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// DeletePods deletes pods and waits until they are gone.
func (c *Cluster) DeletePods(ctx context.Context, all ...*Pod) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	pods := client.CoreV1().Pods(metav1.NamespaceDefault)
	for _, pod := range all {
		if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil && !kerrors.IsNotFound(err) {
			return fmt.Errorf("delete pod %s: %w", pod.Name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, podLimit)
	defer cancel()
	for _, pod := range all {
		if err := Poll(ctx, "pod "+pod.Name+" is gone", func(ctx context.Context) error {
			_, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
			if kerrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is there"))
		}); err != nil {
			return err
		}
	}
	return nil
}

// Netns is the path of the pod's network namespace as its node sees it: the one that holds its address.
func (p *Pod) Netns() (string, error) {
	if last := p.netns.Load(); last != nil && p.isIn(*last) {
		return *last, nil
	}
	dir := "/run/netns"
	entries, err := os.ReadDir(p.Node.inRoot(dir))
	if err != nil {
		return "", fmt.Errorf("find the network of pod %s: %w", p.Name, err)
	}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name())
		if p.isIn(path) {
			p.netns.Store(&path)
			return path, nil
		}
	}
	return "", fmt.Errorf("no network namespace on %s holds %s, the address of pod %s", p.Node.Name, p.Addr, p.Name)
}

// isIn says whether a network namespace of the node is the pod's.
func (p *Pod) isIn(path string) bool {
	ns, err := netns.GetFromPath(p.Node.inRoot(path))
	if err != nil {
		return false
	}
	defer ns.Close()
	return holds(ns, p.Addr)
}

// holds says whether a network namespace has an address.
func holds(ns netns.NsHandle, addr netip.Addr) bool {
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return false
	}
	defer h.Close()
	all, err := h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return false
	}
	for _, a := range all {
		if have, ok := netip.AddrFromSlice(a.IP); ok && have.Unmap() == addr {
			return true
		}
	}
	return false
}

// Do calls f in the pod's network, as Machine.Do does.
func (p *Pod) Do(f func() error) error {
	if p.HostNetwork {
		return p.Node.Do(f)
	}
	path, err := p.Netns()
	if err != nil {
		return err
	}
	return inNetwork(p.Name, p.Node.inRoot(path), f)
}

// Dial connects from the pod to an address.
func (p *Pod) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return p.DialFrom(ctx, 0, network, address)
}

// DialFrom is Machine.DialFrom in the pod's network.
func (p *Pod) DialFrom(ctx context.Context, port uint16, network, address string) (conn net.Conn, err error) {
	if p.HostNetwork {
		return p.Node.DialFrom(ctx, port, network, address)
	}
	if err := isNoName(address); err != nil {
		return nil, err
	}
	dialer := dialerFrom(port, network)
	err = p.Do(func() error {
		conn, err = dialer.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Run runs a program of the node in the pod's network.
func (p *Pod) Run(ctx context.Context, argv ...string) (string, error) {
	path, err := p.Netns()
	if err != nil {
		return "", err
	}
	return p.Node.Run(ctx, append([]string{"nsenter", "--net=" + path}, argv...)...)
}
