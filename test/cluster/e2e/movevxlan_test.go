package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// What tools/deploy/flannel.md says besides about flannel's backend vxlan.
const (
	routeDirectly = `kubectl -n kube-flannel get configmap kube-flannel-cfg -o yaml | sed 's/"Type": "vxlan"/"Type": "vxlan", "DirectRouting": true/' | kubectl apply -f -`
	forgetTunnel  = "ip link delete flannel.1"
)

// A cluster with flannel's backend vxlan is moved as its page says: the first node while pods of moved nodes and of others
// don't talk, the second after flannel has been told to route directly, the third when no two nodes share a link any more.
func testMoveFromFlannel(t *testing.T) {
	s := site(t, cluster.Options{Nodes: 3})
	isInPage(t, "flannel.md", append([]string{
		chooseNodes, keepFlannel, chosen, routeDirectly, startAgain, drain, hand, forgetFlannel, forgetTunnel, uncordon, unchoose,
	}, onSpot...)...)
	first, second, third := s.Nodes[0], s.Nodes[1], s.Nodes[2]
	runFlannel(t, s, "vxlan")
	a, b, c := addPod(t, s, "a", first), addPod(t, s, "b", second), addPod(t, s, "c", third)
	meet(t, s, a, b, c)
	divide(t, s)

	undisturbedBetween(t, s, a, b, func() { move(t, s, third, tunnelByHand) })
	c = addPod(t, s, "c2", third)
	meet(t, s, a, b)
	// What c sends arrives; the answers go to flannel's port on a node where nobody has it any more.
	apart(t, a, c, third)
	apart(t, c, a, third)
	sees(t, c, at(s.World(), cluster.HTTPPort), third.Addr)

	tr := startTraffic(t, pathTo("b", a, b.Addr), pathTo("a", b, a.Addr))
	shell(t, s, routeDirectly)
	restartFlannel(t, s, startAgain, first, second)
	hasNothing(t, "ip route show dev flannel.1", first, second)
	tr.end(t)
	meet(t, s, a, b, c)
	meetAtLength(t, a, c)

	undisturbedBetween(t, s, a, c, func() { move(t, s, second, reboot) })
	b = addPod(t, s, "b2", second)
	meet(t, s, a, b, c)
	hasMTU(t, 1450, a)
	hasMTU(t, 1500, b, c)

	unlink(t, s)
	restartFlannel(t, s, startAgain, first)
	byTunnel(t, s, 2, second, third)
	meet(t, s, b, c)
	meetAtLength(t, b, c)
	apart(t, a, c, third)
	apart(t, c, a, first)
	// To pods of moved nodes the other nodes themselves are behind the tunnel, too, but not the other way round.
	reachesKubelet(t, c, first, false)
	reachesKubelet(t, a, third, true)

	undisturbedBetween(t, s, b, c, func() { move(t, s, first, tunnelByHand) })
	reachesKubelet(t, c, first, true)
	a = addPod(t, s, "a2", first)
	hasMTU(t, 1450, a)
	undisturbedBetween(t, s, a, c, func() { endDivision(t, s) })
	byTunnel(t, s, 2, s.Nodes...)
	meet(t, s, a, b, c)
	noFlannel(t, s)
}

