package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// docker is the mode without Kubernetes: subnets are leased from etcd, and containers are Docker's.
const docker = "docker"

const (
	// network is what the registry says: as for a network of flannel's.
	network    = `{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}`
	networkKey = "/coreos.com/network/config"
	leasesKey  = "/coreos.com/network/subnets/"
	// bridge is Docker's.
	bridge = "docker0"
	// dockerLimit is what the demo may take in this mode: three dockerds start.
	dockerLimit = 4 * time.Minute
	// leaseLimit is how long nodes may take to be ready.
	leaseLimit = time.Minute
)

// engine runs the containers of a node.
type engine func(ctx context.Context, name string) (*lab.Namespace, error)

// dockers is what the demo has without Kubernetes.
type dockers struct {
	registry *etcd.Process
	// flannels is the node on which flanneld runs in the agent's place.
	flannels *lab.Node
	// subnets are what nodes have leased, by name: the bridge's address, with the length of its prefix.
	subnets map[string]netip.Prefix
	engines map[string]engine // likewise
	first   *lab.Docker       // of the first node; nil: bridges stand in
}

func (d *demo) buildDocker(ctx context.Context) error {
	d.heading("The nodes")
	if err := d.makeHosts(ctx); err != nil {
		return err
	}
	d.dockers = &dockers{flannels: d.lab.Nodes[2], subnets: map[string]netip.Prefix{}, engines: map[string]engine{}}
	d.add = d.addContainer
	for _, step := range []struct {
		name string
		work func(context.Context) error
	}{
		{"etcd, with the configuration of a network of flannel's", d.startRegistry},
		{"agents on two nodes, flanneld on the third: subnets leased", d.startDaemons},
	} {
		if err := d.step(step.name, func() error { return step.work(ctx) }); err != nil {
			return err
		}
	}
	if err := d.startEngines(ctx); err != nil {
		return err
	}
	if err := d.step("two containers per node", func() error { return d.addPods(ctx) }); err != nil {
		return err
	}
	d.introduce()
	return nil
}

func (d *demo) startRegistry(ctx context.Context) (err error) {
	if d.dockers.registry, err = d.lab.StartEtcd(ctx); err != nil {
		return err
	}
	client, err := d.dockers.registry.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = client.Put(ctx, networkKey, network)
	return err
}

// startDaemons has every node lease a subnet.
func (d *demo) startDaemons(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaseLimit)
	defer cancel()
	for _, node := range d.lab.Nodes {
		if node == d.dockers.flannels {
			if err := d.startFlanneld(node); err != nil {
				return err
			}
			continue
		}
		node.Etcd, node.Bridged = d.dockers.registry.URL(), true
		if err := node.StartAgent(); err != nil {
			return err
		}
	}
	for _, node := range d.lab.Nodes {
		if node != d.dockers.flannels {
			if err := node.WaitReady(ctx); err != nil {
				return err
			}
		}
		err := until(ctx, func() error { _, err := os.Stat(node.SubnetFile()); return err })
		if err != nil {
			return fmt.Errorf("%s leases no subnet: %w", node.Name, err)
		}
	}
	return nil
}

