package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupRoot is where the hierarchies are mounted, here and in each machine.
const cgroupRoot = "/sys/fs/cgroup"

// hierarchy is one mounted tree of cgroups.
type hierarchy struct {
	// Dir is where it is mounted.
	Dir string
	// Type and Data are what it is mounted with.
	Type, Data string
}

// hierarchies lists those of this machine.
func hierarchies() ([]hierarchy, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	return hierarchiesIn(string(text))
}

// hierarchiesIn reads them from a list of mounts. It is either version 2 alone, at the root itself, or one tree for each
// controller of version 1 below the root, most often with version 2 beside them for names alone.
func hierarchiesIn(mountinfo string) (all []hierarchy, err error) {
	for line := range strings.Lines(mountinfo) {
		before, after, _ := strings.Cut(line, " - ")
		place, kind := strings.Fields(before), strings.Fields(after)
		if len(place) < 6 || len(kind) < 3 {
			continue
		}
		h := hierarchy{Dir: place[4], Type: kind[0]}
		switch {
		case h.Dir == cgroupRoot: // hides what was mounted below before
			all = nil
			if h.Type == "cgroup2" {
				all = []hierarchy{h}
			}
		case filepath.Dir(h.Dir) != cgroupRoot || isUnified(all):
		case h.Type == "cgroup":
			h.Data = controllers(kind[2])
			all = append(all, h)
		case h.Type == "cgroup2":
			all = append(all, h)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no cgroups are mounted at or below %s: the nodes need them, as systemd mounts them", cgroupRoot)
	}
	return all, nil
}

// isUnified says whether all controllers are in one tree.
func isUnified(all []hierarchy) bool { return len(all) == 1 && all[0].Dir == cgroupRoot }

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
	if isUnified(all) {
		if err := enableControllers(cgroupRoot); err != nil {
			return err
		}
	}
	for _, h := range all {
		dir := filepath.Join(h.Dir, cgroupName(id, machine))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("make a cgroup: %w", err)
		}
		// In version 1 a cpuset takes no process before it has processors and memory.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if h.Type != "cgroup" || !strings.Contains(h.Data, "cpuset") {
				break
			}
			raw, err := os.ReadFile(filepath.Join(h.Dir, file))
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

// neededControllers are those by which a kubelet bounds pods.
var neededControllers = []string{"cpuset", "cpu", "io", "memory", "hugetlb", "pids"}

// enableControllers hands the controllers that a cgroup of version 2 has on to those below it. At the root they stay so.
func enableControllers(dir string) error {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return fmt.Errorf("find the controllers of a cgroup: %w", err)
	}
	for name := range strings.FieldsSeq(string(available)) {
		if !slices.Contains(neededControllers, name) {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+name), 0); err != nil {
			return fmt.Errorf("hand controller %s of cgroup %s on: %w", name, dir, err)
		}
	}
	return nil
}

// processesDir is where in a tree of version 2 a machine has the processes that are in no pod: a cgroup that hands
// controllers on may have none itself.
const processesDir = "init"

// delegate prepares the tree of version 2 that a machine sees, by its process 1: whatever that starts is where it is.
func delegate() error {
	dir := filepath.Join(cgroupRoot, processesDir)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make a cgroup for the machine's own processes: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("move process 1 into its cgroup: %w", err)
	}
	return enableControllers(cgroupRoot)
}

// cgroups lists the cgroups of a machine, "*" for all of the cluster's.
func cgroups(id, machine string) (found []string, err error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		dirs, err := filepath.Glob(filepath.Join(h.Dir, cgroupName(id, machine)))
		if err != nil {
			return nil, err
		}
		found = append(found, dirs...)
	}
	return found, nil
}

// removeCgroups removes the cgroups of a machine, "*" for all of the cluster's, with all that their programs have made below. The kernel
// may need a moment after the last process.
func removeCgroups(id, machine string) error {
	dirs, err := cgroups(id, machine)
	failed := []error{err}
	for _, dir := range dirs {
		failed = append(failed, removeCgroup(dir))
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
