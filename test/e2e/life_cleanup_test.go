package e2e

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// shared is a node that others use too: their tc programs stand before and after ours, and they have files, routes, rules
// and sysctls of their own.
type shared struct {
	*lab.Lab
	node        *lab.Node
	pod         *lab.Pod
	before      lab.Snapshot // the node's first agent
	first, last [2]*foreignCounter
}

// foreignPort is what the others' programs count packets to.
const foreignPort = 7007

// startShared makes the node and starts the agent among what is there.
func startShared(t *testing.T, attach string) *shared {
	t.Helper()
	s := &shared{Lab: lab.ForTest(t, lab.Options{Nodes: 2, Families: families, AgentFlags: []string{attach}})}
	s.node = s.Nodes[0]
	for i := range s.first {
		s.first[i], s.last[i] = newForeignCounter(t, firstFamily(s.Lab), foreignPort), newForeignCounter(t, firstFamily(s.Lab), foreignPort)
	}
	uplink, err := s.node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.settle(uplink.Attrs().Index); err != nil {
		t.Fatal(err)
	}
	// One before us, in time as well as in place.
	s.first[0].attachFirst(t, s.node, uplink.Attrs().Index, attach)
	if s.before, err = s.node.Snapshot(); err != nil {
		t.Fatal(err)
	}
	startAgents(t, s.Lab)
	s.pod = addPod(t, s.node, "a")
	host, err := s.node.Netlink().LinkByName(s.pod.Result.Interfaces[0].Name)
	if err != nil {
		t.Fatal(err)
	}
	s.last[0].attachLast(t, s.node, uplink.Attrs().Index, attach)
	s.first[1].attachFirst(t, s.node, host.Attrs().Index, attach)
	s.last[1].attachLast(t, s.node, host.Attrs().Index, attach)
	return s
}

func (f *foreignCounter) attachFirst(t *testing.T, node *lab.Node, index int, attach string) {
	t.Helper()
	if attach == "--attach=tcx" {
		f.attachTCX(t, node, index, link.Head())
		return
	}
	ensureClsact(t, node, index)
	f.attachClsact(t, node, index, 1)
}

func (f *foreignCounter) attachLast(t *testing.T, node *lab.Node, index int, attach string) {
	t.Helper()
	if attach == "--attach=tcx" {
		// The kernel runs these after all of tcx: ours is by tcx, the other's by the older way.
		ensureClsact(t, node, index)
	}
	f.attachClsact(t, node, index, 0xfff0)
}

func ensureClsact(t *testing.T, node *lab.Node, index int) {
	t.Helper()
	err := node.Netlink().QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
}

// settle is what others have made on the node.
func (s *shared) settle(uplink int) error {
	nl := s.node.Netlink()
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table, rule.Src = unix.AF_INET, 500, 77, prefix("203.0.113.0/24")
	return errors.Join(
		s.node.WriteSysctl("net/ipv4/ip_local_reserved_ports", "20000-20010,50000"),
		s.node.WriteSysctl("net/ipv4/conf/"+lab.Uplink+"/rp_filter", "1"),
		nl.RuleAdd(rule),
		nl.RouteAdd(&netlink.Route{LinkIndex: uplink, Table: 77, Dst: prefix("198.51.100.0/24"), Gw: lab.GatewayAddr[wire.IPv4].AsSlice()}),
		nl.RouteAdd(&netlink.Route{LinkIndex: uplink, Dst: prefix("192.0.2.0/24"), Gw: lab.GatewayAddr[wire.IPv4].AsSlice(), Protocol: 99}),
		os.WriteFile(filepath.Join(s.node.ConfDir(), "99-other.conflist"), []byte("{}"), 0o644),
		os.WriteFile(filepath.Join(s.node.CNIBinDir(), "other"), []byte("#!/bin/sh\n"), 0o755),
	)
}

