package lab

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

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// demolish ends everything that a lab has on this machine but its files, from names alone, so that it serves the lab's
// own Close as well as the sweep after an owner that was killed. It may be repeated.
func demolish(id string) error {
	dir := filepath.Join(registryDir, id)
	names, err := namespacesOf(id)
	if err != nil {
		return err
	}
	// Processes first: once its name is gone, a namespace can no longer be told from others.
	if err := endProcessesIn(names); err != nil {
		return err
	}
	var failed []error
	for _, name := range names {
		failed = append(failed, removeNamespace(name))
	}
	mounts, err := mountsUnder(dir)
	failed = append(failed, err)
	for _, mount := range slices.Backward(mounts) { // the innermost stands last in the table
		if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil {
			failed = append(failed, fmt.Errorf("unmount %s: %w", mount, err))
		}
	}
	return errors.Join(append(failed, removeCgroups(id))...)
}

// removeFiles removes the directory of a lab that has been demolished: nothing may be mounted in it. The registry must be
// locked, or a sweep would find the directory with its lock gone already, and take it for an orphan's.
func removeFiles(id string) error {
	if err := os.RemoveAll(filepath.Join(registryDir, id)); err != nil {
		return fmt.Errorf("remove the lab's directory: %w", err)
	}
	return nil
}

// endProcessesIn kills the processes whose network namespace is one of those named, and waits until they are gone.
func endProcessesIn(names []string) error {
	deadline := time.Now().Add(priv.Patience(5 * time.Second))
	for {
		pids, err := processesIn(names)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v do not end after SIGKILL", pids)
		}
		for _, pid := range pids {
			if err := killIn(pid, names); err != nil {
				return err
			}
		}
		// A killed process leaves its namespace a moment later; there is no event for a process that is not our child.
		time.Sleep(5 * time.Millisecond)
	}
}

// killIn sends SIGKILL through a pidfd, after looking once more that the process behind it is one of the lab's: the
// number alone may have passed to another process.
func killIn(pid int, names []string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	inodes, err := inodesOf(names)
	if err != nil {
		return err
	}
	if inode, ok := namespaceOf(pid); !ok || !inodes[inode] {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return nil
}

// processesIn finds the processes, this one excepted, whose network namespace is one of those named.
func processesIn(names []string) ([]int, error) {
	if len(names) == 0 {
		return nil, nil
	}
	inodes, err := inodesOf(names)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if inode, ok := namespaceOf(pid); ok && inodes[inode] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// inodesOf identifies the named namespaces. A name that no namespace is bound to (its maker died in between) has none:
// nothing can run in it.
func inodesOf(names []string) (map[uint64]bool, error) {
	inodes := make(map[uint64]bool, len(names))
	for _, name := range names {
		path := filepath.Join(netnsDir, name)
		var where unix.Statfs_t
		if err := unix.Statfs(path, &where); errors.Is(err, fs.ErrNotExist) || (err == nil && where.Type != unix.NSFS_MAGIC) {
			continue
		}
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err != nil {
			return nil, fmt.Errorf("look at namespace %s: %w", name, err)
		}
		inodes[stat.Ino] = true
	}
	return inodes, nil
}

// namespaceOf is the inode of a process's network namespace; false for one that has ended.
func namespaceOf(pid int) (uint64, bool) {
	var stat unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &stat); err != nil {
		return 0, false
	}
	return stat.Ino, true
}

// mountsUnder lists the mount points below a directory, outer before inner.
func mountsUnder(dir string) ([]string, error) {
	table, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	var found []string
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		const mountPoint = 4
		if len(fields) > mountPoint && strings.HasPrefix(fields[mountPoint], dir+"/") {
			found = append(found, fields[mountPoint])
		}
	}
	return found, nil
}
