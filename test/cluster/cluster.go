package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
)

// registryDir holds a directory for every cluster on this computer.
const registryDir = "/run/ebpf-cni-cluster"

const (
	lockFile = "lock" // locked for as long as the cluster's owner lives
	keptFile = "kept" // marks a cluster that outlives its owner
)

// Options say what cluster to make; the zero value is two nodes without agents.
type Options struct {
	Nodes int // default 2
	// Families are those of nodes, pods and Services, in the order of the Nodes' podCIDRs; default IPv4. The control plane speaks the first.
	Families []core.IPFamily
	// KubeProxy is the mode of kube-proxy: IPTables, the default, NFTables, or NoProxy.
	KubeProxy string
	// CNIConf and CNIBin are where containerd looks for lists and plugins; default /etc/cni/net.d and /opt/cni/bin.
	CNIConf, CNIBin string
	// NoBPFFS leaves the nodes without a BPF file system, until somebody mounts it.
	NoBPFFS bool
	// Binaries is where ebpf-agent, ebpf-cni and ebpfctl are; default bin of this checkout.
	Binaries string
	// Keep leaves the cluster running when this process ends, until Sweep is told to end it.
	Keep bool
}

func (o Options) orDefault() Options {
	if o.Nodes == 0 {
		o.Nodes = 2
	}
	if o.Families == nil {
		o.Families = []core.IPFamily{core.IPv4Protocol}
	}
	if o.KubeProxy == "" {
		o.KubeProxy = IPTables
	}
	if o.CNIConf == "" {
		o.CNIConf, o.CNIBin = defaultCNIConf, defaultCNIBin
	}
	return o
}

// Cluster is a Kubernetes cluster on a fabric that leads nowhere.
type Cluster struct {
	ID, Dir string
	Options Options
	// Fabric is the switch, and the world outside of the cluster: see World.
	Fabric *Machine
	// Nodes are the machines with kubelets. The control plane runs on the first.
	Nodes []*Machine
	// Kubeconfig is the administrator's. The API server's address is one on the fabric: see Config and kubectl.
	Kubeconfig string

	ca   *authority
	lock *os.File
}

func (c *Cluster) kept() bool { return c.Options.Keep }

// New makes a cluster and waits until its API server has a Node for every kubelet, with a podCIDR. The nodes are not
// ready: that takes agents.
func New(ctx context.Context, options Options) (c *Cluster, err error) {
	options = options.orDefault()
	if err := Sweep(ctx, false); err != nil {
		return nil, err
	}
	paths, err := PreparePrograms(ctx)
	if err != nil {
		return nil, err
	}
	if err := os.Setenv("PATH", strings.Join(append(paths, os.Getenv("PATH")), ":")); err != nil {
		return nil, err
	}
	if c, err = claim(options); err != nil {
		return nil, err
	}
	made := c
	defer func() {
		if err != nil {
			err = errors.Join(err, made.Close(context.WithoutCancel(ctx)))
		}
	}()
	for _, step := range []func() error{c.copyBinaries, c.writeImages, c.writePKI} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	for _, step := range []func(context.Context) error{c.makeMachines, c.startWorld, c.startControlPlane} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	for _, node := range c.Nodes {
		if err := c.startNode(ctx, node); err != nil {
			return nil, err
		}
	}
	return c, c.waitRegistered(ctx)
}