func prefix(text string) *net.IPNet {
	p := netip.MustParsePrefix(text)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// assertBetween: on the uplink and on the pod's link, the program before ours sees everything and the one after ours what
// ours passes on, and that is what the host's stack must see.
func (s *shared) assertBetween(t *testing.T, when string, far *lab.Pod) {
	t.Helper()
	var counted [4]uint64
	for i, f := range []*foreignCounter{s.first[0], s.last[0], s.first[1], s.last[1]} {
		counted[i] = f.count(t)
	}
	const redirected, passed = 5, 3
	exchange := func(from *lab.Namespace, to netip.Addr, times int) {
		t.Helper()
		for range times {
			if _, err := from.UDP(t.Context(), netip.AddrPortFrom(to, foreignPort), 100); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
		}
	}
	exchange(far.Namespace, s.pod.Addr(), redirected) // into the uplink, to the pod
	exchange(s.Outside, s.node.Addr(), passed)        // into the uplink, to the host
	exchange(s.pod.Namespace, far.Addr(), redirected) // out of the pod, to the other node
	exchange(s.pod.Namespace, s.node.Addr(), passed)  // out of the pod, to the host
	for i, want := range []uint64{redirected + passed, passed, redirected + passed, passed} {
		f := []*foreignCounter{s.first[0], s.last[0], s.first[1], s.last[1]}[i]
		where := []string{"before ours on the uplink", "after ours on the uplink", "before ours on the pod's link", "after ours on the pod's link"}[i]
		if got := f.count(t) - counted[i]; got != want {
			t.Errorf("%s: the program %s saw %d packets, want %d", when, where, got, want)
		}
	}
}

// cleanup runs `ebpf-agent cleanup` on the node's directories.
func cleanup(t *testing.T, node *lab.Node) error {
	t.Helper()
	path, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	_, err = node.Exec(t.Context(), path, "cleanup", "--bpffs="+node.BPFFS(), "--state-dir="+node.StateDir(),
		"--cni-conf-dir="+node.ConfDir(), "--cni-bin-dir="+node.CNIBinDir())
	return err
}

// Ours works between others' programs, through restarts of the agent; and its cleanup leaves whatever is not ours, be it
// older or younger than we are.
func TestLifeBesideOthers(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		s := startShared(t, attach)
		far := addPod(t, s.Nodes[1], "far")
		for _, on := range []*lab.Namespace{s.pod.Namespace, s.node.Namespace, far.Namespace} {
			if _, err := on.Serve(foreignPort); err != nil {
				t.Fatal(err)
			}
		}
		assertReaches(t, s.pod.Namespace, serve(t, far.Namespace), s.pod.Addr()) // neighbours are known from here on
		s.assertBetween(t, "at first", far)
		if err := s.node.KillAgent(); err != nil {
			t.Fatal(err)
		}
		if err := s.node.StartAgent(); err != nil {
			t.Fatal(err)
		}
		if err := s.node.WaitReady(within(t, readyLimit)); err != nil {
			t.Fatal(err)
		}
		s.assertBetween(t, "after a restart", far)
		s.assertCleanupRefuses(t)

		// Somebody adds to what we share, after us.
		ports, err := s.node.ReadSysctl("net/ipv4/ip_local_reserved_ports")
		if err != nil {
			t.Fatal(err)
		}
		if err := s.node.WriteSysctl("net/ipv4/ip_local_reserved_ports", ports+",30000"); err != nil {
			t.Fatal(err)
		}
		if err := s.node.KillAgent(); err != nil { // it need not have ended well
			t.Fatal(err)
		}
		assertNoDrops(t, s.Lab)
		if err := cleanup(t, s.node); err != nil {
			t.Fatal(err)
		}
		s.assertOnlyOthersLeft(t, "after the cleanup")
		if err := cleanup(t, s.node); err != nil {
			t.Errorf("a second cleanup: %v", err)
		}
		s.assertOnlyOthersLeft(t, "after a second cleanup")
		if links, err := s.pod.Links(); err != nil || slices.Contains(links, s.pod.IfName) {
			t.Errorf("the pod still has the links %q; error %v", links, err)
		}
		s.assertUsable(t)
	})
}

// assertCleanupRefuses: while the agent runs, with a sentence, and without having touched anything.
func (s *shared) assertCleanupRefuses(t *testing.T) {
	t.Helper()
	before, was := inventory(t, s.node), objects(t, s.node)
	err := cleanup(t, s.node)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(err.Error(), "an agent is running") {
		t.Errorf("cleanup while an agent runs: %v, want exit status 1 and why", err)
	}
	if diff := cmp.Diff(before, inventory(t, s.node)); diff != "" {
		t.Errorf("a cleanup that was refused has changed the node:\n%s", diff)
	}
	if diff := cmp.Diff(was, objects(t, s.node)); diff != "" {
		t.Errorf("a cleanup that was refused has changed the dataplane:\n%s", diff)
	}
}

// assertOnlyOthersLeft compares with the node before the first agent, and with what others have added since.
func (s *shared) assertOnlyOthersLeft(t *testing.T, when string) {
	t.Helper()
	after, err := s.node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(s.before)
	for i, line := range want {
		if strings.HasPrefix(line, "sysctl net/ipv4/ip_local_reserved_ports") {
			want[i] = "sysctl net/ipv4/ip_local_reserved_ports = 20000-20010,30000,50000"
		}
	}
	others := []string{"filter eth0 ffff:fff2 bpf priority 65520 foreign"} // attached since
	if !slices.ContainsFunc(want, func(line string) bool { return strings.HasPrefix(line, "qdisc eth0 clsact") }) {
		others = append(others, "qdisc eth0 clsact ingress")
	}
	want = append(want, others...)
	slices.Sort(want)
	if diff := cmp.Diff(want.Without(kernelsOwn...), afterForwarding(s.before, after).Without(kernelsOwn...)); diff != "" {
		t.Errorf("%s: gone (-) or left (+):\n%s", when, diff)
	}
}

// assertUsable: the others' programs see everything now, and the node can begin anew.
func (s *shared) assertUsable(t *testing.T) {
	t.Helper()
	first, last := s.first[0].count(t), s.last[0].count(t)
	if _, err := s.Outside.UDP(t.Context(), netip.AddrPortFrom(s.node.Addr(), foreignPort), 100); err != nil {
		t.Fatal(err)
	}
	if s.first[0].count(t) != first+1 || s.last[0].count(t) != last+1 {
		t.Error("the others' programs do not see packets any more")
	}
	if err := s.node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	if err := s.node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	assertReaches(t, addPod(t, s.node, "anew").Namespace, serve(t, s.Outside), s.node.Addr())
}
