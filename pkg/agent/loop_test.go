package agent

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// testLoop makes a node in a namespace of the test's own, with one uplink.
// The test must stay on its goroutine: only that one is inside.
func testLoop(t *testing.T) *loop {
	t.Helper()
	pinned := filepath.Join(priv.Isolate(t), "ecag")
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "uplink"
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far"}))
	for _, name := range []string{"lo", "uplink", "far"} {
		link, err := netlink.LinkByName(name)
		must(err)
		must(netlink.LinkSetUp(link))
		if name == "uplink" {
			a, err := netlink.ParseAddr("172.18.0.11/24")
			must(err)
			must(netlink.AddrAdd(link, a))
		}
	}
	plugin := filepath.Join(dir, "image", install.Plugin)
	must(os.MkdirAll(filepath.Dir(plugin), 0o755))
	must(os.WriteFile(plugin, []byte("plugin"), 0o755))
	cfg := Config{
		Directories: Directories{
			BPFFS: bpffs.Dir(pinned), State: filepath.Join(dir, "state"), Conf: filepath.Join(dir, "conf"),
			Bin: filepath.Join(dir, "bin"), ProcSys: "/proc/sys", Plugin: plugin,
		},
		Node: "n1", Masquerade: [wire.Families]bool{true, true}, SnatPorts: []PortRange{{50000, 60000}}, SnatEntries: 1024, Mark: 0x00800000,
		RoutingMode: RouteDirect, VXLANPort: 4789, VXLANVNI: 4096,
		Log: slog.New(slog.DiscardHandler), LogLevel: "info",
	}
	must(os.MkdirAll(cfg.State, 0o700))
	record, err := openRecord(cfg.Directories, nil)
	must(err)
	dp, err := datapath.Load(t.Context(), datapath.Options{
		Dir: cfg.BPFFS, StateDir: cfg.State, NodeConfig: cfg.nodeConfig(programMode{snatGiven: snatGiven{snat: cfg.snatPorts()}}, false), SnatEntries: cfg.SnatEntries, Log: cfg.Log, Spec: pins.Stubs(t),
	})
	must(err)
	host, err := device.Open()
	must(err)
	t.Cleanup(func() {
		host.Close()
		if err := dp.Close(); err != nil {
			t.Error(err)
		}
	})
	n := &node{cfg: cfg, log: cfg.Log, host: host, dp: dp, status: newStatus(cfg.Log), complaints: newComplaints(cfg.Log)}
	mode := newMode(n)
	mode.beginWith(snatGiven{snat: cfg.snatPorts()})
	return newLoop(n, mode, newSysctls(n, record), plan.Standing{}, observe.Cluster{})
}

// logged has what is logged from now on.
func logged(l *loop) *bytes.Buffer {
	log := &bytes.Buffer{}
	l.log = slog.New(slog.NewTextHandler(log, nil))
	l.complaints.log = l.log
	return log
}

func list(nodes ...plan.Node) source.Update {
	return source.Update{Nodes: nodes, Changed: time.Now()}
}

func n1() plan.Node {
	return plan.Node{Name: "n1", PodCIDRs: []string{"10.244.1.0/24"}, InternalIPs: []string{"172.18.0.11"}}
}

func n2() plan.Node {
	return plan.Node{Name: "n2", PodCIDRs: []string{"10.244.2.0/24"}, InternalIPs: []string{"172.18.0.12"}}
}

// ready makes the node carry pods.
func ready(t *testing.T, l *loop) {
	t.Helper()
	l.accept(list(n1(), n2()))
	l.pass(t.Context())
	if why := l.status.reason(); why != "" {
		t.Fatalf("not ready: %s", why)
	}
}

func (l *loop) destination(t *testing.T, prefix string) (destinations.Value, bool) {
	t.Helper()
	have, err := l.dp.Maps.Destinations.Content()
	if err != nil {
		t.Fatal(err)
	}
	v, ok := have[destinations.KeyFrom(netip.MustParsePrefix(prefix))]
	return v, ok
}

