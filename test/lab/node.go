package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Node is one node of the cluster: a host on the fabric with directories of its own for whatever the agent and the
// plugin keep.
type Node struct {
	*Namespace
	// Name is the Node object's name.
	Name string
	// Number counts from 1.
	Number int
	// PodCIDRs are where the node's pods get their addresses from, one for each family that they have.
	PodCIDRs []netip.Prefix
	// Dir holds the node's files.
	Dir string
	// PluginEnv is added to the environment of every call of the plugin.
	PluginEnv []string
	// Kubeconfig has the node's agents ask an API server for the Nodes, in place of the lab's list.
	Kubeconfig string
	// Etcd has them lease subnets from the etcd at that URL, in place of the lab's list.
	Etcd string
	// NetworkConfig is the network configuration list that pods are added by; default Conflist.
	NetworkConfig string
	// Bridged says that the node's agents treat containers behind bridges as pods, so that there is no network configuration list.
	Bridged bool

	lab    *Lab
	cgroup string

	mu    sync.Mutex
	agent *agent
	pods  []*Pod
}

// Unplug takes the node off its fabric until plug is called: whatever it is sent vanishes, and its link stays up, so nobody is told.
func (n *Node) Unplug() (plug func() error, err error) {
	fabric, port := n.lab.fabric, fmt.Sprintf("n%d", n.Number)
	link, err := fabric.nl.LinkByName(port)
	if err != nil {
		return nil, fmt.Errorf("find link %s in %s: %w", port, fabric.name, err)
	}
	if err := fabric.nl.LinkSetNoMaster(link); err != nil {
		return nil, fmt.Errorf("unplug %s in %s: %w", port, fabric.name, err)
	}
	return func() error { return fabric.plug(port, fabrics[n.lab.Options.fabricOf(n.Number)].bridge) }, nil
}

// BPFFS is the node's pin directory, on a bpffs of its own. The agent makes it.
func (n *Node) BPFFS() string { return filepath.Join(n.bpffsMount(), "ebpf-cni") }

func (n *Node) bpffsMount() string { return filepath.Join(n.Dir, "bpf") }

// StateDir is the node's state directory. The agent makes it.
func (n *Node) StateDir() string { return filepath.Join(n.Dir, "state") }

// ConfDir is where the agent writes the network configuration list.
func (n *Node) ConfDir() string { return filepath.Join(n.Dir, "net.d") }

// Conflist is the network configuration list that the agent writes once the node can carry pods.
func (n *Node) Conflist() string { return filepath.Join(n.ConfDir(), "10-ebpf-cni.conflist") }

// CNIBinDir is where the agent installs the plugin.
func (n *Node) CNIBinDir() string { return filepath.Join(n.Dir, "cni-bin") }

// SubnetFile is where whoever leases the node's subnet from etcd writes it.
func (n *Node) SubnetFile() string { return filepath.Join(n.Dir, "flannel", "subnet.env") }

// AgentLog is what the agents of the node have written to stderr, one after the other.
func (n *Node) AgentLog() string { return filepath.Join(n.Dir, "agent.log") }

// PluginLog is what successful calls of the plugin have written to stderr.
func (n *Node) PluginLog() string { return filepath.Join(n.Dir, "plugin.log") }

func (n *Node) cacheDir() string { return filepath.Join(n.Dir, "cni-cache") }

func (n *Node) makeDirectories() error {
	for _, dir := range []string{n.bpffsMount(), n.ConfDir(), n.CNIBinDir(), n.cacheDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make the directories of %s: %w", n.Name, err)
		}
	}
	return n.mountBPFFS()
}

func (n *Node) mountBPFFS() error {
	if err := unix.Mount("bpf", n.bpffsMount(), "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount a bpffs on %s: %w", n.bpffsMount(), err)
	}
	return nil
}

// Reboot does to the node's memory what a reboot does: pods are gone, the pins and the state directory are empty, and
// what the agent has put on the disk is still there. The agent must not be running.
func (n *Node) Reboot() error {
	if n.AgentRunning() {
		return fmt.Errorf("reboot %s: its agent runs; stop it first", n.Name)
	}
	for _, pod := range n.Pods() {
		if err := n.forget(pod); err != nil {
			return err
		}
	}
	if err := unix.Unmount(n.bpffsMount(), unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", n.bpffsMount(), err)
	}
	for _, dir := range []string{n.StateDir(), n.cacheDir()} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("empty %s: %w", dir, err)
		}
	}
	return n.makeDirectories()
}

// Exec runs a program in the node's network namespace and cgroup, and returns what it wrote to stdout. An error carries what it
// wrote to stderr, and wraps *exec.ExitError when it ran.
func (n *Node) Exec(ctx context.Context, program string, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env, cmd.SysProcAttr = append(os.Environ(), n.cgroupVariable()), &syscall.SysProcAttr{}
	started, err := n.inCgroup(cmd.SysProcAttr)
	if err != nil {
		return nil, err
	}
	defer started()
	if err := n.Do(cmd.Run); err != nil {
		return stdout.Bytes(), fmt.Errorf("run %s %q on %s: %w: %s", program, args, n.Name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), nil
}

// Ebpfctl runs ebpfctl against the node's directories.
func (n *Node) Ebpfctl(ctx context.Context, args ...string) ([]byte, error) {
	program, err := n.lab.Binary("ebpfctl")
	if err != nil {
		return nil, err
	}
	return n.Exec(ctx, program, append([]string{"--bpffs", n.BPFFS(), "--state-dir", n.StateDir()}, args...)...)
}

// HTTPGet asks the agent's listener, which only the node itself can reach.
func (n *Node) HTTPGet(ctx context.Context, path string) (status int, body []byte, err error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = n.Do(func() (err error) {
				conn, err = new(net.Dialer).DialContext(ctx, network, addr)
				return err
			})
			return conn, err
		},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+agentListen+path, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("ask the agent of %s for %s: %w", n.Name, path, err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, nil, fmt.Errorf("ask the agent of %s for %s: %w", n.Name, path, err)
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

// Binary is the path of one of the three programs.
func (l *Lab) Binary(name string) (string, error) {
	dir := l.Options.BinDir
	if dir == "" {
		dir = os.Getenv("EBPF_CNI_BIN")
	}
	if dir == "" {
		root, err := Checkout()
		if err != nil {
			return "", err
		}
		dir = filepath.Join(root, "bin")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("find %s: %w; run `make build`, or set EBPF_CNI_BIN to the directory that holds it", name, err)
	}
	return path, nil
}

// Checkout is the directory of the project, which the working directory is part of.
func Checkout() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "test", "lab", "node.go")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("find the checkout: the working directory is not in one; set EBPF_CNI_BIN to the directory with the binaries")
		}
	}
}
