package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestCgroupMounts(t *testing.T) {
	const mounts = `24 1 0:22 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
25 24 0:23 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw
26 24 0:24 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
90 80 0:23 /../../.. /host/sys/fs/cgroup ro,relatime - cgroup2 cgroup rw
91 80 0:23 / /mnt/a\040b\134 rw - cgroup2 cgroup rw
`
	want := []cgroupMount{{"/sys/fs/cgroup/unified", "/"}, {"/host/sys/fs/cgroup", "/../../.."}, {`/mnt/a b\`, "/"}}
	if got := cgroupMounts(mounts); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestCheckCgroup(t *testing.T) {
	for _, dir := range []string{"/proc", "/nowhere", t.TempDir()} {
		if got, err := CheckCgroup(dir); err == nil {
			t.Errorf("%s is taken as %s", dir, got)
		}
	}
	ours := priv.Cgroup(t)
	if got, err := CheckCgroup(ours); got != ours || err != nil {
		t.Errorf("%s: %s, %v", ours, got, err)
	}
	beside := t.TempDir()
	if err := os.Symlink(ours, filepath.Join(beside, "unified")); err != nil {
		t.Fatal(err)
	}
	if got, err := CheckCgroup(beside); got != filepath.Join(beside, "unified") || err != nil {
		t.Errorf("both versions side by side: %s, %v", got, err)
	}
}

// The node may itself live in a cgroup below the first one; a container never counts as a node.
func TestCgroupHoldsTheFirstProcess(t *testing.T) {
	for name, c := range map[string]struct {
		root, own, first string
		want             bool
	}{
		"a service of a node in a container":       {"/", "/system.slice/agent", "/init.scope", true},
		"a container in its own namespace":         {"/", "/", "/", false},
		"a container whose first process is pause": {"/", "/", "/../pause", false},
		"the host's, in a container":               {"/../..", "/", "/", false},
		"the host's, with its processes":           {"/../..", "/", "/../../init.scope", true},
		"part of the host's, with its processes":   {"/..", "/", "/../../init.scope", false},
		"a container in the host's namespace":      {"/kubepods/pod/agent", "/kubepods/pod/agent", "/kubepods/pod/agent", false},
		"a container beside its pause":             {"/kubepods/pod/agent", "/kubepods/pod/agent", "/kubepods/pod/pause", false},
		"a slice of the node's, with the first":    {"/node.slice", "/node.slice/agent", "/node.slice/init", true},
		"beside the first process":                 {"/kubepods", "/kubepods/agent", "/init.scope", false},
	} {
		if got := (cgroupMount{root: c.root}).holds(c.own, c.first); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// What is mounted may be out of reach, or something else over it: then it is not the first cgroup, though it lacks the file that
// all others have.
func TestCgroupThatIsHidden(t *testing.T) {
	ours, hidden := priv.Cgroup(t), t.TempDir()
	if err := os.Symlink(ours, filepath.Join(hidden, "unified")); err != nil {
		t.Fatal(err)
	}
	behind := []cgroupMount{{"/nowhere", "/"}, {hidden, "/"}}
	if got, err := findAmong(behind, "/agent", "/init"); !errors.Is(err, ErrNoCgroup) {
		t.Errorf("found is %q, %v", got, err)
	}
	if got, err := findAmong(append(behind, cgroupMount{ours, "/"}), "/agent", "/init"); got != ours || err != nil {
		t.Errorf("found is %q, %v; want %q", got, err, ours)
	}
	if got, err := findAmong([]cgroupMount{{ours, "/"}}, "/", "/"); !errors.Is(err, ErrNoCgroup) {
		t.Errorf("of a container alone: %q, %v", got, err)
	}
}
