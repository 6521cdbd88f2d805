package cni

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	mapconfig "github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// What a node of the tests has of each family, and its first pod.
var (
	nodeIPs   = [wire.Families]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	podCIDRs  = [wire.Families]netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("fd00:9::/64")}
	firstPods = [wire.Families]netip.Addr{netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("fd00:9::2")}
	gateways  = [wire.Families]netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}
)

// fixture is a node without an agent: a namespace with an address, a BPF file system with the real maps and the real
// program pinned, a state directory, and the plugin. It belongs to the test's goroutine, which must not change.
type fixture struct {
	t        testing.TB
	families []wire.Family // in the order of its podCIDRs
	pins     bpffs.Dir
	stateDir string
	plugins  string
	conf     map[string]any
	env      []string
	host     *device.Handle
}

// newFixture makes a node of these families, or of IPv4 alone.
func newFixture(t testing.TB, families ...wire.Family) *fixture {
	t.Helper()
	if len(families) == 0 {
		families = []wire.Family{wire.IPv4}
	}
	w := &fixture{t: t, families: families, pins: bpffs.Dir(filepath.Join(priv.Isolate(t), "ec")), stateDir: t.TempDir(), plugins: t.TempDir()}
	self, err := os.Executable()
	w.must(err)
	for _, name := range []string{"ebpf-cni", ipamName} {
		w.must(os.Symlink(self, filepath.Join(w.plugins, name)))
	}
	w.conf = map[string]any{
		"cniVersion": "1.1.0", "name": "net1", "type": "ebpf-cni", "bpffs": string(w.pins), "stateDir": w.stateDir,
		"mtu": 1400, "logLevel": "debug",
		"ipam": map[string]any{"type": "host-local", "ranges": rangesOf(families...)},
	}
	w.host, err = device.Open()
	w.must(err)
	t.Cleanup(w.host.Close)
	lo, err := w.host.LinkByName("lo")
	w.must(err)
	w.must(w.host.SetUp(lo.Index))
	for _, f := range families {
		w.must(w.host.AddAddress(lo.Index, whole(nodeIPs[f])))
	}
	w.pinDataplane()
	return w
}

func (w *fixture) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// pinDataplane does what the agent does before it writes the conflist.
func (w *fixture) pinDataplane() {
	w.t.Helper()
	w.must(w.pins.Prepare())
	spec, err := bpf.LoadDataplane()
	w.must(err)
	for name, m := range spec.Maps {
		if m.MaxEntries > 4096 {
			spec.Maps[name].MaxEntries = 4096
		}
	}
	hooks := attach.PodHooks()
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool {
		return !slices.ContainsFunc(hooks, func(h attach.Hook) bool { return h.Program() == name })
	})
	all, err := ebpf.NewCollection(spec)
	w.must(err)
	defer all.Close()
	for _, name := range []string{
		endpoints.Name, devices.Name, destinations.Name, hostports.Name, mapconfig.Name, services.Name, services.NamesName,
	} {
		w.must(all.Maps[name].Pin(w.pins.Map(name)))
	}
	for _, hook := range hooks {
		w.must(all.Programs[hook.Program()].Pin(w.pins.Program(hook.Program())))
	}
	w.setConfig(w.config())
}

// config is the agent's record of the node.
func (w *fixture) config() mapconfig.Value {
	v := mapconfig.Value{Layout: wire.LayoutVersion, NodeAddresses: wire.AddressesFrom(w.pick(nodeIPs)...)}
	for _, f := range w.families {
		v.SetPodCIDR(podCIDRs[f])
	}
	return v
}

func (w *fixture) setConfig(v mapconfig.Value) {
	w.t.Helper()
	m, err := mapconfig.Open(w.pins.Map(mapconfig.Name))
	w.must(err)
	defer m.Close()
	w.must(m.Put(mapconfig.Key{}, v))
}

// pod is a namespace and a name for it.
type pod struct {
	w  *fixture
	ns *device.NetNS
	id endpoint.ID
}

