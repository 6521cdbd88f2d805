// Package bpffs owns every path below the pin directory, checks that it is on a BPF
// file system, and has the lock that orders changes to the node. It opens none of
// the pinned objects itself.
package bpffs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotBPFFS is returned (wrapped) by Prepare when the directory is not on a
// BPF file system.
var ErrNotBPFFS = errors.New("not on a BPF file system")

// Dir is the pin directory of a node, such as /sys/fs/bpf/ebpf-cni.
type Dir string

// Maps is the directory of the pinned maps.
func (d Dir) Maps() string { return filepath.Join(string(d), "maps") }

// Programs is the directory of the pinned programs.
func (d Dir) Programs() string { return filepath.Join(string(d), "progs") }

// Links is the directory of the pinned links.
func (d Dir) Links() string { return filepath.Join(string(d), "links") }

// Map is where the map of that name is pinned.
func (d Dir) Map(name string) string { return filepath.Join(d.Maps(), name) }

// Program is where the program of that name, such as ec_from_pod, is pinned.
func (d Dir) Program(name string) string { return filepath.Join(d.Programs(), name) }

// Link is where the tcx link of a hook, such as from_pod, on an interface is
// pinned, or with 0 in its place the link of a hook on the cgroup of the node's
// processes.
func (d Dir) Link(hook string, ifindex int) string {
	if ifindex == 0 {
		return filepath.Join(d.Links(), "cgroup_"+hook)
	}
	return filepath.Join(d.Links(), hook+"_"+strconv.Itoa(ifindex))
}

// ParseLink splits the file name of an interface's link into hook and ifindex.
func ParseLink(name string) (hook string, ifindex int, ok bool) {
	hook, number, found := cutLast(name, "_")
	ifindex, err := strconv.Atoi(number)
	return hook, ifindex, found && err == nil && ifindex > 0
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// ErrForeign is returned (wrapped) by Prepare when a user other than root has made one of the directories.
var ErrForeign = errors.New("not a directory of root's")

// Prepare creates the pin directory and those below it, with mode 0700. The error
// matches ErrNotBPFFS when the nearest existing directory is not on a BPF file
// system, and ErrForeign when a directory is another user's: bpffs is often
// mounted so that everybody may make one, and its owner could exchange what is pinned there.
func (d Dir) Prepare() error {
	if err := d.checkMount(); err != nil {
		return err
	}
	for _, dir := range []string{string(d), d.Maps(), d.Programs(), d.Links()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make pin directory %s: %w", dir, err)
		}
		if err := checkOwner(dir); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return fmt.Errorf("restrict pin directory %s: %w", dir, err)
		}
	}
	return nil
}

func checkOwner(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("look at pin directory %s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != uint32(os.Geteuid()) { //nolint:gosec // no user has a negative number
		return fmt.Errorf("pin directory %s is %w, but of user %d: see what it holds, and remove it", dir, ErrForeign, st.Uid)
	}
	return nil
}

func (d Dir) checkMount() error {
	at := filepath.Clean(string(d))
	for {
		var st unix.Statfs_t
		err := unix.Statfs(at, &st)
		if err == nil && st.Type != unix.BPF_FS_MAGIC {
			return fmt.Errorf("pin directory %s: %s is %w (mount one: mount -t bpf bpf /sys/fs/bpf)", d, at, ErrNotBPFFS)
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) || at == "/" || at == "." {
			return fmt.Errorf("look at pin directory %s: %w", at, err)
		}
		at = filepath.Dir(at)
	}
}
