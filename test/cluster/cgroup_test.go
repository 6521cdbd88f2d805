package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// What /proc/self/mountinfo holds of cgroups on machines of several kinds.
const (
	onlyV1 = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`
	hybrid = `32 23 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,size=4096k,nr_inodes=1024,mode=755
33 32 0:28 / /sys/fs/cgroup/unified rw,nosuid,nodev,noexec,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
34 32 0:29 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:11 - cgroup cgroup rw,xattr,release_agent=/lib/systemd/systemd-cgroups-agent,name=systemd
41 32 0:36 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:18 - cgroup cgroup rw,cpu,cpuacct
`
	onlyV2 = `24 30 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
33 24 0:28 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
34 24 0:29 / /sys/fs/pstore rw,nosuid,nodev,noexec,relatime shared:10 - pstore none rw
`
	// One controller is mounted apart, below version 2.
	v2AndOne = onlyV2 + `812 33 0:90 / /sys/fs/cgroup/net_cls rw,relatime - cgroup net_cls rw,net_cls
`
	// Version 2 is mounted over all else.
	v2Above = onlyV1 + `99 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw
`
	none = `24 30 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
`
)

func TestHierarchies(t *testing.T) {
	unified := []hierarchy{{"/sys/fs/cgroup", "cgroup2", ""}}
	for name, tt := range map[string]struct {
		mountinfo string
		want      []hierarchy
	}{
		"version 1": {onlyV1, []hierarchy{
			{"/sys/fs/cgroup/cpu", "cgroup", "cpu"}, {"/sys/fs/cgroup/cpuset", "cgroup", "cpuset"},
			{"/sys/fs/cgroup/systemd", "cgroup", "name=systemd"}, {"/sys/fs/cgroup/unified", "cgroup2", ""},
		}},
		"hybrid": {hybrid, []hierarchy{
			{"/sys/fs/cgroup/unified", "cgroup2", ""}, {"/sys/fs/cgroup/systemd", "cgroup", "name=systemd"},
			{"/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"},
		}},
		"version 2":                     {onlyV2, unified},
		"version 2, a controller apart": {v2AndOne, unified},
		"version 2 over all else":       {v2Above, unified},
		"none":                          {none, nil},
	} {
		got, err := hierarchiesIn(tt.mountinfo)
		if (err != nil) != (tt.want == nil) || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %v, error %v, want %v", name, got, err, tt.want)
		}
		if isUnified(got) != reflect.DeepEqual(got, unified) {
			t.Errorf("%s: unified %v", name, isUnified(got))
		}
	}
}

// onV2Env makes this test's executable see version 2 of cgroups alone, make a machine there, and tell of it.
const onV2Env = "EBPF_CNI_TEST_ON_V2"

// A machine on a computer with version 2 alone, as far as one with both can show it: with the controllers that version 1
// has not taken.
func TestMachineOnVersion2(t *testing.T) {
	requireRoot(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), onV2Env+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	story := string(out)
	for _, want := range []string{
		" 0::/init\n", // the last of /proc/self/cgroup, after those of version 1
		"the root holds no process\n",
		" 0::/kubepods/pod\n",
		"the root hands on what it has: true\n",
	} {
		if !strings.Contains(story, want) {
			t.Errorf("no %q in:\n%s", want, story)
		}
	}
}

const subtreeControl = cgroupRoot + "/cgroup.subtree_control"

// handOnOnly takes back what the root hands on beside these.
func handOnOnly(before string) error {
	now, err := os.ReadFile(subtreeControl)
	for name := range strings.FieldsSeq(string(now)) {
		if !slices.Contains(strings.Fields(before), name) {
			err = errors.Join(err, os.WriteFile(subtreeControl, []byte("-"+name), 0))
		}
	}
	return err
}

// aloneOnV2 does what TestMachineOnVersion2 is about, in a process of its own.
func aloneOnV2() (err error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("cgroup2", cgroupRoot, "cgroup2", 0, ""); err != nil {
		return fmt.Errorf("mount version 2: %w", err)
	}
	handedOn, err := os.ReadFile(subtreeControl)
	if err != nil {
		return err
	}
	c, err := claim(Options{Nodes: 1}.orDefault())
	if err != nil {
		return err
	}
	ctx := context.Background()
	defer func() {
		err = errors.Join(err, c.Close(ctx), handOnOnly(string(handedOn)))
		if left := c.Remains(); len(left) > 0 {
			err = errors.Join(err, fmt.Errorf("left behind: %q", left))
		}
	}()
	if err := c.makeMachines(ctx); err != nil {
		return err
	}
	for _, question := range []string{
		"echo a process is in $(cat /proc/self/cgroup)",
		"echo the root holds $(test -s /sys/fs/cgroup/cgroup.procs && cat /sys/fs/cgroup/cgroup.procs || echo no process)",
		// As a kubelet and runc do it.
		"mkdir -p /sys/fs/cgroup/kubepods/pod && echo $$ >/sys/fs/cgroup/kubepods/pod/cgroup.procs && echo a pod\\'s process is in $(cat /proc/self/cgroup)",
		"cd /sys/fs/cgroup && test \"$(cat cgroup.controllers)\" = \"$(cat init/cgroup.controllers)\" && echo the root hands on what it has: true",
	} {
		out, err := c.Nodes[0].Run(ctx, "sh", "-ec", question)
		if err != nil {
			return err
		}
		fmt.Print(out)
	}
	return nil
}