func (l *loop) route(t *testing.T, prefix string) bool {
	t.Helper()
	routes, err := l.host.OwnRoutes()
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range routes {
		if route.Dst.String() == prefix {
			return true
		}
	}
	return false
}

func TestPassMakesTheNode(t *testing.T) {
	l := testLoop(t)
	l.pass(t.Context())
	if why := l.status.reason(); !strings.Contains(why, "no complete list") {
		t.Errorf("before the first list: %q", why)
	}
	if _, err := os.Stat(l.files.listPath()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the list is there before the node can carry a pod: %v", err)
	}
	ready(t, l)
	if _, err := os.Stat(l.files.listPath()); err != nil {
		t.Error(err)
	}
	for prefix, kind := range map[string]destinations.Kind{
		"10.244.1.0/24": destinations.Local, "10.244.2.0/24": destinations.PodCIDR,
		"172.18.0.11/32": destinations.Host, "172.18.0.12/32": destinations.Node,
	} {
		if v, ok := l.destination(t, prefix); !ok || v.Kind != kind {
			t.Errorf("%s is %v, %v", prefix, v.Kind, ok)
		}
	}
	if !l.route(t, "10.244.1.0/24") || !l.route(t, "10.244.2.0/24") {
		t.Error("routes are missing")
	}
	for _, hook := range []attach.Hook{attach.FromUplink, attach.ToUplink} {
		if ok, err := l.dp.Attached(int(l.view.uplinks[0].Index), hook); !ok {
			t.Errorf("%s is not attached: %v", hook, err)
		}
	}
	if content, err := os.ReadFile(filepath.Join(l.cfg.Bin, install.Plugin)); string(content) != "plugin" {
		t.Errorf("plugin %q, error %v", content, err)
	}
}

func TestChangeOfANodeNeedsNoLook(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	moved := n2()
	moved.PodCIDRs = []string{"10.244.9.0/24"}
	l.accept(list(n1(), moved))
	if !l.replan(t.Context()) {
		t.Fatal(l.status.reason())
	}
	if _, ok := l.destination(t, "10.244.2.0/24"); ok || l.route(t, "10.244.2.0/24") {
		t.Error("the podCIDR of before is still there")
	}
	if _, ok := l.destination(t, "10.244.9.0/24"); !ok || !l.route(t, "10.244.9.0/24") {
		t.Error("the new podCIDR is not there")
	}
}

func TestWithoutAListNothingIsDeleted(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	// The next agent on this node, before it has heard of any Node.
	standing, err := readStanding(l.dp.Maps)
	if err != nil {
		t.Fatal(err)
	}
	l.known, l.nodes, l.standing = false, nil, standing
	l.accept(source.Update{Err: errors.New("connection refused")})
	l.pass(t.Context())
	for _, prefix := range []string{"10.244.1.0/24", "10.244.2.0/24", "172.18.0.12/32"} {
		if _, ok := l.destination(t, prefix); !ok {
			t.Errorf("%s is gone", prefix)
		}
	}
	if !l.route(t, "10.244.2.0/24") {
		t.Error("a route is gone")
	}
	if why := l.status.reason(); !strings.Contains(why, "connection refused") {
		t.Errorf("not ready: %q", why)
	}
	if _, err := os.Stat(l.files.listPath()); err != nil {
		t.Errorf("the list of before was taken away: %v", err)
	}
	// Repairs go on as well.
	if err := l.host.DeleteRoute(device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24")}); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if !l.route(t, "10.244.2.0/24") {
		t.Error("the route of what stands was not put back")
	}
}

func TestInspectRestoresPins(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	gone := []string{l.cfg.BPFFS.Map(endpoints.Name), l.cfg.BPFFS.Program("ec_from_pod"), l.files.listPath()}
	for _, path := range gone {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	index := int(l.view.uplinks[0].Index)
	if err := (attach.Attacher{Dir: l.cfg.BPFFS}).Detach(index, attach.ToUplink); err != nil {
		t.Fatal(err)
	}
	l.inspect(t.Context())
	for _, path := range gone {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if ok, err := l.dp.Attached(index, attach.ToUplink); !ok {
		t.Errorf("not attached again: %v", err)
	}
}
