package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoCgroup is returned (wrapped) by FindCgroup where no cgroup is known to hold all of the node's processes.
var ErrNoCgroup = errors.New("no cgroup of version 2 is known to hold all of this node's processes")

// CheckCgroup returns the directory, which has to be a cgroup of version 2; or the one below it where the two versions are mounted
// side by side, as systemd does.
func CheckCgroup(dir string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", err
	}
	for _, at := range []string{dir, filepath.Join(dir, "unified")} {
		if unix.Statfs(at, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return at, nil
		}
	}
	return "", errors.New("it is not on a cgroup2 file system")
}

// FindCgroup looks where cgroup2 is mounted, for the cgroup that holds all of the node's processes.
func FindCgroup() (string, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("list mounts: %w", err)
	}
	own, err := cgroupOf("self")
	if err != nil {
		return "", err
	}
	first, err := cgroupOf("1")
	if err != nil {
		return "", err
	}
	return findAmong(cgroupMounts(string(mounts)), own, first)
}

// findAmong looks among mounts, given the cgroups of this process and of process 1.
func findAmong(all []cgroupMount, own, first string) (string, error) {
	// Others may be mounted over it, or out of reach.
	all = slices.DeleteFunc(all, func(m cgroupMount) bool {
		at, err := CheckCgroup(m.dir)
		return err != nil || at != m.dir
	})
	for _, m := range all {
		// Every cgroup but the first of all has this file.
		if _, err := os.Stat(filepath.Join(m.dir, "cgroup.events")); errors.Is(err, fs.ErrNotExist) || m.holds(own, first) {
			return m.dir, nil
		}
	}
	if len(all) == 0 {
		return "", fmt.Errorf("%w: none is mounted here", ErrNoCgroup)
	}
	return "", fmt.Errorf("%w: %s may be that of this container alone", ErrNoCgroup, all[0].dir)
}

// cgroupMount is where a cgroup of version 2 is mounted, and its path as this process's cgroup namespace has it.
type cgroupMount struct{ dir, root string }

// unescape gives the characters back that separate fields in a list of mounts.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// cgroupMounts reads them from a list of mounts.
func cgroupMounts(mountinfo string) (all []cgroupMount) {
	for line := range strings.Lines(mountinfo) {
		before, after, _ := strings.Cut(line, " - ")
		if fields := strings.Fields(before); len(fields) >= 5 && strings.HasPrefix(after, "cgroup2 ") {
			all = append(all, cgroupMount{dir: unescape.Replace(fields[4]), root: unescape.Replace(fields[3])})
		}
	}
	return all
}

// holds reports whether the cgroup has the node's first process in it. In a container the process 1 is the container's own,
// which is in the same cgroup as this process: from that nothing follows.
func (m cgroupMount) holds(own, first string) bool {
	if own == first {
		return false
	}
	if above := strings.Count(m.root, "/.."); above*len("/..") == len(m.root) || m.root == "/" { // the namespace's own, or one above it
		return strings.Count(first, "/..") <= above
	}
	return first == m.root || strings.HasPrefix(first, m.root+"/")
}

// cgroupOf is the path of a process's cgroup of version 2, empty where there is none.
func cgroupOf(process string) (string, error) {
	text, err := os.ReadFile(filepath.Join("/proc", process, "cgroup"))
	if err != nil {
		return "", fmt.Errorf("find the cgroup of process %s: %w", process, err)
	}
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(line, "0::"); is {
			return strings.TrimSpace(path), nil
		}
	}
	return "", nil
}
