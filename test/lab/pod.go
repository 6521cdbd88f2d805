package lab

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// PodOptions are what a runtime could say about a pod. The zero value is an ordinary pod.
type PodOptions struct {
	// ContainerID; default a random one of 64 hexadecimal digits, as runtimes have them.
	ContainerID string
	// IfName is the interface in the pod; default eth0.
	IfName string
	// IP is asked for by CNI_ARGS.
	IP netip.Addr
	// IPs are asked for by the capability `ips`, as a runtime does: with prefix length.
	IPs []string
	// MAC is asked for by the capability `mac`.
	MAC string
	// HostPorts are asked for by the capability `portMappings`.
	HostPorts []HostPort
	// Capabilities are further runtime configuration ("bandwidth", ...).
	Capabilities map[string]any
	// Args are further CNI_ARGS.
	Args [][2]string
}

// HostPort is a port of the node's behind which a pod is asked, written as containerd does.
type HostPort struct {
	// Host is the address of the node that is asked; the zero one: any.
	Host netip.Addr `json:"HostIP"`
	// Port is the node's, PodPort the pod's.
	Port    uint16 `json:"HostPort"`
	PodPort uint16 `json:"ContainerPort"`
	// Protocol is tcp, udp or sctp.
	Protocol string `json:"Protocol"`
}

// Pod is a pod of a node, with the addresses that the plugin gave it.
type Pod struct {
	*Namespace
	Name        string
	ContainerID string
	IfName      string
	Node        *Node
	// Result is the plugin's answer to ADD; nil before.
	Result *types100.Result
	// MAC is the pod interface's address, as in the result.
	MAC net.HardwareAddr

	runtime *libcni.RuntimeConf
}

// NewPod makes a pod's namespace and no network in it.
func (n *Node) NewPod(name string, opts PodOptions) (*Pod, error) {
	ns, err := n.lab.newNamespace(fmt.Sprintf("n%d-%s", n.Number, name))
	if err != nil {
		return nil, err
	}
	if opts.IfName == "" {
		opts.IfName = "eth0"
	}
	if opts.ContainerID == "" {
		var id [32]byte
		if _, err := rand.Read(id[:]); err != nil {
			return nil, fmt.Errorf("choose a container id: %w", err)
		}
		opts.ContainerID = hex.EncodeToString(id[:])
	}
	pod := &Pod{Namespace: ns, Name: name, ContainerID: opts.ContainerID, IfName: opts.IfName, Node: n}
	pod.runtime = &libcni.RuntimeConf{
		ContainerID: opts.ContainerID, NetNS: ns.Path(), IfName: opts.IfName,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", "lab"},
			{"K8S_POD_NAME", name},
			{"K8S_POD_INFRA_CONTAINER_ID", opts.ContainerID},
		},
		CapabilityArgs: map[string]any{},
	}
	if opts.IP.IsValid() {
		pod.runtime.Args = append(pod.runtime.Args, [2]string{"IP", opts.IP.String()})
	}
	pod.runtime.Args = append(pod.runtime.Args, opts.Args...)
	maps.Copy(pod.runtime.CapabilityArgs, opts.Capabilities)
	if opts.IPs != nil {
		pod.runtime.CapabilityArgs["ips"] = opts.IPs
	}
	if opts.HostPorts != nil {
		pod.runtime.CapabilityArgs["portMappings"] = opts.HostPorts
	}
	if opts.MAC != "" {
		pod.runtime.CapabilityArgs["mac"] = opts.MAC
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, pod)
	return pod, nil
}

// AddPod makes a pod and has the plugin give it a network.
func (n *Node) AddPod(ctx context.Context, name string, opts PodOptions) (*Pod, error) {
	pod, err := n.NewPod(name, opts)
	if err != nil {
		return nil, err
	}
	if err := pod.Add(ctx); err != nil {
		return nil, errors.Join(err, n.forget(pod))
	}
	return pod, nil
}

// DelPod has the plugin take the pod's network away and removes the pod.
func (n *Node) DelPod(ctx context.Context, pod *Pod) error {
	if err := pod.Del(ctx); err != nil {
		return err
	}
	return n.forget(pod)
}

// LosePod removes the pod's namespace without any DEL, as a node that is busy dying does.
func (n *Node) LosePod(pod *Pod) error { return n.forget(pod) }

// Pods are the pods of the node that have a namespace.
func (n *Node) Pods() []*Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

func (n *Node) forget(pod *Pod) error {
	n.mu.Lock()
	n.pods = slices.DeleteFunc(n.pods, func(have *Pod) bool { return have == pod })
	n.mu.Unlock()
	return n.lab.dropNamespace(pod.Namespace)
}

