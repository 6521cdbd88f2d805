package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// dump reads a table as ebpfctl prints it.
func dump(t *testing.T, node *lab.Node, table string) []map[string]any {
	t.Helper()
	raw, err := node.Ebpfctl(t.Context(), "dump", table, "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var rows []map[string]any
	if err := json.Unmarshal(raw, &rows); err != nil {
		t.Fatalf("dump of %s: %v\n%s", table, err, raw)
	}
	return rows
}

// kernelsOwn are lines about addresses that the kernel gives to interfaces by itself, after a while.
var kernelsOwn = []string{"fe80:", "ff00:"}

// networkAndFiles is what stands on a node but for sysctls, for what the kernel adds by itself, and for what rests there.
func networkAndFiles(t *testing.T, node *lab.Node) lab.Snapshot {
	t.Helper()
	snapshot, err := node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.Only("link", "address", "route", "rule", "neighbour", "qdisc", "filter", "tcx", "file").
		Without(append(kernelsOwn, "/quarantine.", "/last_reserved_ip")...)
}

// footprint is all that pods may leave behind on a node: network, files, map entries. Resting addresses, and where the
// search for the next one begins, are meant to stay; which of the qdiscs are ours is a note that changes with them.
func footprint(t *testing.T, node *lab.Node) lab.Snapshot {
	t.Helper()
	lines := networkAndFiles(t, node).Without("/state/qdiscs")
	for _, table := range []string{"endpoints", "devices", "hostports"} {
		for _, row := range dump(t, node, table) {
			for _, counter := range []string{"packets", "bytes", "snat_flows", "conntrack_flows"} {
				delete(row, counter)
			}
			lines = append(lines, fmt.Sprintf("map %s %v", table, row))
		}
	}
	return lines
}

// TestHundredPodsLeaveNothing adds all of them at once, as on a node that comes back: each gets an address of each family that
// no other has, reaches the next, and is reached by a port of the node. In its long form there are two hundred.
func TestHundredPodsLeaveNothing(t *testing.T) {
	t.Parallel()
	const atOnce, firstPort = 10, 20000
	pods := 100
	if priv.Long() {
		pods = 200
	}
	l := startCluster(t, lab.Options{Nodes: 1, Families: families})
	node := l.Nodes[0]
	// The first pod of a node may make what stays for all.
	first := addHosted(t, node, "first", ports(firstPort, both)...)
	reaches(t, l.Outside, netip.AddrPortFrom(node.Addr(), firstPort))
	if err := node.DelPod(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	before := lookAt(func() lab.Snapshot { return footprint(t, node) })

	var mu sync.Mutex
	owners, behind := map[netip.Addr]string{}, map[uint16]*lab.Pod{}
	work, ctx := errgroup.WithContext(t.Context())
	started := time.Now()
	for i := range pods {
		work.Go(func() error {
			pod, err := node.AddPod(ctx, fmt.Sprintf("p%d", i), lab.PodOptions{HostPorts: ports(firstPort+uint16(i), both)})
			if err != nil {
				return err
			}
			if _, err := pod.Serve(webPort); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			for _, addr := range pod.Addrs() {
				if other, taken := owners[addr]; taken {
					return fmt.Errorf("%s was given to %s and %s", addr, other, pod.Name)
				}
				owners[addr] = pod.Name
			}
			behind[firstPort+uint16(i)] = pod
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d pods added at once in %s", pods, time.Since(started))
	if got, want := len(dump(t, node, "endpoints")), pods*len(families); got != want || len(owners) != want {
		t.Errorf("%d endpoints, %d addresses, want %d", got, len(owners), want)
	}
	all := node.Pods()
	for i, pod := range all {
		for _, family := range families {
			assertReaches(t, pod.Namespace, serveOver(t, all[(i+1)%pods].Namespace, family), pod.AddrOf(family))
		}
	}
	for port, pod := range behind {
		for _, family := range families {
			by, err := l.Outside.AskUDP(within(t, answerLimit), netip.AddrPortFrom(node.AddrOf(family), port))
			if want := pod.Endpoint(family, webPort).At; err != nil || by != want {
				t.Errorf("port %d of the node is answered by %s, want %s; %v", port, by, want, err)
			}
		}
	}

	work, ctx = errgroup.WithContext(t.Context())
	work.SetLimit(atOnce)
	for _, pod := range all {
		work.Go(func() error { return errors.Join(pod.Check(ctx), node.DelPod(ctx, pod)) })
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	// The agent lets go of their ports when it looks next.
	before.assertBack(t, repairPromise, "what stands without pods")
}

// On a machine whose kernel is busy making and ending other network namespaces, as a node with many pods is.
func TestFirstPacketOfAPodArrives(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	ctx, stop := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	for range 2 {
		busy.Go(func() {
			for ctx.Err() == nil {
				other, err := lab.New(ctx, lab.Options{Nodes: 4})
				if err == nil {
					err = other.Close()
				}
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	defer busy.Wait()
	defer stop()
	for i := range 20 {
		pod := addPod(t, l.Nodes[0], fmt.Sprintf("p%d", i))
		if _, err := pod.Ping(t.Context(), lab.OutsideAddr[wire.FamilyOf(pod.Addr())], lab.PingOptions{}); err != nil {
			t.Error(err)
		}
	}
}

func TestSecondAgentRefuses(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	path, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	_, err = node.Exec(within(t, 5*time.Second), path, node.AgentArgs("--listen=127.0.0.1:9999")...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("a second agent on the same directories: %v, want exit status 1", err)
	}
	if !node.AgentRunning() {
		t.Error("the first agent has ended")
	}
	assertReaches(t, addPod(t, node, "a").Namespace, serve(t, l.Outside), node.Addr())
}

func TestCleanupLeavesTheNodeAsItWas(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, func(t *testing.T, attach string) {
		l := lab.ForTest(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		before, err := node.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		startAgents(t, l)
		pod := addHosted(t, node, "a", ports(anyPort, both)...)
		assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
		reaches(t, l.Outside, netip.AddrPortFrom(node.Addr(), anyPort))

		path, err := node.AgentPath()
		if err != nil {
			t.Fatal(err)
		}
		cleanup := cleanupOf(node)
		if _, err := node.Exec(t.Context(), path, cleanup...); err == nil {
			t.Error("cleanup while the agent runs: no error")
		}
		assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())
		if _, err := node.StopAgent(); err != nil {
			t.Fatal(err)
		}
		assertNoDrops(t, l)
		if _, err := node.Exec(t.Context(), path, cleanup...); err != nil {
			t.Fatal(err)
		}
		after, err := node.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before.Without(kernelsOwn...), afterForwarding(before, after).Without(kernelsOwn...)); diff != "" {
			t.Errorf("cleanup left a difference:\n%s", diff)
		}
		if links, err := pod.Links(); err != nil || slices.Contains(links, pod.IfName) {
			t.Errorf("the pod still has the links %q; error %v", links, err)
		}
	})
}

func TestCleanupRemovesTheTunnelsRules(t *testing.T) {
	t.Parallel()
	l := startCluster(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	if rules := ruleset(t, node); !strings.Contains(rules, "table "+netfilters[firstFamily(l)].nft+" ebpf-cni") {
		t.Errorf("there are no rules to clean up:\n%s", rules)
	}
	path, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := node.StopAgent(); err != nil {
		t.Fatal(err)
	}
	if _, err := node.Exec(t.Context(), path, cleanupOf(node)...); err != nil {
		t.Fatal(err)
	}
	if rules := ruleset(t, node); rules != "" {
		t.Errorf("cleanup left rules:\n%s", rules)
	}
}

// cleanupOf are the arguments with which the agent leaves a node.
func cleanupOf(node *lab.Node) []string {
	return []string{
		"cleanup", "--bpffs=" + node.BPFFS(), "--state-dir=" + node.StateDir(), "--cni-conf-dir=" + node.ConfDir(), "--cni-bin-dir=" + node.CNIBinDir(),
	}
}

// ruleset is what nftables has on a node.
func ruleset(t *testing.T, node *lab.Node) string {
	t.Helper()
	out, err := node.Exec(t.Context(), "nft", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// afterForwarding puts back in a snapshot what turning ip_forward on changes along with it, and what cleanup is to leave:
// the switch itself, per interface too, and redirects, which a router does not accept.
func afterForwarding(before, after lab.Snapshot) lab.Snapshot {
	var out lab.Snapshot
	for _, line := range after {
		name, _, _ := strings.Cut(line, " = ")
		kernels := strings.HasPrefix(name, "sysctl net/ipv4/") &&
			(strings.HasSuffix(name, "/ip_forward") || strings.HasSuffix(name, "/forwarding") || strings.HasSuffix(name, "/accept_redirects"))
		if kernels {
			was := slices.IndexFunc(before, func(have string) bool { return strings.HasPrefix(have, name+" = ") })
			if was >= 0 {
				line = before[was]
			}
		}
		out = append(out, line)
	}
	return out
}

func TestWhatIsRemovedComesBack(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		l := startCluster(t, lab.Options{Nodes: 2, AgentFlags: []string{attach}})
		node := l.Nodes[0]
		addPod(t, node, "a")
		before := lookAt(func() lab.Snapshot { return footprint(t, node) })
		conflist, err := os.ReadFile(node.Conflist())
		if err != nil {
			t.Fatal(err)
		}
		for _, damage := range []struct {
			name string
			do   func() error
		}{
			{"the list", func() error { return os.Remove(node.Conflist()) }},
			{"the list's content", func() error { return os.WriteFile(node.Conflist(), []byte("{}"), 0o644) }},
			{"the plugin", func() error { return os.Remove(node.CNIBinDir() + "/ebpf-cni") }},
			{"our routes", func() error { return deleteOurRoutes(node) }},
			{"our attachments", func() error { return detachAll(node, attach) }},
			{"a pinned program", func() error { return os.Remove(node.BPFFS() + "/progs/ec_from_pod") }},
		} {
			if err := damage.do(); err != nil {
				t.Fatalf("remove %s: %v", damage.name, err)
			}
			before.assertBack(t, repairPromise, damage.name)
		}
		if now, err := os.ReadFile(node.Conflist()); err != nil || string(now) != string(conflist) {
			t.Errorf("the list is now %q, was %q; error %v", now, conflist, err)
		}
	})
}

// deleteOurRoutes removes the routes of our own protocol number.
func deleteOurRoutes(node *lab.Node) error {
	const ours = 142
	routes, err := lab.RetryInterrupted(func() ([]netlink.Route, error) { return node.Netlink().RouteList(nil, 0) })
	if err != nil {
		return err
	}
	deleted := 0
	for _, route := range routes {
		if route.Protocol == ours {
			if err := node.Netlink().RouteDel(&route); err != nil {
				return err
			}
			deleted++
		}
	}
	if deleted == 0 {
		return errors.New("there is no route of protocol 142")
	}
	return nil
}

// detachAll removes the pins of the tcx links, which detaches them, or the clsact qdiscs with all their filters.
func detachAll(node *lab.Node, attach string) error {
	if attach == "--attach=clsact" {
		return deleteClsact(node)
	}
	dir := node.BPFFS() + "/links"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return errors.New("there is no pinned link")
	}
	for _, entry := range entries {
		if err := os.Remove(dir + "/" + entry.Name()); err != nil {
			return err
		}
	}
	return nil
}

func deleteClsact(node *lab.Node) error {
	qdiscs, err := lab.RetryInterrupted(func() ([]netlink.Qdisc, error) { return node.Netlink().QdiscList(nil) })
	if err != nil {
		return err
	}
	deleted := 0
	for _, qdisc := range qdiscs {
		if qdisc.Type() == "clsact" {
			if err := node.Netlink().QdiscDel(qdisc); err != nil {
				return err
			}
			deleted++
		}
	}
	if deleted == 0 {
		return errors.New("there is no clsact qdisc")
	}
	return nil
}
