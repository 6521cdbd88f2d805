package agent

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/lease"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

const registryKey = "/test/config"

// inRegistry makes an agent whose subnets come of a registry.
func inRegistry(t *testing.T, url string) (*agent, *bytes.Buffer) {
	t.Helper()
	log := &bytes.Buffer{}
	text := slog.New(slog.NewTextHandler(log, nil))
	return &agent{node: &node{log: text, cfg: Config{
		Directories: Directories{State: t.TempDir()}, VXLANPort: 4789, VXLANVNI: 4096, RoutingMode: RouteAuto,
		Registry: &Registry{Endpoints: []string{url}, Prefix: "/test"},
	}}}, log
}

func TestNetworkOfTheRegistry(t *testing.T) {
	s := etcd.Start(t)
	for _, c := range []struct {
		backend string
		mode    RoutingMode
		port    uint16
		vni     uint32
		mtu     int
	}{
		{`{"Type": "host-gw"}`, RouteDirect, 8472, 1, 0},
		{`{"Type": "vxlan", "MTU": 1400}`, RouteVXLAN, 8472, 1, 1350},
		{`{"Type": "vxlan", "DirectRouting": true, "Port": 4789, "VNI": 7}`, RouteAuto, 4789, 7, 0},
		{``, RouteVXLAN, 8472, 1, 0},
	} {
		text := `{"Network": "10.5.0.0/16"}`
		if c.backend != "" {
			text = `{"Network": "10.5.0.0/16", "Backend": ` + c.backend + `}`
		}
		s.Put(registryKey, text)
		a, log := inRegistry(t, s.URL)
		err := a.reachRegistry(t.Context())
		a.registry.Close()
		if err != nil || a.cfg.RoutingMode != c.mode || a.cfg.VXLANPort != c.port || a.cfg.VXLANVNI != c.vni || a.cfg.MTU != c.mtu {
			t.Errorf("%s: mode %s, port %d, VNI %d, MTU %d, error %v", text, a.cfg.RoutingMode, a.cfg.VXLANPort, a.cfg.VXLANVNI, a.cfg.MTU, err)
		}
		if strings.Contains(log.String(), "means udp") != (c.backend == "") {
			t.Errorf("%s: logged is %s", text, log)
		}
	}
}

// While there is no configuration, the log says so once and ebpfctl all the time.
func TestNetworkIsWaitedFor(t *testing.T) {
	s := etcd.Start(t)
	a, log := inRegistry(t, s.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
	defer cancel()
	if err := a.reachRegistry(ctx); ctx.Err() == nil {
		t.Fatalf("not waited: %v", err)
	}
	a.registry.Close()
	if strings.Count(log.String(), registryKey+": is missing") != 1 {
		t.Errorf("logged is %s", log)
	}
	content, err := os.ReadFile(filepath.Join(a.cfg.State, observe.ClusterFile))
	if err != nil || !bytes.Contains(content, []byte(registryKey)) {
		t.Errorf("ebpfctl is told %s, error %v", content, err)
	}
}

func TestSubnetFile(t *testing.T) {
	l := testLoop(t)
	network, err := lease.ParseNetwork([]byte(`{"Network": "10.244.0.0/16", "Backend": {"Type": "host-gw"}}`))
	must(t, err)
	path := filepath.Join(t.TempDir(), "run/subnet.env")
	l.cfg.Registry, l.network, l.cfg.Masquerade[wire.IPv6] = &Registry{SubnetFile: path}, network, false
	l.registry, err = lease.Open(*l.cfg.Registry, l.log)
	must(t, err)
	if _, err := os.Stat(path); err == nil {
		t.Error("it is there before the node is ready")
	}
	ready(t, l)
	const want = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=true\n"
	expect := func(when string) {
		t.Helper()
		if content, err := os.ReadFile(path); err != nil || string(content) != want {
			t.Errorf("%s: it says %q, error %v", when, content, err)
		}
	}
	expect("ready")
	must(t, os.Remove(path))
	l.inspect(t.Context())
	expect("removed")
	must(t, os.WriteFile(path, []byte("FLANNEL_MTU=7\n"), 0o600))
	l.inspect(t.Context())
	expect("changed")
}
