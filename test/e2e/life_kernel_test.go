package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// objects are what the kernel has of a dataplane: pinned maps, programs and links, and what is attached to the
// interfaces, each with the kernel's number for it, which no two objects share.
func objects(t *testing.T, node *lab.Node) []string {
	t.Helper()
	dir := bpffs.Dir(node.BPFFS())
	var found []string
	for path, id := range pinnedObjects(t, dir) {
		found = append(found, fmt.Sprintf("pin %s %d", path, id))
	}
	for place, ids := range attachedPrograms(t, node) {
		found = append(found, fmt.Sprintf("attached %s %d", place, ids))
	}
	slices.Sort(found)
	return found
}

// pinnedObjects are the numbers of the objects below the pin directory, by path.
func pinnedObjects(t *testing.T, dir bpffs.Dir) map[string]uint32 {
	t.Helper()
	found := map[string]uint32{}
	for sub, read := range map[string]func(string) (uint32, error){dir.Maps(): mapNumber, dir.Programs(): programNumber, dir.Links(): linkNumber} {
		entries, err := os.ReadDir(sub)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		for _, entry := range entries {
			path := filepath.Join(sub, entry.Name())
			number, err := read(path)
			if err != nil {
				t.Fatalf("read pin %s: %v", path, err)
			}
			found[path] = number
		}
	}
	return found
}

func mapNumber(path string) (uint32, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return uint32(id), nil
}

func programNumber(path string) (uint32, error) {
	p, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return uint32(id), nil
}

func linkNumber(path string) (uint32, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0, err
	}
	return uint32(info.ID), nil
}

// attachedPrograms are the numbers of the programs at each hook of each interface, by "INTERFACE DIRECTION MECHANISM", in the
// order in which they run.
func attachedPrograms(t *testing.T, node *lab.Node) map[string][]uint32 {
	t.Helper()
	found := map[string][]uint32{}
	links, err := lab.RetryInterrupted(node.Netlink().LinkList)
	if err != nil {
		t.Fatal(err)
	}
	err = node.Do(func() error {
		for _, l := range links {
			for direction, attach := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
				result, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: attach})
				if errors.Is(err, unix.EINVAL) {
					break // Linux before 6.6 does not know what is asked for
				}
				if err != nil {
					return fmt.Errorf("query %s of %s: %w", direction, l.Attrs().Name, err)
				}
				for _, p := range result.Programs {
					place := l.Attrs().Name + " " + direction + " tcx"
					found[place] = append(found[place], uint32(p.ID))
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		for direction, parent := range map[string]uint32{"ingress": netlink.HANDLE_MIN_INGRESS, "egress": netlink.HANDLE_MIN_EGRESS} {
			filters, err := node.Netlink().FilterList(l, parent)
			if err != nil {
				continue // no such qdisc
			}
			for _, f := range filters {
				if b, ok := f.(*netlink.BpfFilter); ok {
					place := l.Attrs().Name + " " + direction + " clsact"
					found[place] = append(found[place], uint32(b.Id))
				}
			}
		}
	}
	return found
}

// assertOnlyPinned: every program that is attached is one that is pinned, and each interface that should has some.
func assertOnlyPinned(t *testing.T, node *lab.Node, when string) {
	t.Helper()
	dir := bpffs.Dir(node.BPFFS())
	pinned := map[uint32]string{}
	for path, id := range pinnedObjects(t, dir) {
		if filepath.Dir(path) == dir.Programs() {
			pinned[id] = filepath.Base(path)
		}
	}
	places := attachedPrograms(t, node)
	if want := len(node.Pods()) + len(attach.UplinkHooks()) + len(attach.TunnelHooks()); len(places) != want {
		t.Errorf("%s: programs at %d hooks of %s, want %d (each pod, and those of the uplink and the tunnel): %v", when, len(places), node.Name, want, places)
	}
	for place, ids := range places {
		if len(ids) != 1 || pinned[ids[0]] == "" {
			t.Errorf("%s: %s of %s carries the programs %v, want one of the pinned %v", when, place, node.Name, ids, pinned)
		}
	}
}

// changing are what the programs write into entries that the agent and the plugin make.
var changing = []string{"packets", "bytes", "snat_flows", "conntrack_flows", "neighbour_checked", "learnt_mtu"}

// inventory is all that agent and plugin have made on a node, but for sysctls: network, files, and map entries without
// what the programs write into them.
func inventory(t *testing.T, node *lab.Node) lab.Snapshot {
	t.Helper()
	return append(networkAndFiles(t, node), mapEntries(t, node)...)
}

func mapEntries(t *testing.T, node *lab.Node) []string {
	t.Helper()
	var lines []string
	for _, table := range []string{"config", "destinations", "devices", "endpoints", "uplinks"} {
		raw, err := node.Ebpfctl(t.Context(), "dump", table, "-o", "json")
		if err != nil {
			lines = append(lines, fmt.Sprintf("map %s: %v", table, err)) // its pin has been taken away
			continue
		}
		var rows []map[string]any
		if err := json.Unmarshal(raw, &rows); err != nil {
			t.Fatalf("dump of %s: %v\n%s", table, err, raw)
		}
		for _, row := range rows {
			for _, field := range changing {
				delete(row, field)
			}
			lines = append(lines, fmt.Sprintf("map %s %v", table, row))
		}
	}
	slices.Sort(lines)
	return lines
}