func (w *fixture) newPod() *pod {
	w.t.Helper()
	p := &pod{w: w}
	priv.InNetNS(w.t, func() (err error) {
		p.ns, err = device.CurrentNetNS()
		return err
	})
	ns := p.ns
	w.t.Cleanup(func() { ns.Close() })
	var id [32]byte
	_, _ = rand.Read(id[:])
	p.id = endpoint.ID{ContainerID: hex.EncodeToString(id[:]), IfName: "eth0"}
	return p
}

// path names the namespace for other processes. It is gone once the namespace is closed.
func (p *pod) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.ns.FD()) }

// call executes the plugin. Environment entries replace what the call would have, "X=" included.
func (w *fixture) call(verb string, p *pod, conf map[string]any, env ...string) (string, *types.Error) {
	w.t.Helper()
	full := maps.Clone(w.conf)
	for k, v := range conf {
		if full[k] = v; v == nil {
			delete(full, k)
		}
	}
	raw, err := json.Marshal(full)
	w.must(err)
	return w.callRaw(verb, p, raw, env...)
}

func (w *fixture) callRaw(verb string, p *pod, conf []byte, env ...string) (string, *types.Error) {
	w.t.Helper()
	cmd := w.command(verb, p, conf, env...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	w.t.Logf("%s: %v\n%s%s", verb, err, out.String(), log.String())
	if err == nil {
		return out.String() + "\n" + log.String(), nil
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		w.t.Fatal(err)
	}
	if status, ok := exit.Sys().(interface{ Signaled() bool }); ok && status.Signaled() {
		return "", &types.Error{Msg: "killed"}
	}
	e := &types.Error{}
	if json.Unmarshal(out.Bytes(), e) != nil {
		w.t.Fatalf("%s failed without an error in JSON: %s\n%s", verb, out.String(), log.String())
	}
	return log.String(), e
}

// start starts the plugin from the test's goroutine; what it returns waits for the end.
func (w *fixture) start(verb string, p *pod, conf []byte) func() (string, error) {
	w.t.Helper()
	cmd := w.command(verb, p, conf)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	w.must(cmd.Start())
	return func() (string, error) {
		err := cmd.Wait()
		return out.String(), err
	}
}

func (w *fixture) command(verb string, p *pod, conf []byte, env ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(w.plugins, "ebpf-cni"))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_PATH=" + w.plugins, "PATH=/nowhere"}
	if p != nil {
		cmd.Env = append(cmd.Env, "CNI_CONTAINERID="+p.id.ContainerID, "CNI_IFNAME="+p.id.IfName)
		if p.ns != nil {
			cmd.Env = append(cmd.Env, "CNI_NETNS="+p.path())
		}
	}
	cmd.Env = append(append(cmd.Env, w.env...), env...)
	cmd.Stdin = bytes.NewReader(conf)
	return cmd
}

// add is an ADD that must succeed, and its result.
func (w *fixture) add(p *pod, conf map[string]any, env ...string) *current.Result {
	w.t.Helper()
	out, e := w.call("ADD", p, conf, env...)
	if e != nil {
		w.t.Fatalf("ADD: code %d, %s", e.Code, e)
	}
	return parseResult(w.t, out)
}