// until waits for what has no error any more.
func until(ctx context.Context, what func() error) error {
	for {
		err := what()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (d *demo) startFlanneld(node *lab.Node) error {
	flanneld, err := d.lab.Binary("flanneld-etcd")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(node.SubnetFile()), 0o755); err != nil {
		return err
	}
	_, err = node.StartProgram("flanneld", flanneld, "-etcd-endpoints", d.dockers.registry.URL(), "-subnet-file", node.SubnetFile())
	return err
}

// startEngines starts what runs containers: Docker, or where that can't run, a bridge.
func (d *demo) startEngines(ctx context.Context) error {
	for _, node := range d.lab.Nodes {
		options, err := node.DockerOptions(ctx)
		if err != nil {
			return err
		}
		values := map[string]string{}
		for _, option := range options {
			name, value, _ := strings.Cut(option, "=")
			values[name] = value
		}
		leased, err := netip.ParsePrefix(values["--bip"])
		if err != nil {
			return fmt.Errorf("read the subnet of %s: %w", node.Name, err)
		}
		d.dockers.subnets[node.Name] = leased
		var why error
		err = d.step("dockerd on "+node.Name+" "+strings.Join(options, " "), func() (err error) {
			d.dockers.engines[node.Name], why, err = d.startEngine(ctx, node, leased, values["--mtu"], options)
			return err
		})
		if err != nil {
			return err
		}
		if why != nil {
			d.line("    %s", d.paint(dim, fmt.Sprintf("a bridge with namespaces stands in for it: %v", why)))
		}
	}
	return nil
}

// startEngine returns why a bridge stands in for Docker; nil: none does.
func (d *demo) startEngine(ctx context.Context, node *lab.Node, leased netip.Prefix, mtu string, options []string) (run engine, why, err error) {
	dockerd, why := node.StartDocker(ctx, options...)
	if why == nil {
		if d.dockers.first == nil {
			d.dockers.first = dockerd
		}
		return func(ctx context.Context, name string) (*lab.Namespace, error) { return dockerd.Run(ctx, "demo-"+name) }, nil, nil
	}
	if ctx.Err() != nil {
		return nil, nil, why
	}
	if run, err = d.standIn(ctx, node, leased, mtu); err != nil {
		return nil, nil, errors.Join(why, err)
	}
	return run, why, nil
}

// standIn makes a bridge for containers, and waits until the node's agent carries them: they come sooner than Docker's.
func (d *demo) standIn(ctx context.Context, node *lab.Node, leased netip.Prefix, mtu string) (engine, error) {
	size, err := strconv.Atoi(mtu)
	if err != nil {
		return nil, err
	}
	if err := node.AddBridge(bridge, size, leased); err != nil {
		return nil, err
	}
	if node != d.dockers.flannels {
		ctx, cancel := context.WithTimeout(ctx, leaseLimit)
		defer cancel()
		if err := until(ctx, func() error { _, err := node.Ebpfctl(ctx, "status"); return err }); err != nil {
			return nil, err
		}
	}
	last := byte(1)
	return func(_ context.Context, name string) (*lab.Namespace, error) {
		last++
		return node.AddContainer(bridge, name, last)
	}, nil
}

func (d *demo) addContainer(ctx context.Context, node *lab.Node, name string) (party, error) {
	container, err := d.dockers.engines[node.Name](ctx, name)
	if err != nil {
		return party{}, err
	}
	return d.addParty(container, node, name), nil
}

// seenOf is the source that a receiver has to see where it is not the sender's own address; the zero one: it is.
func (ds *dockers) seenOf(from, to party, host netip.Addr) netip.Addr {
	flannels := from.node == ds.flannels.Name
	switch {
	case from.pod && to.node == "":
		return host
	case from.pod && flannels && !to.pod && to.node != from.node:
		return host // flanneld's rules masquerade what leaves the network
	case !from.pod && to.pod && to.node == from.node:
		return ds.subnets[from.node].Addr() // the bridge's
	case !from.pod && to.pod && flannels:
		return ds.subnets[from.node].Masked().Addr() // of flannel's device
	}
	return netip.Addr{}
}

// dockerHints are those that only this mode has.
func (d *demo) dockerHints() ([]hint, error) {
	hints := []hint{{"the leases, by Debian's etcd-client", fmt.Sprintf("ip netns exec %s etcdctl --endpoints=%s get --prefix %s",
		d.lab.Nodes[0].Netns(), d.dockers.registry.URL(), leasesKey)}}
	if d.dockers.first == nil {
		return hints, nil
	}
	client, err := d.dockers.first.Client()
	docker := quoted(client[0]) + " " + strings.Join(client[1:], " ")
	return append(hints, hint{"containers on that node", docker + " ps"}, hint{"in one of them", docker + " exec -it demo-a sh"}), err
}

// withoutEtcd: what is leased stays, and so does all traffic.
func (d *demo) withoutEtcd(ctx context.Context) error {
	d.heading("etcd is killed")
	if err := d.dockers.registry.Kill(); err != nil {
		return err
	}
	d.check(true, "it is away for what follows")
	all := d.meet(ctx, wire.IPv4, d.pods, d.pods)
	d.drawKinds(all)
	d.drawProblems(all)
	return nil
}

func (d *demo) etcdComesBack(ctx context.Context) error {
	d.heading("etcd comes back")
	err := d.step("started, and asked for what is leased", func() error { return d.dockers.registry.Start(ctx) })
	if err != nil {
		return err
	}
	client, err := d.dockers.registry.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	leases, err := client.Get(ctx, leasesKey, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	var names []string
	for _, lease := range leases.Kvs {
		names = append(names, filepath.Base(string(lease.Key)))
	}
	d.check(len(names) == len(d.lab.Nodes), "leases: %s", strings.Join(names, ", "))
	return nil
}
