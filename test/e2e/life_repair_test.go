package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	stdmaps "maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/hostports"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// What is promised: a second for what the agent hears of, more for map entries.
const (
	repairPromise = time.Second
	entryPromise  = 30 * time.Second
)

// original is what a node was like before it was damaged.
type original struct {
	look func() lab.Snapshot
	was  lab.Snapshot
	took time.Duration // to look
}

func lookAt(look func() lab.Snapshot) *original {
	started := time.Now()
	was := look()
	return &original{look, was, time.Since(started)}
}

// assertBack waits until all is as it was: as long as is promised, and as three looks take. On a busy machine those take longer,
// and so does everything else.
func (o *original) assertBack(t *testing.T, promise time.Duration, what string) {
	t.Helper()
	longest := o.took
	for started := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		began := time.Now()
		diff := cmp.Diff(o.was, o.look())
		longest = max(longest, time.Since(began))
		limit := (promise + 3*longest).Round(time.Millisecond)
		if diff == "" {
			t.Logf("%s: back after %v, of at most %v", what, time.Since(started).Round(time.Millisecond), limit)
			return
		}
		if began.Sub(started) > limit {
			t.Errorf("%s: not back after %v:\n%s", what, limit, diff)
			return
		}
	}
}

// damaged is a node on which things are broken, one after the other.
type damaged struct {
	*lab.Lab
	node *lab.Node
	pod  *lab.Pod
	link netlink.Link // the pod's host side
	dir  bpffs.Dir
}

func startDamaged(t *testing.T, flags []string, expected ...drops.Reason) *damaged {
	t.Helper()
	d := &damaged{Lab: startCluster(t, lab.Options{Nodes: 2, AgentFlags: flags}, expected...)}
	d.node = d.Nodes[0]
	d.pod = addPod(t, d.node, "a")
	d.dir = bpffs.Dir(d.node.BPFFS())
	var err error
	if d.link, err = d.node.Netlink().LinkByName(d.pod.Result.Interfaces[0].Name); err != nil {
		t.Fatal(err)
	}
	return d
}

// state is what has to come back: everything, and the few sysctls that are ours.
func (d *damaged) state(t *testing.T) lab.Snapshot {
	t.Helper()
	// The record of sysctls tells what was found, repairs included.
	state := inventory(t, d.node).Without("/node.json")
	for _, name := range d.sysctls() {
		value, err := d.node.ReadSysctl(name)
		if errors.Is(err, fs.ErrNotExist) { // its link is gone, for a moment
			value, err = "gone", nil
		}
		if err != nil {
			t.Fatal(err)
		}
		state = append(state, name+" = "+value)
	}
	if device, err := d.node.Netlink().LinkByName(tunnelDevice); err == nil {
		state = append(state, fmt.Sprintf("%s without ARP: %t", tunnelDevice, device.Attrs().RawFlags&unix.IFF_NOARP != 0))
	}
	list, err := os.ReadFile(d.node.Conflist())
	return append(state, fmt.Sprintf("list %s (error %v)", list, err))
}

func (d *damaged) sysctls() []string {
	conf := "net/ipv4/conf/"
	host := d.link.Attrs().Name
	return []string{
		"net/ipv4/ip_forward", "net/ipv4/ip_local_reserved_ports", conf + lab.Uplink + "/forwarding", conf + host + "/forwarding", conf + host + "/rp_filter",
		conf + tunnelDevice + "/forwarding", conf + tunnelDevice + "/rp_filter",
	}
}

