package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// traces lists what the pods of each node have there: links, routes, namespaces, records and map entries.
func traces(t *testing.T, s *standing) []string {
	t.Helper()
	var all []string
	for _, node := range s.Nodes {
		for what, command := range map[string]string{
			"link": "ls /sys/class/net", "route": "ip -4 route show scope link", "route of IPv6": "ip -6 route", "netns": "ls /run/netns",
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