// Add calls the plugin with ADD.
func (p *Pod) Add(ctx context.Context) error {
	runtime, list, err := p.Node.runtime()
	if err != nil {
		return err
	}
	answer, err := runtime.AddNetworkList(ctx, list, p.runtime)
	if err != nil {
		return fmt.Errorf("ADD of pod %s on %s: %w", p.Name, p.Node.Name, err)
	}
	result, err := types100.NewResultFromResult(answer)
	if err != nil {
		return fmt.Errorf("ADD of pod %s on %s: read the result: %w", p.Name, p.Node.Name, err)
	}
	return p.take(result)
}

func (p *Pod) take(result *types100.Result) error {
	if len(result.IPs) == 0 {
		return fmt.Errorf("ADD of pod %s on %s: the result has no address", p.Name, p.Node.Name)
	}
	p.Result, p.addrs = result, nil
	for _, given := range result.IPs {
		addr, ok := netip.AddrFromSlice(given.Address.IP)
		if !ok {
			return fmt.Errorf("ADD of pod %s on %s: the result has the address %v", p.Name, p.Node.Name, given.Address)
		}
		p.addrs = append(p.addrs, addr.Unmap())
	}
	for _, link := range result.Interfaces {
		if link.Name == p.IfName && link.Sandbox != "" {
			mac, err := net.ParseMAC(link.Mac)
			if err != nil {
				return fmt.Errorf("ADD of pod %s on %s: read the result: %w", p.Name, p.Node.Name, err)
			}
			p.MAC = mac
		}
	}
	return nil
}

// Del calls the plugin with DEL and leaves the pod's namespace.
func (p *Pod) Del(ctx context.Context) error {
	runtime, list, err := p.Node.runtime()
	if err != nil {
		return err
	}
	if err := runtime.DelNetworkList(ctx, list, p.runtime); err != nil {
		return fmt.Errorf("DEL of pod %s on %s: %w", p.Name, p.Node.Name, err)
	}
	return nil
}

// Check calls the plugin with CHECK.
func (p *Pod) Check(ctx context.Context) error {
	runtime, list, err := p.Node.runtime()
	if err != nil {
		return err
	}
	if err := runtime.CheckNetworkList(ctx, list, p.runtime); err != nil {
		return fmt.Errorf("CHECK of pod %s on %s: %w", p.Name, p.Node.Name, err)
	}
	return nil
}

// GC calls the plugin with GC: what is not of the given pods is to be released.
func (n *Node) GC(ctx context.Context, valid ...*Pod) error {
	runtime, list, err := n.runtime()
	if err != nil {
		return err
	}
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for _, pod := range valid {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: pod.ContainerID, IfName: pod.IfName})
	}
	if err := runtime.GCNetworkList(ctx, list, args); err != nil {
		return fmt.Errorf("GC on %s: %w", n.Name, err)
	}
	return nil
}

// Status calls the plugin with STATUS.
func (n *Node) Status(ctx context.Context) error {
	runtime, list, err := n.runtime()
	if err != nil {
		return err
	}
	if err := runtime.GetStatusNetworkList(ctx, list); err != nil {
		return fmt.Errorf("STATUS on %s: %w", n.Name, err)
	}
	return nil
}

// runtime is what a container runtime has: libcni over the directories of the node, and the list as it is now.
func (n *Node) runtime() (*libcni.CNIConfig, *libcni.NetworkConfigList, error) {
	file := n.NetworkConfig
	if file == "" {
		file = n.Conflist()
	}
	list, err := libcni.NetworkConfFromFile(file)
	if err != nil {
		return nil, nil, fmt.Errorf("read the network configuration of %s: %w", n.Name, err)
	}
	runner := &pluginRunner{node: n}
	return libcni.NewCNIConfigWithCacheDir([]string{n.CNIBinDir()}, n.cacheDir(), runner), list, nil
}

// pluginRunner runs plugins in the node's network namespace. The child takes over the namespace of the thread that
// starts it, so only the start needs to happen inside.
type pluginRunner struct {
	version.PluginDecoder
	node *Node
}

// ExecPlugin implements invoke.Exec.
func (r *pluginRunner) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) (stdout []byte, err error) {
	log, err := os.OpenFile(r.node.PluginLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the plugin's log: %w", err)
	}
	defer log.Close()
	raw := &invoke.RawExec{Stderr: log}
	err = r.node.Do(func() (err error) {
		stdout, err = raw.ExecPlugin(ctx, path, stdin, append(environ, r.node.PluginEnv...))
		return err
	})
	return stdout, err
}

// FindInPath implements invoke.Exec.
func (r *pluginRunner) FindInPath(plugin string, paths []string) (string, error) {
	return new(invoke.RawExec).FindInPath(plugin, paths)
}
