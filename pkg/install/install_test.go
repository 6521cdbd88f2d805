package install

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func list() List {
	return List{
		BPFFS: "/sys/fs/bpf/ebpf-cni", StateDir: "/run/ebpf-cni", MTU: 1500, Attach: "auto",
		Quarantine: time.Minute, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, LogLevel: "info",
	}
}

func TestEncode(t *testing.T) {
	const want = `{ "cniVersion": "1.0.0", "cniVersions": ["0.4.0", "1.0.0", "1.1.0"], "name": "ebpf-cni",
	  "plugins": [ { "type": "ebpf-cni",
	    "bpffs": "/sys/fs/bpf/ebpf-cni", "stateDir": "/run/ebpf-cni", "mtu": 1500, "attach": "auto",
	    "addressQuarantine": "60s", "capabilities": { "ips": true, "mac": true, "bandwidth": true, "portMappings": true },
	    "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.244.1.0/24" }]] },
	    "logFile": "", "logLevel": "info" } ] }`
	var w, g any
	if err := json.Unmarshal([]byte(want), &w); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(list().Encode(), &g); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func mustWrite(t *testing.T, wrote bool, err error, want bool) {
	t.Helper()
	if err != nil || wrote != want {
		t.Fatalf("wrote %v, error %v, want %v", wrote, err, want)
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestWriteList(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cni", "net.d")
	wrote, err := WriteList(dir, list())
	mustWrite(t, wrote, err, true)
	wrote, err = WriteList(dir, list())
	mustWrite(t, wrote, err, false)
	changed := list()
	changed.MTU = 1400
	wrote, err = WriteList(dir, changed)
	mustWrite(t, wrote, err, true)
	// What a kill left behind is in nobody's way.
	if err := os.WriteFile(temporary(filepath.Join(dir, Conflist)), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	wrote, err = WriteList(dir, list())
	mustWrite(t, wrote, err, true)
	if diff := cmp.Diff([]string{Conflist}, files(t, dir)); diff != "" {
		t.Errorf("files -want +got:\n%s", diff)
	}
	removed, err := RemoveList(dir)
	mustWrite(t, removed, err, true)
	removed, err = RemoveList(dir)
	mustWrite(t, removed, err, false)
}

func TestWritePlugin(t *testing.T) {
	source, dir := filepath.Join(t.TempDir(), "ebpf-cni"), filepath.Join(t.TempDir(), "bin")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(source, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	wrote, err := WritePlugin(source, dir)
	mustWrite(t, wrote, err, true)
	wrote, err = WritePlugin(source, dir)
	mustWrite(t, wrote, err, false)
	running, err := os.Open(filepath.Join(dir, Plugin))
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	write("two")
	wrote, err = WritePlugin(source, dir)
	mustWrite(t, wrote, err, true)
	old := make([]byte, 3)
	if _, err := running.ReadAt(old, 0); err != nil || string(old) != "one" {
		t.Errorf("a running plugin was written over: %q, %v", old, err)
	}
	info, err := os.Stat(filepath.Join(dir, Plugin))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := WritePlugin(filepath.Join(dir, "nothing"), dir); err == nil {
		t.Error("a plugin that does not exist was installed")
	}
	removed, err := RemovePlugin(source, dir)
	mustWrite(t, removed, err, true)
	// Where agent and plugins share a directory, nothing was installed.
	removed, err = RemovePlugin(source, filepath.Dir(source))
	mustWrite(t, removed, err, false)
}
