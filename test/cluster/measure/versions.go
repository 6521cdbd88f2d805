package measure

import (
	"context"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// versionsOf are those of the programs that a cluster is made of.
func versionsOf(ctx context.Context, c *cluster.Cluster) (map[string]string, error) {
	found := map[string]string{"kubernetes": cluster.KubernetesVersion, "kube-proxy": cluster.KubernetesVersion + ", " + c.Options.KubeProxy}
	for name, argv := range map[string][]string{
		"containerd": {"containerd", "--version"}, "runc": {"runc", "--version"}, "etcd": {"etcd", "--version"},
		"iptables": {"iptables", "--version"},
	} {
		out, err := c.Nodes[0].Run(ctx, argv...)
		if err != nil {
			return nil, err
		}
		first, _, _ := strings.Cut(strings.TrimSpace(out), "\n")
		for word := range strings.FieldsSeq(first) {
			if strings.ContainsAny(word, "0123456789") && strings.Contains(word, ".") && !strings.Contains(word, "/") {
				found[name] = strings.TrimPrefix(word, "v")
				break
			}
		}
	}
	return found, nil
}
