package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// bulk is how much is sent across nodes.
const bulk = 100_000_000

// timeLimit is what one demo may take; everything in it waits for at most that.
const timeLimit = 60 * time.Second

// readyLimit is how long agents may take to be ready.
const readyLimit = 20 * time.Second

type demo struct {
	*screen
	env     env
	keep    bool
	setting setting

	lab     *lab.Lab
	pods    []party
	hosts   []party
	outside party
	// add adds a pod to a node, or a container of Docker's.
	add     func(ctx context.Context, node *lab.Node, name string) (party, error)
	dockers *dockers // nil in other modes than docker
}

func newDemo(e env, between setting, keep bool) *demo {
	d := &demo{screen: &screen{out: e.stdout, colour: e.colour}, env: e, setting: between, keep: keep}
	d.add = d.addPod
	return d
}

// run shows everything and cleans up, and returns the exit status.
func (d *demo) run(ctx context.Context) int {
	started := time.Now()
	ctx, cancel := context.WithTimeout(ctx, d.setting.limit())
	defer cancel()
	release, err := kernelRelease()
	if err != nil {
		release = "of unknown version"
	}
	d.line("%s %s", d.paint(bold, "ebpf-cni"), d.paint(dim, fmt.Sprintf("three nodes and a host outside, %s, on Linux %s", d.setting, release)))

	err = d.show(ctx)
	if interrupted(ctx) {
		err = errors.New("interrupted")
	}
	if err != nil {
		d.failed = max(d.failed, 1)
		d.line("\n%s", d.paint(red, err.Error()))
	}
	if d.lab != nil {
		d.leave(ctx)
	}
	if d.failed > 0 {
		d.line("\n%s in %s", d.paint(red, "FAILED: see the ✗ above"), seconds(time.Since(started)))
		return 1
	}
	d.line("\n%s in %s", d.paint(green, "all of it held"), seconds(time.Since(started)))
	return 0
}

// interrupted tells a signal from the end of the time limit.
func interrupted(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }

