package agent

import (
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
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/datapath"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/install"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// newReconciler makes a node in a namespace of the test's own, with one uplink.
// The test must stay on its goroutine: only that one is inside.
func newReconciler(t *testing.T) *reconciler {
	t.Helper()
	pins := filepath.Join(priv.Isolate(t), "ecag")
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
		l, err := netlink.LinkByName(name)
		must(err)
		must(netlink.LinkSetUp(l))
		if name == "uplink" {
			a, err := netlink.ParseAddr("172.18.0.11/24")
			must(err)
			must(netlink.AddrAdd(l, a))
		}
	}
	plugin := filepath.Join(dir, "image", install.Plugin)
	must(os.MkdirAll(filepath.Dir(plugin), 0o755))
	must(os.WriteFile(plugin, []byte("plugin"), 0o755))
	cfg := Config{
		Directories: Directories{
			BPFFS: bpffs.Dir(pins), State: filepath.Join(dir, "state"), Conf: filepath.Join(dir, "conf"),
			Bin: filepath.Join(dir, "bin"), ProcSys: "/proc/sys", Plugin: plugin,
		},
		Node: "n1", Masquerade: true, SnatLow: 50000, SnatHigh: 60000, SnatEntries: 1024, Mark: 0x00800000,
		Log: slog.New(slog.DiscardHandler), LogLevel: "info",
	}
	must(os.MkdirAll(cfg.State, 0o700))
	record, err := openRecord(cfg.Directories, nil)
	must(err)
	dp, err := datapath.Load(t.Context(), datapath.Options{
		Dir: cfg.BPFFS, StateDir: cfg.State, NodeConfig: cfg.nodeConfig(false), SnatEntries: cfg.SnatEntries, Log: cfg.Log,
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
	return &reconciler{
		cfg: cfg, log: cfg.Log, host: host, dp: dp, status: newStatus(cfg.Log),
		sysctls:  sysctls{device.Sysctl{Dir: cfg.ProcSys}, record, cfg.Log},
		attached: map[uint32]string{}, reported: map[string]bool{}, translation: translation{watch: netfilter.New()}, orphans: newOrphans(), modes: newModes(), absences: newAbsences(cfg.Log),
	}
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
func ready(t *testing.T, r *reconciler) {
	t.Helper()
	r.take(list(n1(), n2()))
	r.pass(t.Context())
	if why := r.status.reason(); why != "" {
		t.Fatalf("not ready: %s", why)
	}
}

func (r *reconciler) destination(t *testing.T, prefix string) (destinations.Value, bool) {
	t.Helper()
	have, err := r.dp.Maps.Destinations.Content()
	if err != nil {
		t.Fatal(err)
	}
	v, ok := have[destinations.KeyFrom(netip.MustParsePrefix(prefix))]
	return v, ok
}

func (r *reconciler) route(t *testing.T, prefix string) bool {
	t.Helper()
	routes, err := r.host.OwnRoutes()
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
	r := newReconciler(t)
	r.pass(t.Context())
	if why := r.status.reason(); !strings.Contains(why, "no complete list") {
		t.Errorf("before the first list: %q", why)
	}
	if _, err := os.Stat(r.listPath()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the list is there before the node can carry a pod: %v", err)
	}
	ready(t, r)
	if _, err := os.Stat(r.listPath()); err != nil {
		t.Error(err)
	}
	for prefix, kind := range map[string]destinations.Kind{
		"10.244.1.0/24": destinations.Local, "10.244.2.0/24": destinations.PodCIDR,
		"172.18.0.11/32": destinations.Host, "172.18.0.12/32": destinations.Node,
	} {
		if v, ok := r.destination(t, prefix); !ok || v.Kind != kind {
			t.Errorf("%s is %v, %v", prefix, v.Kind, ok)
		}
	}
	if !r.route(t, "10.244.1.0/24") || !r.route(t, "10.244.2.0/24") {
		t.Error("routes are missing")
	}
	for _, hook := range []attach.Hook{attach.FromUplink, attach.ToUplink} {
		if ok, err := r.dp.Attached(int(r.view.uplinks[0].Index), hook); !ok {
			t.Errorf("%s is not attached: %v", hook, err)
		}
	}
	if content, err := os.ReadFile(filepath.Join(r.cfg.Bin, install.Plugin)); string(content) != "plugin" {
		t.Errorf("plugin %q, error %v", content, err)
	}
}

func TestChangeOfANodeNeedsNoLook(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	moved := n2()
	moved.PodCIDRs = []string{"10.244.9.0/24"}
	r.take(list(n1(), moved))
	if err := r.replan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.destination(t, "10.244.2.0/24"); ok || r.route(t, "10.244.2.0/24") {
		t.Error("the podCIDR of before is still there")
	}
	if _, ok := r.destination(t, "10.244.9.0/24"); !ok || !r.route(t, "10.244.9.0/24") {
		t.Error("the new podCIDR is not there")
	}
}

func TestWithoutAListNothingIsDeleted(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	// The next agent on this node, before it has heard of any Node.
	standing, err := readStanding(r.dp.Maps)
	if err != nil {
		t.Fatal(err)
	}
	r.known, r.nodes, r.standing = false, nil, standing
	r.take(source.Update{Err: errors.New("connection refused")})
	r.pass(t.Context())
	for _, prefix := range []string{"10.244.1.0/24", "10.244.2.0/24", "172.18.0.12/32"} {
		if _, ok := r.destination(t, prefix); !ok {
			t.Errorf("%s is gone", prefix)
		}
	}
	if !r.route(t, "10.244.2.0/24") {
		t.Error("a route is gone")
	}
	if why := r.status.reason(); !strings.Contains(why, "connection refused") {
		t.Errorf("not ready: %q", why)
	}
	if _, err := os.Stat(r.listPath()); err != nil {
		t.Errorf("the list of before was taken away: %v", err)
	}
	// Repairs go on as well.
	if err := r.host.DeleteRoute(device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24")}); err != nil {
		t.Fatal(err)
	}
	r.pass(t.Context())
	if !r.route(t, "10.244.2.0/24") {
		t.Error("the route of what stands was not put back")
	}
}

func TestForeignRouteStays(t *testing.T) {
	r := newReconciler(t)
	l, err := r.host.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	foreign := device.Route{Dst: netip.MustParsePrefix("10.244.2.0/24"), Index: l.Index, Gateway: netip.MustParseAddr("172.18.0.99"), Foreign: true}
	if err := r.host.ReplaceRoute(foreign); err != nil {
		t.Fatal(err)
	}
	r.take(list(n1(), n2()))
	r.pass(t.Context())
	routes, err := r.host.Routes()
	if err != nil {
		t.Fatal(err)
	}
	for _, have := range routes {
		if have.Dst == foreign.Dst && (have.Gateway != foreign.Gateway || have.Protocol == device.Protocol) {
			t.Errorf("the route is now %+v", have)
		}
	}
	if r.route(t, "10.244.2.0/24") {
		t.Error("a second route stands beside somebody else's")
	}
}

func TestInspectRestoresPins(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	gone := []string{r.cfg.BPFFS.Map(endpoints.Name), r.cfg.BPFFS.Program("ec_from_pod"), r.listPath()}
	for _, path := range gone {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	index := int(r.view.uplinks[0].Index)
	if err := r.dp.Detach(index, attach.ToUplink); err != nil {
		t.Fatal(err)
	}
	r.inspect(t.Context())
	for _, path := range gone {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if ok, err := r.dp.Attached(index, attach.ToUplink); !ok {
		t.Errorf("not attached again: %v", err)
	}
}

func TestUplinksAreFollowed(t *testing.T) {
	r := newReconciler(t)
	ready(t, r)
	far, err := netlink.LinkByName("far")
	if err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr("192.168.9.1/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(far, a); err != nil {
		t.Fatal(err)
	}
	r.pass(t.Context())
	index := far.Attrs().Index
	if ok, err := r.dp.Attached(index, attach.FromUplink); !ok {
		t.Fatalf("a new route's interface is no uplink: %v", err)
	}
	if err := netlink.AddrDel(far, a); err != nil {
		t.Fatal(err)
	}
	r.absences.grace = 0
	r.pass(t.Context())
	if ok, _ := r.dp.Attached(index, attach.FromUplink); ok {
		t.Error("an interface without routes is still an uplink")
	}
	if len(r.result.Uplinks) != 1 {
		t.Errorf("uplinks %v", r.result.Uplinks)
	}
}
