package endpoint

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

func example() Endpoint {
	id := ID{"abc", "eth0"}
	return Endpoint{
		ID: id, Network: "net1", NetNS: "/run/netns/x", NetNSInode: 4026532000, HostName: id.HostLinkName(), HostIndex: 42,
		HostMAC: wire.MAC{2, 0, 0, 0, 0, 1}, Pod: "shop/web", PodUID: "6ba7", PodMAC: wire.MAC{2, 0, 0, 0, 0, 2}, MTU: 1400,
		Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("fd00::2")}, IPAM: HostLocal, Portmap: true,
		HostPorts: []HostPort{{netip.IPv4Unspecified(), 8080, "tcp", 80}, {netip.MustParseAddr("2001:db8::1"), 53, "udp", 5353}},
		Created:   time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Result: json.RawMessage(`{"cniVersion":"1.1.0"}`),
	}
}

var exact = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	// The file is indented, and so is what it holds.
	cmp.Comparer(func(a, b json.RawMessage) bool {
		return strings.Join(strings.Fields(string(a)), "") == strings.Join(strings.Fields(string(b)), "")
	}),
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWriteReadRemove(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	want := example()
	must(t, Write(dir, want))
	got, err := Read(dir, want.ID)
	must(t, err)
	if diff := cmp.Diff(want, got, exact); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	file := filepath.Join(dir, "endpoints", "abc:eth0.json")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("state file: %v, %v; want 0600", info, err)
	}
	if info, err := os.Stat(filepath.Dir(file)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("state directory: %v, %v; want 0700", info, err)
	}
	want.MTU = 9000
	must(t, Write(dir, want))
	if got, err = Read(dir, want.ID); err != nil || got.MTU != 9000 {
		t.Errorf("after writing again: %+v, %v", got, err)
	}
	must(t, os.WriteFile(file+".tmp", []byte("half"), 0o600)) // a killed Write
	for range 2 {
		must(t, Remove(dir, want.ID))
	}
	if _, err := Read(dir, want.ID); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after removing: %v", err)
	}
	if files, err := os.ReadDir(filepath.Dir(file)); err != nil || len(files) != 0 {
		t.Errorf("left: %v, %v", files, err)
	}
}

func TestListSparesTheGoodFromTheBad(t *testing.T) {
	dir := t.TempDir()
	if list, err := List(dir); err != nil || len(list) != 0 {
		t.Errorf("nothing there: %v, %v", list, err)
	}
	must(t, Write(dir, example()))
	for name, content := range map[string]string{
		"torn:eth0.json":      `{"container_id":"torn"`,
		"other:eth0.json":     `{"container_id":"abc","ifname":"eth0"}`,
		"bad:eth0.json":       `{"container_id":"bad","ifname":"eth0","addresses":[""]}`,
		"abc:eth0.json.tmp":   `{`,
		"nocolon.json":        `{`,
		"..:eth0.json":        `{`,
		"readme":              `hello`,
		"negative:eth0.json":  `{"container_id":"negative","ifname":"eth0","host_ifindex":-2}`,
		"badmac:eth0.json":    `{"container_id":"badmac","ifname":"eth0","pod_mac":"x"}`,
		"wrongtype:eth0.json": `[]`,
	} {
		must(t, os.WriteFile(filepath.Join(Dir(dir), name), []byte(content), 0o600))
	}
	list, err := List(dir)
	if len(list) != 1 || list[0].ID != example().ID {
		t.Errorf("list %+v, want the one good endpoint", list)
	}
	for _, name := range []string{"torn", "other", "bad", "negative", "badmac", "wrongtype"} {
		if err == nil || !strings.Contains(err.Error(), name+":eth0.json") {
			t.Errorf("the error does not name %s: %v", name, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), "readme") {
		t.Errorf("the error names a file that is not ours: %v", err)
	}
}

func TestNamesThatAreNoPathsNorLinks(t *testing.T) {
	for _, id := range []ID{
		{}, {"a", ""}, {"", "eth0"}, {"..", "eth0"}, {"a/b", "eth0"}, {"a", ".."}, {"a", "e/0"}, {"a", "e:0"}, {"a", "e\x00"},
		{"a", "sixteen-letters0"}, {"=a", "eth0"}, {"a:b", "eth0"}, {"a\n", "eth0"},
	} {
		e := example()
		e.ID = id
		dir := t.TempDir()
		if Write(dir, e) == nil {
			t.Errorf("Write accepted %q", id)
		}
		if _, err := Read(dir, id); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Read accepted %q", id)
		}
		if Remove(dir, id) == nil {
			t.Errorf("Remove accepted %q", id)
		}
		if (Releaser{StateDir: dir}).Release(context.Background(), id, "net1") == nil {
			t.Errorf("Release accepted %q", id)
		}
	}
}

