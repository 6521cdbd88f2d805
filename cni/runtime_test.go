package cni

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// realPlugin puts the built binary in the place of the test's own, and returns the network as a list.
func realPlugin(t *testing.T, w *fixture) *libcni.NetworkConfigList {
	t.Helper()
	plugin := filepath.Join(w.plugins, "ebpf-cni")
	w.must(os.Remove(plugin))
	build(t, plugin, "../cmd/ebpf-cni")
	w.conf["capabilities"] = map[string]bool{"ips": true, "mac": true, "bandwidth": true, "portMappings": true}
	raw, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": w.conf["name"], "plugins": []any{w.conf},
	})
	w.must(err)
	list, err := libcni.NetworkConfFromBytes(raw)
	w.must(err)
	return list
}

// build compiles a program, or takes it from $EBPF_CNI_BIN where there is no compiler.
func build(t *testing.T, out, pkg string) {
	t.Helper()
	if dir := os.Getenv("EBPF_CNI_BIN"); dir != "" {
		if err := os.Symlink(filepath.Join(dir, filepath.Base(pkg)), out); err != nil {
			t.Fatal(err)
		}
		return
	}
	cmd := exec.Command("go", "build", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath", "GOPROXY=off")
	if log, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, log)
	}
}

func TestInTheHandsOfLibcni(t *testing.T) {
	w := newDual(t)
	w.serveServices(true)
	before := w.everything()
	list := realPlugin(t, w)
	runtime := libcni.NewCNIConfigWithCacheDir([]string{w.plugins}, t.TempDir(), nil)
	ctx := context.Background()
	if _, err := runtime.ValidateNetworkList(ctx, list); err != nil {
		t.Fatal(err)
	}
	w.must(runtime.GetStatusNetworkList(ctx, list))

	p, q := w.newPod(), w.newPod()
	conf := func(p *pod) *libcni.RuntimeConf {
		return &libcni.RuntimeConf{ContainerID: p.id.ContainerID, NetNS: p.path(), IfName: "eth0", Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", "x"},
		}}
	}
	first := conf(p)
	first.CapabilityArgs = map[string]any{
		"ips": []string{"fd00:9::50/64", "10.9.0.50/24"}, "mac": "02:00:00:00:00:50",
		"portMappings": []map[string]any{hostPort(8080, 80, "TCP", "")},
	}
	r, err := runtime.AddNetworkList(ctx, list, first)
	w.must(err)
	got, err := current.NewResultFromResult(r)
	w.must(err)
	if got.IPs[0].Address.String() != "10.9.0.50/32" || got.IPs[1].Address.String() != "fd00:9::50/128" || got.Interfaces[1].Mac != "02:00:00:00:00:50" {
		t.Errorf("result %+v", got)
	}
	if got := w.hostPorts(p); !slices.Equal(got, []string{"0.0.0.0:8080/tcp 10.9.0.50:80", "[::]:8080/tcp [fd00:9::50]:80"}) {
		t.Errorf("host ports %v", got)
	}
	w.must(runtime.CheckNetworkList(ctx, list, first))
	_, err = runtime.AddNetworkList(ctx, list, conf(q))
	w.must(err)

	// One of them is stale, and its DEL got lost with libcni's cache.
	lost := libcni.NewCNIConfigWithCacheDir([]string{w.plugins}, t.TempDir(), nil)
	valid := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: p.id.ContainerID, IfName: "eth0"}}}
	w.must(lost.GCNetworkList(ctx, list, valid))
	if used := w.used(); !slices.Equal(used, []string{"10.9.0.50", "fd00:9::50"}) {
		t.Errorf("after GC in use: %v", used)
	}
	err = lost.GCNetworkList(ctx, list, nil)
	var coded *types.Error
	if !errors.As(err, &coded) || coded.Code != 7 || !strings.Contains(coded.Msg, gcKey) {
		t.Errorf("GC without a list: %v", err)
	}
	w.must(runtime.CheckNetworkList(ctx, list, first))
	w.must(runtime.DelNetworkList(ctx, list, first))
	w.must(runtime.DelNetworkList(ctx, list, first))
	w.must(runtime.DelNetworkList(ctx, list, conf(q)))
	w.unchanged(before)
	_, err = runtime.AddNetworkList(ctx, list, conf(p))
	w.must(err)
	w.must(lost.GCNetworkList(ctx, list, &libcni.GCArgs{}))
	w.unchanged(before)
}