// What the other test of repairs (TestWhatIsRemovedComesBack) does not take away. Connections live through all of it.
func TestLifeRepairs(t *testing.T) {
	t.Parallel()
	forEachAttach(t, func(t *testing.T, attach string) {
		// Without its neighbour the node asks for the pod's address, and a pod's answer goes nowhere.
		d := startDamaged(t, []string{attach}, drops.NotIP)
		at, own := serve(t, d.Outside), serve(t, d.pod.Namespace)
		assertReaches(t, d.pod.Namespace, at, d.node.Addr())
		tcp := connect(t, d.pod.Namespace, at, 0, 2)
		before := lookAt(func() lab.Snapshot { return d.state(t) })
		maps := d.mapNumbers(t)
		sysctl := func(name, value string) func() error {
			return func() error { return d.node.WriteSysctl(name, value) }
		}
		breaks := map[string]func() error{
			"every map's pin":     func() error { return emptyDir(d.dir.Maps()) },
			"every program's pin": func() error { return emptyDir(d.dir.Programs()) },
			"all pins and directories": func() error {
				return errors.Join(os.RemoveAll(d.dir.Maps()), os.RemoveAll(d.dir.Programs()), os.RemoveAll(d.dir.Links()))
			},
			"the pod's attachment":      func() error { return d.detach(attach, d.link.Attrs().Index, "from_pod") },
			"one of the uplink's":       func() error { return d.detach(attach, d.uplink(t), "to_uplink") },
			"the list, by another file": func() error { return replaceFile(d.node.Conflist()) },
			"the pod's link":            func() error { return d.node.Netlink().LinkSetDown(d.link) },
			"its Ethernet address": func() error {
				return d.node.Netlink().LinkSetHardwareAddr(d.link, net.HardwareAddr{2, 1, 2, 3, 4, 5})
			},
			"forwarding":              sysctl("net/ipv4/ip_forward", "0"),
			"the uplink's forwarding": sysctl("net/ipv4/conf/"+lab.Uplink+"/forwarding", "0"),
			"the pod's forwarding":    sysctl("net/ipv4/conf/"+d.link.Attrs().Name+"/forwarding", "0"),
			"the pod's rp_filter":     sysctl("net/ipv4/conf/"+d.link.Attrs().Name+"/rp_filter", "2"),
			"the reserved ports":      sysctl("net/ipv4/ip_local_reserved_ports", "\n"),
		}
		stdmaps.Copy(breaks, d.tunnelBreaks(t, attach))
		if attach == "--attach=tcx" {
			breaks["a link that is severed"] = func() error { return sever(d.dir.Link("from_uplink", d.uplink(t))) }
		}
		for name, do := range breaks {
			if err := do(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			before.assertBack(t, repairPromise, name)
			if _, err := d.node.TCP(t.Context(), own); err != nil {
				t.Errorf("%s: the node does not reach its pod any more: %v", name, err)
			}
		}
		if diff := cmp.Diff(maps, d.mapNumbers(t)); diff != "" {
			t.Errorf("the maps are others than before:\n%s", diff)
		}
		tcp.assertAlive(t, "after all repairs")
		assertReaches(t, d.pod.Namespace, at, d.node.Addr())
	})
}

// Map entries that somebody deletes come back, whoever made them.
func TestLifeMapEntriesComeBack(t *testing.T) {
	t.Parallel()
	// Of packets that a pod without an entry sends, and of its answer when the node asks for its address.
	d := startDamaged(t, nil, drops.SpoofedSource, drops.NotIP)
	addHosted(t, d.node, "hosted", ports(anyPort, both)...)
	eventually(t, changeLimit, "the host port is reserved", func() bool { return isReserved(t, d.node, anyPort) })
	before := lookAt(func() lab.Snapshot { return append(d.state(t), fmt.Sprint(dump(t, d.node, "hostports"))) })
	for name, err := range map[string]error{
		endpoints.Name:    emptyMap(d.dir, endpoints.Open, endpoints.Name),
		hostports.Name:    emptyMap(d.dir, hostports.Open, hostports.Name),
		devices.Name:      emptyMap(d.dir, devices.Open, devices.Name),
		destinations.Name: emptyMap(d.dir, destinations.Open, destinations.Name),
		uplinks.Name:      emptyMap(d.dir, uplinks.Open, uplinks.Name),
		config.Name:       d.clearConfig(),
		// Nothing tells of this one either.
		"neighbour": d.node.Netlink().NeighDel(&netlink.Neigh{LinkIndex: d.link.Attrs().Index, IP: d.pod.Addr().AsSlice()}),
	} {
		if err != nil {
			t.Fatalf("break %s: %v", name, err)
		}
	}
	before.assertBack(t, entryPromise, "all map entries")
	if _, err := d.node.TCP(t.Context(), serve(t, d.pod.Namespace)); err != nil {
		t.Errorf("the node does not reach its pod: %v", err)
	}
	assertReaches(t, d.pod.Namespace, serve(t, d.Outside), d.node.Addr())
	assertReaches(t, d.pod.Namespace, serve(t, addPod(t, d.Nodes[1], "far").Namespace), d.pod.Addr())
}

func (d *damaged) uplink(t *testing.T) int {
	t.Helper()
	l, err := d.node.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Index
}

// mapNumbers tells maps from others of the same name.
func (d *damaged) mapNumbers(t *testing.T) map[string]uint32 {
	t.Helper()
	found := map[string]uint32{}
	for path, id := range pinnedObjects(t, d.dir) {
		if filepath.Dir(path) == d.dir.Maps() {
			found[path] = id
		}
	}
	return found
}

// detach takes one program off an interface: the pin of its link, or its filter.
func (d *damaged) detach(attach string, index int, hook string) error {
	if attach == "--attach=tcx" {
		return os.Remove(d.dir.Link(hook, index))
	}
	l, err := d.node.Netlink().LinkByIndex(index)
	if err != nil {
		return err
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := d.node.Netlink().FilterList(l, parent)
		if err != nil {
			return err
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); ok && b.Name == "ec_"+hook {
				return d.node.Netlink().FilterDel(f)
			}
		}
	}
	return errors.New("there is no such filter")
}

// sever detaches a link whose pin stays.
func sever(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Detach()
}

// emptyDir removes what is in a directory.
func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("%s is empty already", dir)
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// replaceFile puts a file in the place of another, with the same length and times, as an installer might.
func replaceFile(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	next := path + ".next"
	if err := os.WriteFile(next, []byte(strings.Repeat("x", int(info.Size()))), 0o644); err != nil {
		return err
	}
	return errors.Join(os.Chtimes(next, info.ModTime(), info.ModTime()), os.Rename(next, path))
}

func emptyMap[K comparable, V any](dir bpffs.Dir, open func(string) (*typed.Map[K, V], error), name string) error {
	m, err := open(dir.Map(name))
	if err != nil {
		return err
	}
	defer m.Close()
	var keys []K
	for e, err := range m.All() {
		if err != nil {
			return err
		}
		keys = append(keys, e.Key)
	}
	if len(keys) == 0 {
		return errors.New("it is empty already")
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil {
			return err
		}
	}
	return nil
}

// clearConfig leaves the layout, without which the plugin would refuse pods.
func (d *damaged) clearConfig() error {
	m, err := config.Open(d.dir.Map(config.Name))
	if err != nil {
		return err
	}
	defer m.Close()
	value, err := m.Get(config.Key{})
	if err != nil {
		return err
	}
	return m.Update(&config.Key{}, &config.Value{Layout: value.Layout}, unix.BPF_EXIST)
}
