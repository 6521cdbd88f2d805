package cluster

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupRoot is where the hierarchies are mounted, here and in each machine.
const cgroupRoot = "/sys/fs/cgroup"

// hierarchy is one mounted tree of cgroups.
type hierarchy struct {
	// Dir is the mount's name below cgroupRoot.
	Dir string
	// Type and Data are what it is mounted with.
	Type, Data string
}

// hierarchies lists those of this machine. It is cgroup v1 with v2 beside it for names alone that the nodes can have
// nested; on a machine with v2 only, the processes of a node would have to leave its root first.
func hierarchies() ([]hierarchy, error) {
	file, err := os.Open("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	defer file.Close()
	var all []hierarchy
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 || filepath.Dir(fields[1]) != cgroupRoot {
			continue
		}
		h := hierarchy{Dir: filepath.Base(fields[1]), Type: fields[2]}
		switch h.Type {
		case "cgroup":
			h.Data = controllers(fields[3])
		case "cgroup2":
		default:
			continue
		}
		all = append(all, h)
	}
	if len(all) < 2 {
		return nil, fmt.Errorf("no cgroup v1 hierarchies below %s: nodes can't be nested in cgroup v2 yet", cgroupRoot)
	}
	return all, nil
}

// controllers drops from a mount's options what is not the hierarchy's.
func controllers(options string) string {
	var kept []string
	for option := range strings.SplitSeq(options, ",") {
		switch option {
		case "rw", "ro", "relatime", "nosuid", "nodev", "noexec", "xattr", "clone_children":
		default:
			if !strings.HasPrefix(option, "release_agent=") {
				kept = append(kept, option)
			}
		}
	}
	return strings.Join(kept, ",")
}

func cgroupName(id, machine string) string { return cgroupPrefix + id + "-" + machine }

const cgroupPrefix = "ebpf-cni-cluster-"

// makeCgroups puts a process into a cgroup of its own in every hierarchy. They hang below the roots, not below the
// caller's: a cluster that is kept outlives whoever started it.
func makeCgroups(id, machine string, pid int) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		root := filepath.Join(cgroupRoot, h.Dir)
		dir := filepath.Join(root, cgroupName(id, machine))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make a cgroup: %w", err)
		}
		// A cpuset takes no process before it has processors and memory.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if h.Type != "cgroup" || !strings.Contains(h.Data, "cpuset") {
				break
			}
			raw, err := os.ReadFile(filepath.Join(root, file))
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, file), raw, 0)
			}
			if err != nil {
				return fmt.Errorf("prepare a cpuset: %w", err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("put process %d into its cgroup: %w", pid, err)
		}
	}
	return nil
}

// removeCgroups removes the cgroups of a machine, "*" for all of the cluster's, with all that their programs have made below. The kernel
// may need a moment after the last process.
func removeCgroups(id, machine string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var failed []error
	for _, h := range all {
		dirs, err := filepath.Glob(filepath.Join(cgroupRoot, h.Dir, cgroupName(id, machine)))
		if err != nil {
			return err
		}
		for _, dir := range dirs {
			failed = append(failed, removeCgroup(dir))
		}
	}
	return errors.Join(failed...)
}

func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list cgroup %s: %w", dir, err)
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeCgroup(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	for try := 0; ; try++ {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || try == 100 {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
