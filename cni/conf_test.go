package cni

import (
	"encoding/json"
	"errors"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// asInTheDocumentation is the configuration of the interface description, as libcni hands it on.
const asInTheDocumentation = `{"cniVersion":"1.0.0","name":"ebpf-cni","type":"ebpf-cni",
	"bpffs":"/sys/fs/bpf/ebpf-cni","stateDir":"/run/ebpf-cni","mtu":1450,"attach":"tcx","addressQuarantine":"90s",
	"capabilities":{"ips":true,"mac":true,"bandwidth":true},
	"ipam":{"type":"host-local","ranges":[[{"subnet":"10.244.1.0/24"}]]},"logFile":"","logLevel":"warn"}`

func TestConfiguration(t *testing.T) {
	c, err := parseConf([]byte(asInTheDocumentation))
	if err != nil {
		t.Fatal(err)
	}
	if c.network != "ebpf-cni" || c.pins != defaultBPFFS || c.stateDir != defaultStateDir || c.mtu != 1450 ||
		c.attach != attach.TCX || c.quarantine != 90*time.Second || !c.hostLocal() || c.bandwidth || len(c.unknown) != 0 {
		t.Errorf("parsed %+v", c)
	}
	c, err = parseConf([]byte(`{"cniVersion":"1.0.0","name":"n","ipam":{"type":"static"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if c.pins != "/sys/fs/bpf/ebpf-cni" || c.stateDir != "/run/ebpf-cni" || c.mtu != 1500 || c.attach != attach.Auto ||
		c.quarantine != time.Minute || c.hostLocal() {
		t.Errorf("defaults %+v", c)
	}
}

// FuzzConf: no configuration crashes any of the parsers; what is refused is refused with a code of the specification;
// no path that is accepted is relative, and no name can leave its directory.
func FuzzConf(f *testing.F) {
	f.Add([]byte(asInTheDocumentation), "IgnoreUnknown=1;IP=10.244.1.9")
	f.Add([]byte(`{"name":"n","ipam":{"type":"host-local","subnet":"fd00::/64"},"runtimeConfig":{"mac":"02:00:00:00:00:01","ips":["fd00::7"]}}`), "")
	f.Add([]byte(`{"name":"n","ipam":{"type":"x"},"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]}`), "")
	f.Add([]byte(`{"name":"n","ipam":{"type":"x"},"cniVersion":"0.4.0","prevResult":{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.0.0.1/24","interface":3}],"routes":[{"dst":"0.0.0.0/0"}],"interfaces":[null]}}`), ";;=")
	f.Add([]byte(`{"name":"n","ipam":{"type":"x"},"runtimeConfig":{"portMappings":[{"hostPort":80,"containerPort":8080,"protocol":"UDP","hostIP":"::ffff:192.0.2.1"},
		{"hostPort":80,"containerPort":80},{"hostPort":0},null,{"hostPort":7,"containerPort":7,"protocol":"sctp","hostIP":"::"}]}}`), "")
	f.Add([]byte(`{"name":null,"mtu":null,"ipam":null,"bpffs":"/../..","runtimeConfig":{"mac":null,"bandwidth":{}}}`), "IP")
	f.Fuzz(func(t *testing.T, stdin []byte, args string) {
		c, err := parseConf(stdin)
		checkRefusal(t, err)
		if err != nil {
			return
		}
		for _, dir := range []string{string(c.pins), c.stateDir} {
			if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
				t.Errorf("path %q was accepted", dir)
			}
		}
		for _, name := range []string{c.network, c.ipamType} {
			if name == "" || name != filepath.Base(name) || name == ".." || name == "." {
				t.Errorf("name %q was accepted", name)
			}
		}
		checkRefusal(t, c.readRuntime())
		if c.mtu < endpoint.MinMTU(netip.IPv4Unspecified()) || c.mtu > maxMTU || c.quarantine < 0 || (c.mac != nil && (len(c.mac) != 6 || c.mac[0]&1 != 0)) {
			t.Errorf("accepted %+v", c)
		}
		checkHostPorts(t, c)
		_, err = c.parseIPAM(args, podInterface)
		checkRefusal(t, err)
		valid, err := c.validAttachments()
		checkRefusal(t, err)
		for id := range valid {
			if id.Validate() != nil {
				t.Errorf("attachment %q was accepted", id)
			}
		}
		prev, err := c.prevResult()
		checkRefusal(t, err)
		if prev != nil {
			checkResult(&endpoint.Work{}, prev) // reads all that the runtime says
		}
	})
}

// checkHostPorts: what is accepted is a port of an address, and no two of one pod meet with different targets.
func checkHostPorts(t *testing.T, c *conf) {
	t.Helper()
	ports, err := c.hostPorts(firstPods[:])
	checkRefusal(t, err)
	if err != nil {
		return
	}
	for i, a := range ports {
		if !a.Address.IsValid() || a.Address.Zone() != "" || a.Port == 0 || a.PodPort == 0 || a.Key().Proto == 0 {
			t.Errorf("accepted %+v", a)
		}
		for _, b := range ports[:i] {
			if a == b || a.PodPort != b.PodPort && len(endpoint.NewHostPorts(a).Meeting(b.Key())) > 0 {
				t.Errorf("accepted %+v and %+v", a, b)
			}
		}
	}
}

func checkRefusal(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	var e *types.Error
	if !errors.As(err, &e) || (e.Code != 4 && e.Code != 6 && e.Code != 7) {
		t.Errorf("refused with %v", err)
	}
	if _, err := json.Marshal(e); err != nil {
		t.Errorf("the refusal can't be told: %v", err)
	}
}