func parseResult(t testing.TB, out string) *current.Result {
	t.Helper()
	var probe struct{ CNIVersion string }
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&probe); err != nil {
		t.Fatal(err)
	}
	r := &current.Result{}
	if err := json.NewDecoder(strings.NewReader(out)).Decode(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// ok is an operation that must succeed.
func (w *fixture) ok(verb string, p *pod, conf map[string]any, env ...string) {
	w.t.Helper()
	if _, e := w.call(verb, p, conf, env...); e != nil {
		w.t.Fatalf("%s: code %d, %s", verb, e.Code, e)
	}
}

// refused is an operation that must fail with the code and name the words.
func (w *fixture) refused(code uint, verb string, p *pod, conf map[string]any, words ...string) {
	w.t.Helper()
	_, e := w.call(verb, p, conf)
	w.isError(e, code, words...)
}

func (w *fixture) isError(e *types.Error, code uint, words ...string) {
	w.t.Helper()
	if e == nil {
		w.t.Fatalf("succeeded, want error %d", code)
	}
	if e.Code != code {
		w.t.Errorf("error %d (%s), want %d", e.Code, e, code)
	}
	for _, word := range words {
		if !strings.Contains(e.Error(), word) {
			w.t.Errorf("error %q does not say %q", e, word)
		}
	}
}

// gcList is the configuration of a GC that keeps these pods.
func gcList(pods ...*pod) map[string]any {
	list := []map[string]string{}
	for _, p := range pods {
		list = append(list, map[string]string{"containerID": p.id.ContainerID, "ifname": p.id.IfName})
	}
	return map[string]any{gcKey: list}
}

// everything is all that the plugin can leave on a node, in text.
func (w *fixture) everything() []string {
	w.t.Helper()
	var all []string
	note := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	links, err := w.host.Links()
	w.must(err)
	for _, l := range links {
		note("link %d %s", l.Index, l.Name)
		neighbours, err := w.host.Neighbours(l.Index)
		w.must(err)
		for _, n := range neighbours {
			if n.Permanent {
				note("neighbour %s", n.Addr)
			}
		}
	}
	routes, err := w.host.OwnRoutes()
	w.must(err)
	for _, r := range routes {
		note("route %s", r.Dst)
	}
	pins, err := os.ReadDir(w.pins.Links())
	if !errors.Is(err, fs.ErrNotExist) {
		w.must(err)
	}
	for _, p := range pins {
		note("pin %s", p.Name())
	}
	all = append(all, entriesOf(w, endpoints.Open, endpoints.Name)...)
	all = append(all, entriesOf(w, devices.Open, devices.Name)...)
	all = append(all, entriesOf(w, destinations.Open, destinations.Name)...)
	all = append(all, entriesOf(w, hostports.Open, hostports.Name)...)
	all = append(all, w.files()...)
	slices.Sort(all)
	return all
}

// files of the state directory, but for what is there for good once it was used, for resting addresses, and for notes of
// who holds the lock, which a kill leaves until somebody has it alone.
func (w *fixture) files() []string {
	var all []string
	w.must(filepath.WalkDir(w.stateDir, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		if err != nil || d.IsDir() || name == "lock" || name == "gate" || name == ".lock" || name == endpoint.HostPortsFile || name == endpoint.IgnoredFile || strings.HasPrefix(name, "last_reserved_ip.") ||
			strings.HasPrefix(name, "quarantine.") || filepath.Base(filepath.Dir(path)) == "holders" {
			return err
		}
		rel, err := filepath.Rel(w.stateDir, path)
		all = append(all, "file "+rel)
		return err
	}))
	return all
}

func entriesOf[K comparable, V any](w *fixture, open func(string) (*typed.Map[K, V], error), name string) []string {
	w.t.Helper()
	m, err := open(w.pins.Map(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	w.must(err)
	defer m.Close()
	var all []string
	for e, err := range m.All() {
		w.must(err)
		all = append(all, fmt.Sprintf("%s %v", name, e.Key))
	}
	return all
}

// unchanged fails the test unless the node is as it was.
func (w *fixture) unchanged(before []string) {
	w.t.Helper()
	if diff := cmp.Diff(before, w.everything()); diff != "" {
		w.t.Errorf("left behind (+) or lost (-):\n%s", diff)
	}
}

// used are the addresses in use.
func (w *fixture) used() []string {
	w.t.Helper()
	list, err := ipam.List(w.stateDir)
	w.must(err)
	var all []string
	for _, e := range list {
		if e.State == ipam.Used {
			all = append(all, e.Address.String())
		}
	}
	return all
}
