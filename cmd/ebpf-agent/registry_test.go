package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

func TestRegistry(t *testing.T) {
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	some, password := file("x"), file("secret\n")
	compareAddrs := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	for _, tt := range []struct {
		args string
		want agent.Registry
	}{
		{"--etcd-endpoints=http://10.0.0.1", agent.Registry{Endpoints: []string{"http://10.0.0.1:2379"}, Prefix: "/coreos.com/network", SubnetFile: "/run/flannel/subnet.env"}},
		{"--etcd-endpoints=https://a:1/,https://[2001:db8::1]:2 --etcd-prefix=/net/work/ --etcd-cafile=" + some + " --etcd-certfile=" + some + " --etcd-keyfile=" + some +
			" --etcd-username=flannel --etcd-password-file=" + password + " --public-ip=2001:db8::9,192.0.2.9 --subnet-file=/run/x/../subnet.env", agent.Registry{
			Endpoints: []string{"https://a:1", "https://[2001:db8::1]:2"}, Prefix: "/net/work", CAFile: some, CertFile: some, KeyFile: some, Username: "flannel", Password: "secret",
			Public: [wire.Families]netip.Addr{wire.IPv4: netip.MustParseAddr("192.0.2.9"), wire.IPv6: netip.MustParseAddr("2001:db8::9")}, SubnetFile: "/run/subnet.env",
		}},
	} {
		c := call(t, nil, nil, append(strings.Fields(tt.args), "--registry=etcd")...)
		if c.status != 0 || c.config.Registry == nil || c.config.API != nil || c.config.Services != agent.ServicesOff {
			t.Fatalf("%s: status %d, %s", tt.args, c.status, c.stderr)
		}
		if diff := cmp.Diff(tt.want, *c.config.Registry, compareAddrs); diff != "" {
			t.Errorf("%s: -want +got:\n%s", tt.args, diff)
		}
	}
	const etcd = "--registry=etcd --etcd-endpoints=https://a "
	for args, says := range map[string]string{
		"--registry=etcd":                                                   "--etcd-endpoints: not given",
		etcd + "--nodes-file=$NODES":                                        "--nodes-file: is given beside --registry=etcd",
		etcd + "--kubeconfig=" + some:                                       "--kubeconfig: is given beside",
		etcd + "--api-server=https://a":                                     "--api-server: is given beside",
		etcd + "--services=on":                                              "--services: is given beside",
		etcd + "--routing-mode=direct":                                      "--routing-mode: is given beside",
		etcd + "--vxlan-port=4790":                                          "--vxlan-port: is given beside",
		etcd + "--vxlan-vni=7":                                              "--vxlan-vni: is given beside",
		etcd + "--etcd-certfile=" + some:                                    "takes both",
		etcd + "--etcd-keyfile=" + some:                                     "takes both",
		etcd + "--etcd-username=flannel":                                    "takes both",
		etcd + "--etcd-password-file=" + some:                               "takes both",
		"--registry=etcd --etcd-endpoints=http://a --etcd-cafile=" + some:   "takes https URLs",
		etcd + "--etcd-username=flannel --etcd-password-file=" + file("\n"): "is empty",
		"--nodes-file=$NODES --etcd-endpoints=http://a":                     "--etcd-endpoints: is given without --registry=etcd",
		"--nodes-file=$NODES --etcd-prefix=/x":                              "--etcd-prefix: is given without",
		"--nodes-file=$NODES --etcd-cafile=" + some:                         "--etcd-cafile: is given without",
		"--nodes-file=$NODES --public-ip=192.0.2.1":                         "--public-ip: is given without",
		"--nodes-file=$NODES --subnet-file=/x":                              "--subnet-file: is given without",
	} {
		c := call(t, nil, nil, strings.Fields(args)...)
		if c.status != 2 || c.config != nil || strings.Count(c.stderr, "\n") != 1 || !strings.Contains(c.stderr, says) || !strings.Contains(c.stderr, "takes ") {
			t.Errorf("%s: status %d, %q, want %q", args, c.status, c.stderr, says)
		}
	}
}