// claim makes the directory and the lock of a new cluster.
func claim(options Options) (*Cluster, error) {
	raw := make([]byte, 3)
	if _, err := rand.Read(raw); err != nil {
		return nil, err
	}
	c := &Cluster{ID: hex.EncodeToString(raw), Options: options}
	c.Dir = filepath.Join(registryDir, c.ID)
	unlock, err := lockRegistry()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := os.Mkdir(c.Dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(c.Dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	c.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if options.Keep {
		return c, os.WriteFile(filepath.Join(c.Dir, keptFile), nil, 0o600)
	}
	return c, nil
}

// lockRegistry keeps others from making, sweeping and removing directories of clusters.
func lockRegistry() (unlock func(), err error) {
	if err := os.MkdirAll(registryDir, 0o700); err != nil {
		return nil, err
	}
	dir, err := os.Open(registryDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock %s: %w", registryDir, err)
	}
	return func() { dir.Close() }, nil
}

// Close ends the cluster and removes everything that is left of it.
func (c *Cluster) Close(ctx context.Context) error {
	if c.lock != nil {
		defer c.lock.Close()
	}
	unlock, err := lockRegistry()
	if err != nil {
		return err
	}
	defer unlock()
	return demolish(ctx, c.ID)
}

// Sweep ends the clusters whose owners have ended, and with kept also those that were to outlive them.
func Sweep(ctx context.Context, kept bool) error {
	unlock, err := lockRegistry()
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(registryDir)
	var failed []error
	for _, entry := range entries {
		dir := filepath.Join(registryDir, entry.Name())
		if _, err := os.Stat(filepath.Join(dir, keptFile)); err == nil && !kept {
			continue
		}
		lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			failed = append(failed, demolish(ctx, entry.Name()))
		}
		lock.Close()
	}
	return errors.Join(append(failed, err)...)
}

// Kept is the directory of a cluster that outlived its maker; empty when there is none.
func Kept() string {
	kept, _ := filepath.Glob(filepath.Join(registryDir, "*", keptFile))
	if len(kept) == 0 {
		return ""
	}
	return filepath.Dir(kept[0])
}

// demolish ends the machines that are on record, then removes their cgroups and files.
func demolish(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	dir := filepath.Join(registryDir, id)
	records, err := filepath.Glob(filepath.Join(dir, "*", recordFile))
	if err != nil {
		return err
	}
	var failed []error
	for _, file := range records {
		var record machineRecord
		raw, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(raw, &record)
		}
		if err != nil {
			failed = append(failed, err)
			continue
		}
		m := &Machine{Name: filepath.Base(filepath.Dir(file)), pid: record.PID, start: record.Start}
		failed = append(failed, m.end(ctx))
	}
	if err := errors.Join(append(failed, removeCgroups(id, "*"))...); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// Remains lists what is there of a cluster: nothing once it is closed.
func (c *Cluster) Remains() []string {
	found, _ := cgroups(c.ID, "*")
	if _, err := os.Stat(c.Dir); err == nil {
		found = append(found, c.Dir)
	}
	for _, m := range append([]*Machine{c.Fabric}, c.Nodes...) {
		if start, err := StartTime(m.pid); err == nil && start == m.start {
			found = append(found, fmt.Sprintf("process %d of %s", m.pid, m.Name))
		}
	}
	return found
}

// Program is the path of one of the programs of the cluster.
func (c *Cluster) Program(name string) string {
	for dir := range strings.SplitSeq(os.Getenv("PATH"), ":") {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	return name
}

// Binary is one of this project's programs; the copy is the cluster's, so that a build does not change what runs.
func (c *Cluster) Binary(name string) string { return filepath.Join(c.Dir, "bin", name) }

func (c *Cluster) copyBinaries() error {
	from := c.Options.Binaries
	if from == "" {
		root, err := checkout()
		if err != nil {
			return err
		}
		from = filepath.Join(root, "bin")
	}
	if err := os.Mkdir(filepath.Join(c.Dir, "bin"), 0o755); err != nil {
		return err
	}
	for _, name := range []string{"ebpf-agent", "ebpf-cni", "ebpfctl"} {
		if err := copyFile(filepath.Join(from, name), c.Binary(name)); err != nil {
			return fmt.Errorf("copy the binaries (make build makes them): %w", err)
		}
	}
	return nil
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}

// apiPort is where the API server answers.
const apiPort = 6443

// apiAddr is the API server's: the first node's.
func (c *Cluster) apiAddr() netip.Addr { return c.addresses(firstNode)[0] }

// dialAPI connects to the API server from its own node.
func (c *Cluster) dialAPI(ctx context.Context, network, address string) (net.Conn, error) {
	return c.Nodes[0].Dial(ctx, network, address)
}
