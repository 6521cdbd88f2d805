package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// changing are settings that others change too: kube-proxy, and who turns ip_forward on, which a cleanup leaves on; the
// kernel has others follow that.
var changing = regexp.MustCompile(`forward|route_localnet|all.accept_redirects`)

// kindsOfTraces are the kinds of what an agent, a plugin or a program of ours could have made or changed on a node, and what lists
// them. The empty directories that Kubernetes makes for volumes are not among the files.
var kindsOfTraces = []struct {
	kind, command string
	always        bool // every machine has some
}{
	{"link", "ls /sys/class/net", true},
	{"route", "ip route show table all", true},
	{"rule", "ip rule", true},
	{"neighbour", "ip neigh show nud permanent", false},
	{"qdisc", "tc qdisc show", true},
	{"nftables table", "nft list tables | grep -w ebpf-cni || true", false}, // kube-proxy has others
	{"filter", "tc filter show dev eth0 ingress; tc filter show dev eth0 egress", false},
	{"pin", "find /sys/fs/bpf -mindepth 1 -not -name '*.debug'", false}, // these are the kernel's
	{"file", "for dir in /run/ebpf-cni /etc/cni /opt/cni $CONF $BIN; do [ ! -e $dir ] || find $dir -not -type d; done", false},
	// A secret that was never set can't be read.
	{"sysctl", "find /proc/sys/net/ipv[46] -type f -perm -u=r -not -name stable_secret -exec grep -H . {} +", true},
}

// footprint lists what traces the nodes have.
func footprint(t *testing.T, s *standing) []string {
	t.Helper()
	var all []string
	directories := fmt.Sprintf("CONF=%s BIN=%s; ", s.Options.CNIConf, s.Options.CNIBin)
	for _, node := range s.Nodes {
		for _, trace := range kindsOfTraces {
			out, err := node.Run(t.Context(), "sh", "-ec", directories+trace.command)
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if trace.always && out == "" {
				t.Errorf("%s has no %s at all: %s shows nothing", node.Name, trace.kind, trace.command)
			}
			for line := range strings.Lines(out) {
				if trace.kind != "sysctl" || !changing.MatchString(line) {
					all = append(all, fmt.Sprintf("%s %s %s", node.Name, trace.kind, strings.TrimSpace(line)))
				}
			}
		}
		all = append(all, attachments(t, node)...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// leavesTraces checks that a network at work is seen by what it left on every node: else nobody would see that it is gone.
func leavesTraces(t *testing.T, s *standing, before []string) {
	t.Helper()
	made := lacking(footprint(t, s), before)
	for _, node := range s.Nodes {
		for _, kind := range []string{"link", "route", "neighbour", "qdisc", "pin", "file", "sysctl", "nftables table"} {
			if !strings.Contains(made, node.Name+" "+kind+" ") {
				t.Errorf("%s has a pod network without a %s of its own among the traces:\n%s", node.Name, kind, made)
			}
		}
		// By tcx, or with a kernel that lacks that by filters.
		if !strings.Contains(made, node.Name+" tcx ingress of eth0") && !strings.Contains(made, node.Name+" filter ") {
			t.Errorf("no program of %s is among the traces:\n%s", node.Name, made)
		}
	}
}

// attachments lists on how many programs the packets of a node's links meet by tcx.
func attachments(t *testing.T, node *cluster.Machine) (all []string) {
	t.Helper()
	err := node.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, link := range links {
			for _, hook := range []struct {
				name string
				kind ebpf.AttachType
			}{{"tcx ingress", ebpf.AttachTCXIngress}, {"tcx egress", ebpf.AttachTCXEgress}} {
				count, err := cluster.Attached(link.Attrs().Index, hook.kind)
				if err != nil {
					return fmt.Errorf("ask for %s of %s: %w", hook.name, link.Attrs().Name, err)
				}
				if count > 0 {
					all = append(all, fmt.Sprintf("%s %s of %s: %d programs", node.Name, hook.name, link.Attrs().Name, count))
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// lacking are the lines of one footprint that the other does not have.
func lacking(all, other []string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(all), func(line string) bool { return slices.Contains(other, line) }), "\n")
}

// untouched checks that the nodes are as they were.
func untouched(t *testing.T, s *standing, before []string) {
	t.Helper()
	after := footprint(t, s)
	if left := lacking(after, before); left != "" {
		t.Errorf("left behind:\n%s", left)
	}
	if lost := lacking(before, after); lost != "" {
		t.Errorf("lost:\n%s", lost)
	}
}
