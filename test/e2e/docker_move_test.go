package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// dockerNode is a node without Kubernetes: containers are Docker's, and either flanneld or our agent leases its subnet.
type dockerNode struct {
	*lab.Node
	registry *registered
	flanneld *lab.Program
	docker   *lab.Docker
	// options are those of its dockerd, beside what the subnet file says.
	options []string
}

// startDockerBesideFlannel starts flanneld, and a dockerd that has its bridge by what flanneld says.
func (r *registered) startDockerBesideFlannel(t *testing.T, node *lab.Node, options ...string) *dockerNode {
	t.Helper()
	node.Bridged = true
	d := &dockerNode{Node: node, registry: r, flanneld: r.startFlanneld(t, node), options: options}
	d.docker = startDocker(t, node, d.dockerOptions(t)...)
	return d
}

func (d *dockerNode) dockerOptions(t *testing.T) []string {
	t.Helper()
	options, err := d.DockerOptions(t.Context())
	must(t, err)
	return append(options, d.options...)
}

// do does what a line of the page does on a node: what systemd or files of the machine's would have to do with, as a lab does it.
func (d *dockerNode) do(t *testing.T, line string) {
	t.Helper()
	line, _, _ = strings.Cut(line, " #")
	switch line = strings.TrimSpace(line); line {
	case "systemctl disable --now flanneld":
		must(t, d.flanneld.Stop())
	case "systemctl enable --now flanneld":
		d.flanneld = d.registry.startFlanneld(t, d.Node)
	case "systemctl enable --now ebpf-agent":
		d.registry.startOurs(t, d.Node)
	case "systemctl disable --now ebpf-agent":
		_, err := d.StopAgent()
		must(t, err)
	case "ebpf-agent cleanup":
		agent, err := d.AgentPath()
		must(t, err)
		_, err = d.Exec(t.Context(), agent, cleanupOf(d.Node)...)
		must(t, err)
	case "rm /etc/systemd/system/docker.service.d/ebpf-cni.conf && systemctl daemon-reload":
	case "systemctl restart docker":
		must(t, d.docker.Restart(t.Context(), d.dockerOptions(t)...))
	default:
		if !strings.HasPrefix(line, "iptables ") && !strings.HasPrefix(line, "ip link ") {
			t.Fatalf("the page says %q, of which this test does not know what it does to a lab", line)
		}
		_, err := d.Exec(t.Context(), "sh", "-ec", line)
		must(t, err)
	}
}

// dockerPage are the blocks of commands of the page's section about the move from flannel.
func dockerPage(t *testing.T) (blocks [][]string) {
	t.Helper()
	root, err := lab.Checkout()
	must(t, err)
	text, err := os.ReadFile(filepath.Join(root, "tools/deploy/docker.md"))
	must(t, err)
	_, section, _ := strings.Cut(string(text), "\n## From flannel, node by node\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for i, block := range strings.Split(section, "```\n") {
		if i%2 == 1 {
			blocks = append(blocks, strings.Split(strings.TrimSpace(block), "\n"))
		}
	}
	return blocks
}

// Nodes with Docker are moved from flanneld as the page says, line by line: one whose containers outlive Docker, and one whose don't.
// Both talk on with the other one all the way, and one goes back.
func TestMoveDockerFromFlannel(t *testing.T) {
	t.Parallel()
	page := dockerPage(t)
	if len(page) != 3 {
		t.Fatalf("the page has %d blocks of commands about the move, want three: the move, flannel's rules, the way back", len(page))
	}
	r := startRegistered(t, lab.Options{Nodes: 2, AgentFlags: []string{"--attach-bridge=" + theBridge}}, backends["vxlan"])
	living := r.startDockerBesideFlannel(t, r.Nodes[0], "--live-restore")
	ending := r.startDockerBesideFlannel(t, r.Nodes[1])
	one, two := runContainer(t, living.docker, "one"), runContainer(t, ending.docker, "two")
	meet(t, one, two)
	world := serve(t, r.Outside)
	old, err := one.DialTCP(t.Context(), serve(t, two), 0)
	must(t, err)
	defer old.Close()
	goesOn := func(after string) {
		t.Helper()
		if err := old.Echo(within(t, readyLimit), 10_000); err != nil {
			t.Errorf("a connection between containers, after %s: %v", after, err)
		}
	}

	for _, line := range page[0] {
		if strings.HasPrefix(line, "systemctl restart") { // which may be put off
			goesOn("the agent's start")
			meet(t, one, two)
		}
		living.do(t, line)
	}
	goesOn("Docker's restart")
	next := runContainer(t, living.docker, "next")
	meet(t, one, next, two)
	living.forgetFlannelsRules(t, page[1])
	assertReached(t, one, world, living.Addr())

	for _, line := range page[0] {
		ending.do(t, line)
	}
	ending.forgetFlannelsRules(t, page[1])
	must(t, ending.docker.Remove(t.Context(), "two", two)) // its process has ended with Docker
	two = runContainer(t, ending.docker, "two")
	meet(t, one, two)
	for _, from := range []*lab.Namespace{one, next} {
		assertReached(t, from, world, living.Addr())
	}
	assertReached(t, two, world, ending.Addr())

	for _, line := range page[2] {
		living.do(t, line)
	}
	meet(t, one, two)
	assertReached(t, one, world, living.Addr())
	left, err := living.Snapshot()
	must(t, err)
	if ours := left.Only("tcx", "filter"); len(ours) > 0 {
		t.Errorf("after the way back there is of ours:\n%s", strings.Join(ours, "\n"))
	}
}

// forgetFlannelsRules does what the page says about rules by which flanneld has masqueraded.
func (d *dockerNode) forgetFlannelsRules(t *testing.T, lines []string) {
	t.Helper()
	for _, line := range lines {
		d.do(t, line)
	}
	rules, err := d.Exec(t.Context(), "iptables", "-t", "nat", "-S")
	must(t, err)
	if strings.Contains(strings.ToLower(string(rules)), "flannel") {
		t.Errorf("%s still has rules of flannel's:\n%s", d.Name, rules)
	}
}
