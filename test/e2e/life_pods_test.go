package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// killedBefore says before which step of ADD, counted from 1, the plugin of these tests kills itself.
const killedBefore = "LIFE_KILLED_BEFORE"

// pluginThatDies is the plugin with a hook in its steps.
const pluginThatDies = `package cni

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

func dieAtStep() func(string) error {
	left, err := strconv.Atoi(os.Getenv("LIFE_KILLED_BEFORE"))
	return func(string) error {
		if left--; err == nil && left == 0 {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
		return nil
	}
}
`

// buildDyingPlugin makes a directory with the product's programs, in which the plugin is the one that dies.
func buildDyingPlugin(t *testing.T) string {
	t.Helper()
	dir := build(t, []edit{{"cni/plugin.go", [][2]string{{"hostPortWait: hostPortWait}", "hostPortWait: hostPortWait, step: dieAtStep()}"}}}},
		map[string]string{"cni/step.go": pluginThatDies}, "ebpf-cni")
	bin := os.Getenv("EBPF_CNI_BIN")
	if bin == "" {
		bin = filepath.Join(product, "bin")
	}
	for _, program := range []string{"ebpf-agent", "ebpfctl"} {
		if err := copyFile(filepath.Join(bin, program), filepath.Join(dir, program)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func copyFile(from, to string) error {
	program, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, program, 0o755) //nolint:gosec // it is run
}

// The plugin is killed before each step of ADD. Whoever cleans up afterwards, DEL, GC or, when neither comes, the agent,
// leaves nothing of it; and what lives beside it is not touched. The short form has the agent alone: in it cni's
// TestKilledAddLeavesNothing has DEL and GC.
func TestLifePluginKilledAtEveryStep(t *testing.T) {
	l := startCluster(t, lab.Options{Nodes: 1, BinDir: buildDyingPlugin(t), AgentFlags: []string{"--address-quarantine=0"}})
	node := l.Nodes[0]
	neighbour := addPod(t, node, "neighbour")
	stream := startNumbered(t, "neighbour > outside", neighbour.Namespace, l.Outside)
	before := inventory(t, node)
	cleaners := []string{"agent"}
	if priv.Long() {
		cleaners = []string{"DEL", "GC", "agent"}
	}
	for _, by := range cleaners {
		t.Run(by, func(t *testing.T) {
			var killed []*lab.Pod
			for step := 1; ; step++ {
				pod := addKilled(t, node, fmt.Sprintf("%s%d", strings.ToLower(by), step), step)
				if pod == nil { // there are no more steps
					if step < 8 {
						t.Errorf("ADD has %d steps: this shows little", step-1)
					}
					break
				}
				killed = append(killed, pod)
				cleanUpAfter(t, by, pod, neighbour)
				if by != "agent" {
					assertUnchanged(t, before, node, fmt.Sprintf("killed before step %d", step))
				}
			}
			if by == "agent" {
				cleanUpByAgent(t, node, killed, before)
			}
		})
	}
	// A store file that was made and never written, which no DEL can name.
	empty := filepath.Join(node.StateDir(), "ipam", "ebpf-cni", "10.244.0.200")
	nobody, err := node.NewPod("nobody", lab.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for by, cleanUp := range map[string]func() error{
		"DEL": func() error { return nobody.Del(t.Context()) },
		"GC":  func() error { return node.GC(t.Context(), neighbour) },
	} {
		if err := os.WriteFile(empty, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := cleanUp(); err != nil {
			t.Error(err)
		}
		assertUnchanged(t, before, node, "an empty store file, after a "+by)
	}
	stream.end(t)
}

// addKilled calls ADD with a plugin that dies before a step; nil when there is no such step, and the pod is gone again.
func addKilled(t *testing.T, node *lab.Node, name string, step int) *lab.Pod {
	t.Helper()
	pod, err := node.NewPod(name, lab.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.PluginEnv = []string{fmt.Sprintf("%s=%d", killedBefore, step)}
	err = pod.Add(t.Context())
	node.PluginEnv = nil
	if err == nil {
		if err := node.DelPod(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		return nil
	}
	if !strings.Contains(err.Error(), "killed") {
		t.Fatalf("step %d: %v, want a plugin that was killed", step, err)
	}
	return pod
}

func cleanUpAfter(t *testing.T, by string, pod, neighbour *lab.Pod) {
	t.Helper()
	var err error
	switch by {
	case "DEL":
		err = pod.Del(t.Context())
	case "GC":
		err = pod.Node.GC(t.Context(), neighbour)
	}
	if err == nil {
		err = pod.Node.LosePod(pod)
	}
	if err != nil {
		t.Error(err)
	}
}

// cleanUpByAgent waits for the agent to find out by itself. It searches at once when it starts, and then now and then.
func cleanUpByAgent(t *testing.T, node *lab.Node, killed []*lab.Pod, before lab.Snapshot) {
	t.Helper()
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	var diff string
	for deadline := time.Now().Add(orphanLimit); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if diff = cmp.Diff(before, inventory(t, node)); diff == "" {
			return
		}
	}
	t.Errorf("of %d ADDs that were killed the agent has left after %v:\n%s", len(killed), orphanLimit, diff)
}

// orphanLimit is time enough for the agent to see something twice.
const orphanLimit = 45 * time.Second

func assertUnchanged(t *testing.T, before lab.Snapshot, node *lab.Node, when string) {
	t.Helper()
	var diff string
	for range 200 { // the kernel ends a namespace, and the links in it, a little later
		if diff = cmp.Diff(before, inventory(t, node)); diff == "" {
			return
		}
		time.Sleep(25 * time.Millisecond)
	}
	t.Errorf("%s: left behind (+) or lost (-):\n%s", when, diff)
}

// A pod whose DEL never comes is released, and its address is free; one whose link is gone while it lives itself is not.
func TestLifeLostDel(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	crippled, lost := addPod(t, node, "crippled"), addPod(t, node, "lost")
	if err := deleteLink(crippled); err != nil {
		t.Fatal(err)
	}
	address := lost.Addr()
	if err := node.LosePod(lost); err != nil {
		t.Fatal(err)
	}
	id := func(pod *lab.Pod) endpoint.ID { return endpoint.ID{ContainerID: pod.ContainerID, IfName: pod.IfName} }
	eventually(t, orphanLimit, "the agent releases the pod whose DEL never came", func() bool {
		_, err := endpoint.Read(node.StateDir(), id(lost))
		return errors.Is(err, os.ErrNotExist)
	})
	if _, err := endpoint.Read(node.StateDir(), id(crippled)); err != nil {
		t.Errorf("a pod that lives was released because its link is gone: %v", err)
	}
	if err := crippled.Check(t.Context()); err == nil {
		t.Error("CHECK of a pod without its link: no error")
	}
	if !strings.Contains(node.LogTail(50), crippled.ContainerID) {
		t.Error("the log does not name the pod whose link is gone")
	}
	heir, err := node.AddPod(t.Context(), "heir", lab.PodOptions{IP: address})
	if err != nil {
		t.Fatal(err)
	}
	assertReaches(t, heir.Namespace, serve(t, l.Outside), node.Addr())
	for _, pod := range []*lab.Pod{heir, crippled} {
		if err := node.DelPod(t.Context(), pod); err != nil {
			t.Error(err)
		}
	}
	for _, line := range inventory(t, node) {
		if strings.HasPrefix(line, "map endpoints") || strings.HasPrefix(line, "map devices") || strings.Contains(line, "/endpoints/"+lost.ContainerID) {
			t.Errorf("still there: %s", line)
		}
	}
}

func deleteLink(pod *lab.Pod) error {
	l, err := pod.Netlink().LinkByName(pod.IfName)
	if err != nil {
		return err
	}
	return pod.Netlink().LinkDel(l)
}

// Without the agent pods come, are looked at and go. Without its pins none comes, the runtime is told to try again, and
// those that were there still go.
func TestLifeWithoutAgentAndWithoutPins(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	dir := bpffs.Dir(node.BPFFS())
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	pod := addPod(t, node, "a")
	if err := errors.Join(pod.Check(t.Context()), node.Status(t.Context())); err != nil {
		t.Errorf("with the agent dead: %v", err)
	}
	assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
	before := inventory(t, node)
	for name, missing := range map[string]string{
		"program": dir.Program("ec_from_pod"), "map": dir.Map("endpoints"), "configuration": dir.Map("config"),
	} {
		away := missing + "_away"
		if err := os.Rename(missing, away); err != nil {
			t.Fatal(err)
		}
		_, err := node.AddPod(t.Context(), "refused-"+name, lab.PodOptions{})
		assertCode(t, "ADD without a pinned "+name, err, types.ErrTryAgainLater, missing)
		assertCode(t, "STATUS without a pinned "+name, node.Status(t.Context()), types.ErrPluginNotAvailable, missing)
		if err := os.Rename(away, missing); err != nil {
			t.Fatal(err)
		}
		assertUnchanged(t, before, node, "an ADD that was refused")
	}
	for _, sub := range []string{dir.Maps(), dir.Programs(), dir.Links()} {
		if err := os.RemoveAll(sub); err != nil {
			t.Fatal(err)
		}
	}
	assertCode(t, "STATUS without any pins", node.Status(t.Context()), types.ErrPluginNotAvailable, node.BPFFS())
	if err := node.DelPod(t.Context(), pod); err != nil {
		t.Errorf("DEL without any pins: %v", err)
	}
	for _, line := range inventory(t, node) {
		if strings.Contains(line, pod.ContainerID) || strings.Contains(line, pod.Result.Interfaces[0].Name) || strings.Contains(line, " "+pod.Addr().String()) {
			t.Errorf("still there: %s", line)
		}
	}
}

func assertCode(t *testing.T, what string, err error, code uint, words ...string) {
	t.Helper()
	var said *types.Error
	if !errors.As(err, &said) || said.Code != code {
		t.Errorf("%s: %v, want error code %d", what, err, code)
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v does not name %s", what, err, word)
		}
	}
}

// After a reboot the runtime must not take the list of before for a node that can carry pods.
func TestLifeRebootTakesTheListAway(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	// A new namespace has what the machine has, a reboot takes it away: what the agent finds must be the same both times.
	if err := resetSysctls(node); err != nil {
		t.Fatal(err)
	}
	startAgents(t, l)
	fresh := inventory(t, node)
	var given []netip.Addr
	for _, name := range []string{"a", "b", "c"} {
		pod := addPod(t, node, name)
		assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
		given = append(given, pod.Addr())
	}
	if err := node.KillAgent(); err != nil {
		t.Fatal(err)
	}
	assertNoDrops(t, l)
	// What else a reboot takes away.
	if err := errors.Join(node.Reboot(), flushOurRoutes(node), resetSysctls(node)); err != nil {
		t.Fatal(err)
	}
	specs := l.NodeSpecs()
	stranger := specs[0]
	stranger.Name = "k8s-other"
	stranger.PodCIDRs, stranger.InternalIPs = nil, []netip.Addr{netip.MustParseAddr("172.18.0.77")}
	if err := l.WriteNodes(stranger); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(node.Conflist()); err != nil {
		t.Fatalf("the list must be left over for this test: %v", err)
	}
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	assertNotReady(t, node, "no Node "+node.Name+" in the list")
	if err := l.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	assertUnchanged(t, fresh, node, "after the reboot")
	pod := addPod(t, node, "again")
	if pod.Addr() != given[0] {
		t.Errorf("the first pod after the reboot has %s, want %s as the first one ever", pod.Addr(), given[0])
	}
	assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
}

// atBoot are the settings of a host that the agent changes, as the kernel begins with them.
var atBoot = map[string]string{
	"net/ipv4/ip_forward": "0", "net/ipv4/ip_local_reserved_ports": "\n",
	"net/ipv6/conf/all/forwarding": "0", "net/ipv6/conf/" + lab.Uplink + "/accept_ra": "1",
}

// resetSysctls makes a node's settings what they are after a boot.
func resetSysctls(node *lab.Node) (err error) {
	for name, value := range atBoot {
		err = errors.Join(err, node.WriteSysctl(name, value))
	}
	return err
}

// flushOurRoutes deletes the routes of our own protocol number; those of pods go by themselves at the same time.
func flushOurRoutes(node *lab.Node) error {
	ours := &netlink.Route{Protocol: routeProtocol}
	routes, err := node.Netlink().RouteListFiltered(netlink.FAMILY_ALL, ours, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return err
	}
	for _, route := range routes {
		if err := node.Netlink().RouteDel(&route); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}
