package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// changing are settings that others change too: kube-proxy, and who turns ip_forward on, which a cleanup leaves on; the
// kernel has others follow that.
var changing = regexp.MustCompile(`forward|route_localnet|all.accept_redirects|reading key`)

// footprint lists what the nodes have that an agent, a plugin or a program of ours could have made or changed. The empty
// directories that Kubernetes makes for volumes are not in it.
func footprint(t *testing.T, s *standing) []string {
	t.Helper()
	var all []string
	for _, node := range s.Nodes {
		for what, command := range map[string]string{
			"link": "ls /sys/class/net", "route": "ip route show table all", "rule": "ip rule", "neighbour": "ip neigh show nud permanent",
			"qdisc": "tc qdisc show", "filter": "tc filter show dev eth0 ingress; tc filter show dev eth0 egress",
			"pin":    "find /sys/fs/bpf -mindepth 1 -not -name '*.debug'", // these are the kernel's
			"file":   "find /run/ebpf-cni /etc/cni /opt/cni " + s.Options.CNIConf + " " + s.Options.CNIBin + " -not -type d 2>/dev/null; :",
			"sysctl": "sysctl -a -r '^net.ipv[46].' 2>&1; :",
		} {
			out, err := node.Run(t.Context(), "sh", "-c", command)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out) {
				if what != "sysctl" || !changing.MatchString(line) {
					all = append(all, fmt.Sprintf("%s %s %s", node.Name, what, strings.TrimSpace(line)))
				}
			}
		}
		all = append(all, attachments(t, node)...)
	}
	slices.Sort(all)
	return slices.Compact(all)
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
				kind uint32
			}{{"tcx ingress", 46}, {"tcx egress", 47}} {
				count, err := attached(link.Attrs().Index, hook.kind)
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

// attached asks the kernel how many programs are attached to a link.
func attached(ifindex int, kind uint32) (uint32, error) {
	const query = 16 // BPF_PROG_QUERY
	attr := struct {
		Target, Kind, Query, Attach uint32
		IDs                         uint64
		Count, _                    uint32
		Rest                        [4]uint64
	}{Target: uint32(ifindex), Kind: kind}
	_, _, errno := unix.Syscall(unix.SYS_BPF, query, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno == unix.EINVAL { // no tcx in this kernel
		return 0, nil
	}
	if errno != 0 {
		return 0, errno
	}
	return attr.Count, nil
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
