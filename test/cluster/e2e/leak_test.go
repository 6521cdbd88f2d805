package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// podsAtOnce is how many pods come and go together on each node.
const podsAtOnce = 10

func TestPodsLeaveNothingBehind(t *testing.T) {
	s := running(t)
	before := traces(t, s)
	var group errgroup.Group
	pods := make([]*cluster.Pod, podsAtOnce*len(s.Nodes))
	for i := range pods {
		name := fmt.Sprintf("passing-%d", i)
		departs(t, s, name)
		group.Go(func() (err error) {
			pods[i], err = s.AddPod(t.Context(), name, s.Nodes[i%len(s.Nodes)], nil)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	during := traces(t, s)
	if len(during) < len(before)+4*len(pods) {
		t.Errorf("%d pods left only %d traces", len(pods), len(during)-len(before))
	}
	for _, pod := range pods {
		sees(t, pod, at(s.far.Addr, cluster.HTTPPort), pod.Addr)
	}
	if err := s.DeletePods(t.Context(), pods...); err != nil {
		t.Fatal(err)
	}
	left := slices.DeleteFunc(traces(t, s), func(trace string) bool { return slices.Contains(before, trace) })
	if len(left) > 0 {
		t.Errorf("deleted pods left behind:\n%s", strings.Join(left, "\n"))
	}
}

// traces lists what the pods of each node have there: links, routes, namespaces, records and map entries.
func traces(t *testing.T, s *standing) []string {
	t.Helper()
	var all []string
	for _, node := range s.Nodes {
		for what, command := range map[string]string{
			"link": "ls /sys/class/net", "route": "ip -4 route show scope link", "netns": "ls /run/netns",
			"endpoint": "ls /run/ebpf-cni/endpoints", "pin": "ls /sys/fs/bpf/ebpf-cni/links",
		} {
			out, err := node.Run(t.Context(), strings.Fields(command)...)
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(out) {
				all = append(all, node.Name+" "+what+" "+strings.TrimSpace(line))
			}
		}
		all = append(all, entries(t, s, node)...)
	}
	return all
}

// entries lists the keys of the maps that know pods.
func entries(t *testing.T, s *standing, node *cluster.Machine) []string {
	t.Helper()
	var all []string
	for name, key := range map[string]string{"endpoints": "address", "devices": "ifindex"} {
		for _, record := range dump(t, s, node, name) {
			if record[key] == nil {
				t.Fatalf("a record of %s has no %s: %v", name, key, record)
			}
			all = append(all, fmt.Sprintf("%s %s %v", node.Name, name, record[key]))
		}
	}
	return all
}
