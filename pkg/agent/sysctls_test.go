package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

func TestPorts(t *testing.T) {
	for _, tt := range []struct{ have, want string }{
		{"", ""}, {"8080", "8080"}, {"8080,9148", "8080,9148"}, {"1-3,4,5-6", "1-6"}, {"65535", "65535"},
		{"0-65535", "0-65535"}, {"7,5,6", "5-7"}, {"9-9\n", "9"},
	} {
		p, err := parsePorts(tt.have)
		if err != nil || p.String() != tt.want {
			t.Errorf("%q is %q, error %v, want %q", tt.have, p, err, tt.want)
		}
	}
	for _, bad := range []string{"x", "1-2-x,y", "70000", "-5"} {
		if p, err := parsePorts(bad); err == nil && bad != "1-2-x,y" {
			t.Errorf("%q is %q", bad, p)
		}
	}
}

func FuzzPorts(f *testing.F) {
	for _, s := range []string{"", "1", "1-2", "1,3-5,65535", "0-65535", "a", "1-", "-1", ",,", "5-1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePorts(s)
		if err != nil {
			return
		}
		again, err := parsePorts(p.String())
		if err != nil || again != p {
			t.Errorf("%q is %q, which is read as %q, error %v", s, p, again, err)
		}
	})
}

// node is a made-up /proc/sys.
type sysctlDir struct {
	t   *testing.T
	dir string
	sysctls
}

func newSysctls(t *testing.T, values map[string]string) *sysctlDir {
	t.Helper()
	d := &sysctlDir{t: t, dir: t.TempDir()}
	for name, value := range values {
		path := filepath.Join(d.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, err := readRecord(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	d.sysctls = sysctls{device.Sysctl{Dir: d.dir}, r, slog.New(slog.DiscardHandler)}
	return d
}

// write is somebody else's.
func (d *sysctlDir) write(name, value string) {
	d.t.Helper()
	if err := os.WriteFile(filepath.Join(d.dir, name), []byte(value), 0o600); err != nil {
		d.t.Fatal(err)
	}
}

func (d *sysctlDir) expect(when string, values map[string]string) {
	d.t.Helper()
	for name, want := range values {
		raw, err := os.ReadFile(filepath.Join(d.dir, name))
		// A file keeps what a shorter write leaves; the kernel does not.
		have, _, _ := strings.Cut(string(raw), "\n")
		if err != nil || have != want {
			d.t.Errorf("%s: %s is %q, error %v, want %q", when, name, have, err, want)
		}
	}
}

func (d *sysctlDir) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

func TestForwardingIsHeldAndPutBack(t *testing.T) {
	d := newSysctls(t, map[string]string{ipForward: "1", forwardingOf("eth0"): "0", forwardingOf("eth1"): "0"})
	d.must(d.ensureForwarding([]string{"eth0", "eth1", "gone"}))
	d.expect("held", map[string]string{ipForward: "1", forwardingOf("eth0"): "1", forwardingOf("eth1"): "1"})
	d.write(forwardingOf("eth0"), "0\n")
	d.must(d.ensureForwarding([]string{"eth0"}))
	d.expect("held again", map[string]string{forwardingOf("eth0"): "1"})
	d.write(forwardingOf("eth1"), "2\n") // no longer our value
	d.must(d.restore())
	d.expect("put back", map[string]string{ipForward: "1", forwardingOf("eth0"): "0", forwardingOf("eth1"): "2"})
}

func TestForwardingStaysWhereIPForwardTurnedItOn(t *testing.T) {
	d := newSysctls(t, map[string]string{ipForward: "0", forwardingOf("eth0"): "0"})
	d.must(d.ensureForwarding([]string{"eth0"}))
	d.must(d.restore())
	d.expect("put back", map[string]string{ipForward: "1", forwardingOf("eth0"): "1"})
}

func TestReservedPorts(t *testing.T) {
	d := newSysctls(t, map[string]string{reservedPorts: "8080,50000-50010"})
	d.must(d.reserve(49152, 65535))
	d.expect("reserved", map[string]string{reservedPorts: "8080,49152-65535"})
	// Another range at the next start: what others reserved within stays.
	d.must(d.reserve(60000, 60999))
	d.expect("another range", map[string]string{reservedPorts: "8080,50000-50010,60000-60999"})
	d.write(reservedPorts, "8080,9090,50000-50010,60000-60999\n")
	d.must(d.restore())
	d.expect("put back", map[string]string{reservedPorts: "8080,9090,50000-50010"})
}

func TestReservedPortsThatSomebodyTookOut(t *testing.T) {
	d := newSysctls(t, map[string]string{reservedPorts: ""})
	d.must(d.reserve(100, 200))
	d.write(reservedPorts, "150-200\n")
	d.must(d.restore())
	d.expect("not our value", map[string]string{reservedPorts: "150-200"})
}

func TestReservedPortsOfNothing(t *testing.T) {
	d := newSysctls(t, map[string]string{reservedPorts: ""})
	d.must(d.reserve(100, 200))
	d.must(d.restore())
	d.expect("put back", map[string]string{reservedPorts: ""})
}

func TestRecordOutlivesTheAgent(t *testing.T) {
	d := Directories{State: filepath.Join(t.TempDir(), "a", "state"), Conf: filepath.Join(t.TempDir(), "conf")}
	made, err := makeAll(d.State)
	if err != nil || len(made) != 2 {
		t.Fatalf("made %v, error %v", made, err)
	}
	r, err := openRecord(d, made)
	if err != nil {
		t.Fatal(err)
	}
	r.Sysctls["x"] = setting{"1", "2"}
	if err := r.write(); err != nil {
		t.Fatal(err)
	}
	again, err := openRecord(d, nil)
	if err != nil || len(again.Made) != 3 || again.Sysctls["x"] != (setting{"1", "2"}) {
		t.Errorf("read again: %+v, error %v", again, err)
	}
	if info, err := os.Stat(d.State); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("state directory %v, error %v", info.Mode(), err)
	}
	if err := os.WriteFile(r.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openRecord(d, nil); err == nil || !strings.Contains(err.Error(), r.path) {
		t.Errorf("a broken record: %v", err)
	}
}