// TestChainedTuning has the upstream plugin tuning change what ours has made of the pod's interface.
func TestChainedTuning(t *testing.T) {
	w := newDual(t)
	before := w.everything()
	ours := realPlugin(t, w)
	build(t, filepath.Join(w.plugins, "tuning"), "github.com/containernetworking/plugins/plugins/meta/tuning")
	const mac = "02:00:00:00:00:77"
	var plain struct{ Plugins []any }
	w.must(json.Unmarshal(ours.Bytes, &plain))
	raw, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": w.conf["name"], "plugins": append(plain.Plugins, map[string]any{
			"type": "tuning", "dataDir": t.TempDir(), "mac": mac, "mtu": 1300, "promisc": true, "allmulti": true, "txQLen": 77,
			"sysctl": map[string]string{"net.ipv4.conf.IFNAME.arp_filter": "1", "net.core.somaxconn": "500"},
		}),
	})
	w.must(err)
	list, err := libcni.NetworkConfFromBytes(raw)
	w.must(err)
	runtime := libcni.NewCNIConfigWithCacheDir([]string{w.plugins}, t.TempDir(), nil)
	ctx := context.Background()
	p := w.newPod()
	conf := &libcni.RuntimeConf{ContainerID: p.id.ContainerID, NetNS: p.path(), IfName: "eth0"}
	_, err = runtime.AddNetworkList(ctx, list, conf)
	w.must(err)
	inside, err := device.OpenIn(p.ns)
	w.must(err)
	defer inside.Close()
	l, err := inside.LinkByName("eth0")
	w.must(err)
	if l.MTU != 1300 || l.MAC.String() != mac {
		t.Fatalf("tuning has changed nothing: %+v", l)
	}
	for range 2 { // the second has nothing to learn
		w.must(runtime.CheckNetworkList(ctx, list, conf))
	}
	for _, a := range w.pick(firstPods) {
		c, err := w.reach(p, a)
		if err != nil {
			t.Fatalf("CHECK passes, and the host does not reach the pod: %v", err)
		}
		c.Close()
	}

	w.must(p.ns.Do(func() error {
		return netlink.LinkSetHardwareAddr(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: l.Index}}, net.HardwareAddr{2, 0, 0, 0, 0, 0x78})
	}))
	if err := runtime.CheckNetworkList(ctx, list, conf); err == nil || !strings.Contains(err.Error(), "instead of "+mac) {
		t.Errorf("CHECK after somebody has changed it again: %v", err)
	}
	valid := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: p.id.ContainerID, IfName: "eth0"}}}
	w.must(runtime.GCNetworkList(ctx, list, valid))
	if used := w.used(); len(used) != 2 {
		t.Errorf("after a GC that keeps the pod, in use: %v", used)
	}
	w.must(runtime.DelNetworkList(ctx, list, conf))
	w.unchanged(before)
}

func TestInTheHandsOfCnitool(t *testing.T) {
	w := newFixture(t)
	before := w.everything()
	list := realPlugin(t, w)
	tool := filepath.Join(t.TempDir(), "cnitool")
	build(t, tool, "github.com/containernetworking/cni/cnitool")
	confDir := t.TempDir()
	w.must(os.WriteFile(filepath.Join(confDir, "10-test.conflist"), list.Bytes, 0o600))
	// It keeps its cache below /var/lib, of which the test's mount namespace has one of its own.
	w.must(unix.Mount("eccni", "/var/lib", "tmpfs", 0, ""))
	defer func() { w.must(unix.Unmount("/var/lib", unix.MNT_DETACH)) }()
	run := func(verb string, p *pod, env ...string) (string, error) {
		cmd := exec.Command(tool, verb, "net1", p.path())
		cmd.Env = append([]string{"CNI_PATH=" + w.plugins, "NETCONFPATH=" + confDir, "PATH=/nowhere"}, env...)
		out, err := cmd.CombinedOutput()
		t.Logf("cnitool %s: %v\n%s", verb, err, out)
		return string(out), err
	}
	must := func(verb string, p *pod, env ...string) string {
		t.Helper()
		out, err := run(verb, p, env...)
		if err != nil {
			t.Fatalf("cnitool %s: %v", verb, err)
		}
		return out
	}
	p := w.newPod()
	must("status", p)
	out := must("add", p, "CNI_ARGS=IgnoreUnknown=1;IP=10.9.0.60", `CAP_ARGS={"mac":"02:00:00:00:00:60"}`)
	if !strings.Contains(out, "10.9.0.60/32") || !strings.Contains(out, "02:00:00:00:00:60") {
		t.Errorf("add: %s", out)
	}
	must("check", p)
	must("del", p)
	w.unchanged(before)
	must("del", p)

	must("add", p)
	stranger := w.newPod()
	w.add(stranger, nil) // no attachment of cnitool's
	// It calls DEL for all of its own and then GC without a list, which must not release the rest.
	if out, err := run("gc", p); err == nil || !strings.Contains(out, gcKey) {
		t.Errorf("gc: %v\n%s", err, out)
	}
	if used := w.used(); len(used) != 1 {
		t.Errorf("after gc in use: %v, want the one address that is not cnitool's", used)
	}
	w.ok("DEL", stranger, nil)
	w.unchanged(before)
}
