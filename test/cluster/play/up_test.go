package main

import (
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

func TestUpOptions(t *testing.T) {
	o, mode, err := upOptions([]string{"-family=dual", "-mode=vxlan", "-proxy=nftables"})
	if err != nil || len(o.Families) != 2 || o.KubeProxy != cluster.NFTables || mode != "vxlan" || !o.Keep {
		t.Errorf("%+v, mode %s, error %v", o, mode, err)
	}
	if o, _, err = upOptions([]string{"-proxy=none"}); err != nil || o.KubeProxy != cluster.NoProxy {
		t.Errorf("without kube-proxy %+v, error %v", o, err)
	}
	o, mode, err = upOptions(nil)
	if err != nil || len(o.Families) != 1 || o.Families[0] != core.IPv4Protocol || o.KubeProxy != cluster.IPTables || mode != "auto" {
		t.Errorf("by default %+v, mode %s, error %v", o, mode, err)
	}
	for args, want := range map[string]string{
		"-family=both": "takes ipv4, ipv6 or dual", "-mode=tunnel": "takes auto, direct or vxlan",
		"-proxy=ipvs": "takes iptables, nftables or none", "dual": `unexpected argument "dual"`,
	} {
		if _, _, err := upOptions(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
