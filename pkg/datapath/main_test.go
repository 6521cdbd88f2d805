package datapath

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// TestMain lets the kill test run this binary as the process that is killed.
func TestMain(m *testing.M) {
	if os.Getenv(childStep) != "" {
		os.Exit(child())
	}
	os.Exit(m.Run())
}

// isolated gives the test a node of its own, which ends with it.
func isolated(t *testing.T, mode attach.Mode) Options {
	t.Helper()
	if mode == attach.TCX && !kernelHasTCX(t) {
		t.Skip("needs tcx, which Linux 6.6 brought")
	}
	return optionsIn(filepath.Join(priv.Isolate(t), "node"), t.TempDir(), mode)
}

func kernelHasTCX(t *testing.T) bool {
	t.Helper()
	version, err := features.LinuxVersionCode()
	check(t, err)
	return version >= 6<<16|6<<8
}

func optionsIn(dir, stateDir string, mode attach.Mode) Options {
	return Options{
		Dir: bpffs.Dir(dir), StateDir: stateDir, Attach: mode,
		NodeConfig:  config.NodeConfig{Masquerade: 1, Mark: 0x00800000, SnatPorts: [config.PortRanges]config.PortRange{{First: 49152, Count: 16384}}},
		SnatEntries: 1024, ConntrackEntries: 1024,
		Log: slog.New(slog.DiscardHandler),
	}.withDefaults()
}

func mustLoad(t *testing.T, opts Options) *Datapath {
	t.Helper()
	dp, err := Load(context.Background(), opts)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { _ = dp.Close() })
	return dp
}

// embedded are the real programs, for a test to change.
func embedded(t testing.TB) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := Options{}.spec()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// grow makes the values of a map larger, as a later build would.
func grow(spec *ebpf.CollectionSpec, name string, bytes uint32) {
	m := spec.Maps[name]
	m.ValueSize += bytes
	m.Key, m.Value = nil, nil
}

// addVeth makes a pair of interfaces and returns the index of the first.
func addVeth(t testing.TB, name string) int {
	t.Helper()
	v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	if err := netlink.LinkAdd(v); err != nil {
		t.Fatal(err)
	}
	i, err := net.InterfaceByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return i.Index
}

// check ends the test on an error.
func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%+v", err)
	}
}

func removeVeth(t testing.TB, name string) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	check(t, err)
	check(t, netlink.LinkDel(l))
}