// TestLongContainerIDs: the specification has no limit, the file system has one for names.
func TestLongContainerIDs(t *testing.T) {
	dir := t.TempDir()
	var ids []ID
	for _, length := range []int{200, 201, 255, 4000} {
		ids = append(ids, ID{strings.Repeat("a", length), "fifteen-letters"}, ID{strings.Repeat("a", length), "eth0"})
	}
	for _, id := range ids {
		e := example()
		e.ID, e.HostName = id, id.HostLinkName()
		must(t, Write(dir, e))
	}
	list, err := List(dir)
	must(t, err)
	if len(list) != len(ids) {
		t.Errorf("%d endpoints listed, want %d", len(list), len(ids))
	}
	known, err := Releaser{StateDir: dir}.knownNames(nil)
	must(t, err)
	for _, id := range ids {
		if e, err := Read(dir, id); err != nil || e.ID != id {
			t.Errorf("id of %d characters: read %v", len(id.ContainerID), err)
		}
		if !known[id.HostLinkName()] {
			t.Errorf("id of %d characters: its link would be taken for an orphan", len(id.ContainerID))
		}
		must(t, Remove(dir, id))
	}
	if files, err := os.ReadDir(Dir(dir)); err != nil || len(files) != 0 {
		t.Errorf("left: %v, %v", files, err)
	}
}

func TestFileOfAnotherLongIDIsNotRead(t *testing.T) {
	dir := t.TempDir()
	mine, other := ID{strings.Repeat("a", 300), "eth0"}, ID{strings.Repeat("b", 300), "eth0"}
	e := example()
	e.ID = other
	must(t, Write(dir, e))
	must(t, os.Rename(path(dir, other), path(dir, mine)))
	if _, err := Read(dir, mine); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the state of another was taken for ours: %v", err)
	}
	if list, err := List(dir); err == nil || len(list) != 0 {
		t.Errorf("listed %v, %v", list, err)
	}
}

func TestHostLinkName(t *testing.T) {
	seen := map[string]ID{}
	for _, id := range []ID{{"a", "eth0"}, {"a", "eth1"}, {"b", "eth0"}, {strings.Repeat("f", 64), "eth0"}} {
		name := id.HostLinkName()
		if len(name) > 15 || !IsHostLinkName(name) || name != id.HostLinkName() {
			t.Errorf("%v: %q", id, name)
		}
		if other, ok := seen[name]; ok {
			t.Errorf("%v and %v have one name", id, other)
		}
		seen[name] = id
	}
	for _, name := range []string{"eth0", "ec0", "ecabcdefghijk", "ec0123456789a0", "xec0123456789a"} {
		if IsHostLinkName(name) {
			t.Errorf("%q is taken for ours", name)
		}
	}
}

func TestLockExcludesOneEndpointOnly(t *testing.T) {
	dir := t.TempDir()
	a, b := ID{"a", "eth0"}, ID{"b", "eth0"}
	held, err := Acquire(context.Background(), dir, a)
	must(t, err)
	brief, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if _, err := Acquire(brief, dir, a); !errors.Is(err, bpffs.ErrLocked) || !strings.Contains(err.Error(), "a:eth0") {
		t.Errorf("the same endpoint: %v, want ErrLocked that names it", err)
	}
	other, err := Acquire(context.Background(), dir, b)
	must(t, err)
	other.Release()
	held.Release()
	held.Release()
	again, err := Acquire(context.Background(), dir, a)
	must(t, err)
	again.Release()

	var inside, most atomic.Int32
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			l, err := Acquire(context.Background(), dir, a)
			if err != nil {
				t.Error(err)
				return
			}
			most.Store(max(most.Load(), inside.Add(1)))
			time.Sleep(time.Millisecond) // long enough for another to come in, if it could
			inside.Add(-1)
			l.Release()
		})
	}
	wg.Wait()
	if most.Load() != 1 {
		t.Errorf("%d held one lock at once", most.Load())
	}
}