// tunnelByHand does what a reboot does where flannel has a tunnel. The agent beside it says what it waits for.
func tunnelByHand(t *testing.T, s *standing, node *cluster.Machine) {
	t.Helper()
	err := cluster.Poll(within(t, time.Minute), "the agent on "+node.Name+" says what is left of flannel", func(ctx context.Context) error {
		status, err := ebpfctl(ctx, s.Cluster, node, "status")
		for _, what := range []string{"not ready", "flannel.1 has 10.244.", "cni0 has 10.244."} {
			if !strings.Contains(status, what) {
				return fmt.Errorf("%w: no %q in\n%s", err, what, status)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := node.Run(within(t, stepLimit), "sh", "-ec", forgetTunnel); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	byHand(t, s, node)
}

// unlink takes the nodes off their common link: each has an address by itself, and the fabric as its router.
func unlink(t *testing.T, s *standing) {
	t.Helper()
	run := func(m *cluster.Machine, script string) {
		if out, err := m.Run(within(t, stepLimit), "sh", "-ec", script); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	run(s.Fabric, "echo 1 > /proc/sys/net/ipv4/ip_forward; for f in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 > $f; done")
	for _, node := range s.Nodes {
		run(node, strings.NewReplacer("OWN", node.Addr.String(), "ROUTER", s.Fabric.Addr.String()).Replace(
			"ip address add OWN/32 dev eth0; ip route add ROUTER dev eth0 src OWN; ip address delete OWN/16 dev eth0"))
	}
}

// hasNothing waits until a command has nothing to say any more.
func hasNothing(t *testing.T, command string, nodes ...*cluster.Machine) {
	t.Helper()
	for _, node := range nodes {
		err := cluster.Poll(within(t, time.Minute), command+" has nothing to say on "+node.Name, func(ctx context.Context) error {
			out, err := node.Run(ctx, "sh", "-ec", command)
			if err == nil && out != "" {
				err = fmt.Errorf("it says %s", out)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// byTunnel waits until nodes reach so many others by the tunnel.
func byTunnel(t *testing.T, s *standing, others int, nodes ...*cluster.Machine) {
	t.Helper()
	for _, node := range nodes {
		err := cluster.Poll(within(t, time.Minute), node.Name+" has a tunnel", func(ctx context.Context) error {
			status, err := ebpfctl(ctx, s.Cluster, node, "status")
			if want := fmt.Sprintf("%d tunnel\n", others); err == nil && !strings.Contains(status, want) {
				err = fmt.Errorf("no %q in\n%s", want, status)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// apart checks that a pod gets no answer from another one, and that what comes of it to a node finds nobody on its port there.
func apart(t *testing.T, from, to *cluster.Pod, node *cluster.Machine) {
	t.Helper()
	before := datagramsForNobody(t, node)
	mustNotReach(t, from.Name+" to "+to.Name, from, pathTo(to.Name, from, to.Addr).to)
	if datagramsForNobody(t, node) == before {
		t.Errorf("%s to %s: nothing came to a port of %s that nobody has", from.Name, to.Name, node.Name)
	}
}

// reachesKubelet checks whether a pod reaches the kubelet of a node, or nothing comes back.
func reachesKubelet(t *testing.T, from *cluster.Pod, node *cluster.Machine, want bool) {
	t.Helper()
	conn, err := from.Dial(within(t, silent), "tcp", at(node.Addr, 10250))
	if err == nil {
		conn.Close()
	}
	silence := errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
	if want && err != nil || !want && !silence {
		t.Errorf("%s to the kubelet of %s: %v", from.Name, node.Name, err)
	}
}

// datagramsForNobody counts what a node has got for UDP ports without a socket.
func datagramsForNobody(t *testing.T, node *cluster.Machine) int {
	t.Helper()
	out, err := node.Run(t.Context(), "sh", "-ec", "awk '/^Udp: [0-9]/ {print $3}' /proc/net/snmp")
	if err != nil {
		t.Fatal(err)
	}
	count, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		t.Fatal(err)
	}
	return count
}

// meetAtLength has two pods exchange more than one packet holds.
func meetAtLength(t *testing.T, a, b *cluster.Pod) {
	t.Helper()
	message := strings.Repeat("x", 20_000)
	for _, way := range [][2]*cluster.Pod{{a, b}, {b, a}} {
		if err := connectAnew(t.Context(), way[0], at(way[1].Addr, cluster.HTTPPort), message); err != nil {
			t.Errorf("%s to %s at length: %.200v", way[0].Name, way[1].Name, err)
		}
	}
}

func hasMTU(t *testing.T, want int, pods ...*cluster.Pod) {
	t.Helper()
	for _, pod := range pods {
		err := pod.Do(func() error {
			link, err := net.InterfaceByName("eth0")
			if err == nil && link.MTU != want {
				err = fmt.Errorf("the MTU is %d, want %d", link.MTU, want)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", pod.Name, err)
		}
	}
}