// show is the demo itself. An error is what makes going on senseless; what merely did not hold is counted.
func (d *demo) show(ctx context.Context) error {
	parts := []func(context.Context) error{
		d.build, d.each(d.matrix), d.each(d.sources), d.each(d.transfer), d.between, d.liveWithoutAgent, d.inspect,
	}
	if d.setting.mode == docker {
		parts = []func(context.Context) error{
			d.buildDocker, d.each(d.matrix), d.each(d.sources), d.each(d.transfer), d.withoutEtcd, d.liveWithoutAgent, d.etcdComesBack, d.inspect,
		}
	}
	for _, part := range parts {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) build(ctx context.Context) error {
	d.heading("The cluster")
	if err := d.makeHosts(ctx); err != nil {
		return err
	}
	err := d.step("an agent per node: programs loaded, maps filled, ready", func() error {
		ctx, cancel := context.WithTimeout(ctx, readyLimit)
		defer cancel()
		return d.lab.StartAgents(ctx)
	})
	if err != nil {
		return err
	}
	if err := d.step("two pods per node, by libcni and the plugin", func() error { return d.addPods(ctx) }); err != nil {
		return err
	}
	d.introduce()
	return nil
}

func (d *demo) makeHosts(ctx context.Context) error {
	err := d.step("network namespaces: three nodes and the outside host", func() (err error) {
		d.lab, err = lab.New(ctx, d.setting.options())
		return err
	})
	if err == nil {
		d.outside = party{Namespace: d.lab.Outside, name: "outside"}
	}
	return err
}

func (d *demo) addPods(ctx context.Context) error {
	for _, node := range d.lab.Nodes {
		d.hosts = append(d.hosts, party{Namespace: node.Namespace, name: fmt.Sprintf("n%d", node.Number), node: node.Name})
		for _, name := range []string{"a", "b"} {
			if _, err := d.add(ctx, node, name); err != nil {
				return err
			}
		}
	}
	for _, p := range slices.Concat([]party{d.outside}, d.hosts, d.pods) {
		if _, err := p.Serve(servicePort); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) addPod(ctx context.Context, node *lab.Node, name string) (party, error) {
	pod, err := node.AddPod(ctx, name, lab.PodOptions{})
	if err != nil {
		return party{}, err
	}
	return d.addParty(pod.Namespace, node, name), nil
}

// addParty has a pod, or a container, take part from now on.
func (d *demo) addParty(in *lab.Namespace, node *lab.Node, name string) party {
	p := party{Namespace: in, name: fmt.Sprintf("n%d/%s", node.Number, name), node: node.Name, pod: true}
	d.pods = append(d.pods, p)
	return p
}

func (d *demo) introduce() {
	for _, family := range lab.FamiliesByName[d.setting.family] {
		d.line("")
		for i, node := range d.lab.Nodes {
			var pods []string
			for _, p := range d.pods {
				if p.node == node.Name {
					pods = append(pods, fmt.Sprintf("%s %s", p.name, p.AddrOf(family)))
				}
			}
			d.line("    %s %s %s %s", pad(d.hosts[i].name, 9), pad(node.Name+" "+node.AddrOf(family).String(), 23), pad(d.networkOf(node, family).String(), 19),
				strings.Join(pods, "   "))
		}
		d.line("    %s %s", pad(d.outside.name, 9), d.outside.AddrOf(family))
	}
}

// networkOf is where a node's pods have their addresses from.
func (d *demo) networkOf(node *lab.Node, family wire.Family) netip.Prefix {
	if d.dockers != nil {
		return d.dockers.subnets[node.Name].Masked()
	}
	return node.PodCIDROf(family)
}

// expect is the source that a receiver has to see: the sender's own address, but the node's for a pod that leaves the
// cluster.
func (d *demo) expect(family wire.Family, from, to party) netip.Addr {
	if d.dockers != nil {
		if seen := d.dockers.seenOf(from, to, d.hostOf(from).AddrOf(family)); seen.IsValid() {
			return seen
		}
		return from.AddrOf(family)
	}
	if from.pod && to.node == "" {
		return d.hostOf(from).AddrOf(family)
	}
	return from.AddrOf(family)
}

// each takes a part of the demo for every family of the cluster.
func (d *demo) each(part func(context.Context, wire.Family) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, family := range lab.FamiliesByName[d.setting.family] {
			if err := part(ctx, family); err != nil {
				return err
			}
		}
		return nil
	}
}

func (d *demo) matrix(ctx context.Context, family wire.Family) error {
	d.heading("Who reached whom" + d.setting.over(family))
	senders := slices.Concat(d.pods, d.hosts)
	receivers := slices.Concat(d.pods, d.hosts, []party{d.outside})
	var all []meeting
	err := d.step("every pod and every host to everybody: ping, TCP, UDP", func() error {
		all = d.meet(ctx, family, senders, receivers)
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	d.line("\n    row to column; a cell's marks are %s", strings.Join(ways[:], ", "))
	d.drawMatrix(senders, receivers, all)
	d.line("")
	d.drawKinds(all)
	return nil
}

func (d *demo) sources(ctx context.Context, family wire.Family) error {
	d.heading("Whom the outside host saw" + d.setting.over(family))
	for _, pod := range d.pods {
		want := d.hostOf(pod).AddrOf(family)
		tcp, tcpErr := pod.TCP(ctx, d.outside.at(family))
		udp, udpErr := pod.UDP(ctx, d.outside.at(family), 512)
		if err := errors.Join(tcpErr, udpErr); err != nil {
			d.check(false, "%s: %v", pod.name, err)
			continue
		}
		d.check(tcp.Addr() == want && udp.Addr() == want, "%s %s came as %s by TCP, %s by UDP",
			pad(pod.name, 5), pad(pod.AddrOf(family).String(), 16), tcp, udp)
	}
	return nil
}

func (d *demo) transfer(ctx context.Context, family wire.Family) error {
	d.heading("100 MB across nodes" + d.setting.over(family))
	from, to := d.pods[0], d.pods[2]
	moved, err := from.Transfer(ctx, to.at(family), bulk)
	if err != nil {
		d.check(false, "%v", err)
		return nil
	}
	d.check(true, "%s to %s, %d bytes in %s (%.1f Gbit/s with checksums at both ends)", from.name, to.name, moved.Bytes, seconds(moved.Took),
		float64(moved.Bytes)*8/moved.Took.Seconds()/1e9)
	d.check(moved.Sent == moved.Received, "SHA-256 sent     %x", moved.Sent)
	d.check(moved.Sent == moved.Received, "SHA-256 received %x", moved.Received)
	return nil
}

// liveWithoutAgent kills an agent, and shows that old connections and new pods do not need it.
func (d *demo) liveWithoutAgent(ctx context.Context) error {
	node := d.lab.Nodes[0]
	d.heading("The agent of " + node.Name + " is killed")
	inside, err := d.connect(ctx, d.pods[2])
	if err != nil {
		return err
	}
	outward, err := d.connect(ctx, d.outside)
	if err != nil {
		return err
	}

	pid := node.AgentPID()
	if err := node.KillAgent(); err != nil {
		return err
	}
	d.check(!node.AgentRunning(), "kill -9 %d", pid)
	for i, family := range lab.FamiliesByName[d.setting.family] {
		d.held(inside[i].Echo(ctx, 4096), "a connection to another node goes on%s", d.setting.over(family))
		d.held(outward[i].Echo(ctx, 4096), "a masqueraded connection goes on%s", d.setting.over(family))
		inside[i].Close()
		outward[i].Close()
	}
	d.statusWhileDead(ctx, node)

	started := time.Now()
	pod, err := d.add(ctx, node, "c")
	d.held(err, "a pod is added without the agent, in %s", seconds(time.Since(started)))
	if err != nil {
		return nil
	}
	if _, err := pod.Serve(servicePort); err != nil {
		return err
	}
	others := []party{d.pods[0], d.pods[2], d.hosts[0], d.hosts[1]}
	one, receivers := []party{pod}, append(others, d.outside)
	for _, family := range lab.FamiliesByName[d.setting.family] {
		d.line("    it reaches%s", d.setting.over(family))
		d.drawMatrix(one, receivers, d.meet(ctx, family, one, receivers))
		d.line("    and is reached by")
		d.drawMatrix(others, one, d.meet(ctx, family, others, one))
	}
	return nil
}

// connect opens a connection of each family from the first pod to somebody.
func (d *demo) connect(ctx context.Context, to party) (all []*lab.TCPConn, err error) {
	for _, family := range lab.FamiliesByName[d.setting.family] {
		conn, err := d.pods[0].DialTCP(ctx, to.at(family), 0)
		if err != nil {
			return nil, err
		}
		all = append(all, conn)
	}
	return all, nil
}

// held is a check whose failure has an error to show.
func (d *demo) held(err error, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if err != nil {
		text += ": " + err.Error()
	}
	d.check(err == nil, "%s", text)
}

// statusWhileDead: status must end with 1 and say that the agent is not there.
func (d *demo) statusWhileDead(ctx context.Context, node *lab.Node) {
	_, err := node.Ebpfctl(ctx, "status")
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		d.check(false, "ebpfctl status says that something is wrong: %v, want exit status 1", err)
		return
	}
	d.check(exit.ExitCode() == 1, "ebpfctl status says that something is wrong (exit status %d)", exit.ExitCode())
}

// inspect brings the agent back and shows what ebpfctl shows.
func (d *demo) inspect(ctx context.Context) error {
	node := d.lab.Nodes[0]
	d.heading("The agent comes back")
	err := d.step("started, ready, the pod added meanwhile is its own", func() error {
		if err := node.StartAgent(); err != nil {
			return err
		}
		return node.WaitReady(ctx)
	})
	if err != nil {
		return err
	}
	d.heading("ebpfctl status")
	out, err := node.Ebpfctl(ctx, "status")
	d.quote(string(out), 60)
	d.held(err, "status 0")
	for _, table := range dumps {
		d.heading("ebpfctl dump " + table)
		out, err := node.Ebpfctl(ctx, "dump", table)
		d.quote(string(out), 11)
		if err != nil {
			d.held(err, "dump %s", table)
		}
	}
	d.heading("Drops")
	d.held(d.lab.UnexpectedDrops(), "no packet was dropped that should have passed")
	return nil
}

// dumps are the tables shown, in the order in which they explain each other.
var dumps = []string{"endpoints", "devices", "destinations", "uplinks", "snat", "snat_reverse", "conntrack", "fragments", "drops", "traffic", "config", "ipam"}

// leave ends the cluster, or says how to use it.
func (d *demo) leave(ctx context.Context) {
	if d.failed > 0 && !interrupted(ctx) {
		d.heading("What the nodes say")
		d.lab.Diagnose(context.WithoutCancel(ctx), d.env.stdout)
	}
	if d.keep {
		d.held(d.lab.Keep(), "the cluster runs on")
		d.explain()
		return
	}
	d.heading("Cleaning up")
	id := d.lab.ID
	err := d.step("processes, namespaces, mounts, pins, files", d.lab.Close)
	if err != nil {
		d.line("  %s", d.paint(red, err.Error()))
		return
	}
	left, err := lab.Remains(id)
	d.check(err == nil && len(left) == 0, "nothing is left %s", strings.Join(left, ", "))
}