// FuzzDecode: no content crashes the reader, and what it accepts can be written and read again.
func FuzzDecode(f *testing.F) {
	good, err := json.Marshal(example())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"container_id":"a","ifname":"eth0","addresses":["fe80::1%x"]}`))
	f.Add([]byte(`{"container_id":"../a","ifname":"eth0"}`))
	f.Add([]byte(`{"container_id":"a","ifname":"eth0","host_ports":[{"address":"::","port":1,"protocol":"sctp","pod_port":1}]}`))
	f.Add([]byte(`{"container_id":"a","ifname":"eth0","result":{"a":[1]},"created":"x"}`))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, content []byte) {
		e, err := decode(content)
		if err != nil {
			return
		}
		if err := Write(dir, e); err != nil {
			t.Fatalf("accepted %q and can't write it: %v", content, err)
		}
		again, err := Read(dir, e.ID)
		if err != nil {
			t.Fatalf("accepted %q and can't read what was written: %v", content, err)
		}
		e.Result, again.Result = nil, nil // spaced anew
		if len(e.Addresses) == 0 {
			e.Addresses, again.Addresses = nil, nil // null and [] mean the same
		}
		if len(e.HostPorts) == 0 {
			e.HostPorts, again.HostPorts = nil, nil
		}
		if diff := cmp.Diff(e, again, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Errorf("(-first +again):\n%s", diff)
		}
	})
}

func TestPodNames(t *testing.T) {
	for _, c := range []struct{ pod, uid, wantPod, wantUID, says string }{
		{"shop/web-0", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "shop/web-0", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", ""},
		{"", "", "", "", ""},
		{"/my_container", "", "/my_container", "", ""}, // not from Kubernetes
		{strings.Repeat("n", 253) + "/" + strings.Repeat("p", 253), "", strings.Repeat("n", 253) + "/" + strings.Repeat("p", 253), "", ""},
		{"shop/" + strings.Repeat("p", 254), "u", "", "u", "no pod's namespace and name"},
		{"shop/web\x1b[2J", "u", "", "u", `"shop/web\x1b[2J" is no pod's`},
		{"shop/w\nb", "u", "", "u", "no pod's"},
		{"shop/w\xffb", "u", "", "u", "no pod's"},
		{"shop/\u202eweb", "u", "", "u", "no pod's"},
		{"shop/web/x", "u", "", "u", "no pod's"},
		{"shop", "u", "", "u", "no pod's"},
		{"shop/web", "u u", "shop/web", "", "no pod's uid"},
		{"shop/web", strings.Repeat("u", 1<<17), "shop/web", "", "no pod's uid"},
	} {
		pod, uid, err := CheckPod(c.pod, c.uid)
		if pod != c.wantPod || uid != c.wantUID || (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%.80q, %.80q: got %q, %q, %v", c.pod, c.uid, pod, uid, err)
		}
		if err != nil && len(err.Error()) > 200 {
			t.Errorf("the error is %d bytes long", len(err.Error()))
		}
	}
}

// Earlier builds read what this one writes, and this one what they wrote: "pod" is one text, whatever it was given.
func TestPodInTheStateOfOtherBuilds(t *testing.T) {
	dir := t.TempDir()
	e := example()
	e.Pod, e.PodUID = "shop/web", "1-2"
	must(t, Write(dir, e))
	file := path(dir, e.ID)
	content, err := os.ReadFile(file)
	must(t, err)
	var earlier struct {
		ID
		Pod string `json:"pod"`
	}
	if err := json.Unmarshal(content, &earlier); err != nil || earlier.Pod != "shop/web" {
		t.Errorf("an earlier build reads %+v, %v", earlier, err)
	}
	hostile := strings.Replace(string(content), "shop/web", `shop/\u001b[2J`, 1)
	hostile = strings.Replace(hostile, `"pod_uid"`, `"pod_node": {"of a later build": true}, "pod_uid"`, 1)
	must(t, os.WriteFile(file, []byte(hostile), 0o600))
	if got, err := Read(dir, e.ID); err != nil || got.Pod != "" || got.PodUID != "1-2" {
		t.Errorf("read pod %q, uid %q, %v", got.Pod, got.PodUID, err)
	}
}
