package ipam

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// A label tells whose an address is without opening the address's file: a second name of that file (a hard link), which
// has a hash of the owner in it. So work on one pod costs the same on a node with many. A label is believed only for the
// very file that it is a name of, which has one owner for as long as it exists. A file without a label, of an earlier
// build or after a kill, is read.
const labelPrefix = "owner."

// label is what an owner's labels begin with.
func (o Owner) label() string {
	sum := sha256.Sum256([]byte(o.ContainerID + "/" + o.IfName))
	return labelPrefix + hex.EncodeToString(sum[:8])
}

func (o Owner) labelOf(a netip.Addr) string { return o.label() + "." + a.String() }

// newLabel is the name of a file that is to be an address of the owner, and then a label.
func (o Owner) newLabel() string { return o.label() + ".new" }

// parseLabel returns what the labels of the owner begin with; false: the name is no label's.
func parseLabel(name string) (string, bool) {
	rest, ok := strings.CutPrefix(name, labelPrefix)
	hash, _, dotted := strings.Cut(rest, ".")
	return labelPrefix + hash, ok && dotted
}

// file is a regular file of a store.
type file struct {
	name  string
	inode uint64
}

// listFiles lists a store's files with their inodes, which os.ReadDir would ask for one by one. Without a directory
// there are none.
func listFiles(dir string) ([]file, error) {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read address store: %w", err)
	}
	defer d.Close()
	var files []file
	buffer := make([]byte, 64<<10)
	for {
		n, err := unix.ReadDirent(int(d.Fd()), buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read address store %s: %w", dir, err)
		}
		if n <= 0 {
			return files, nil
		}
		files = parseDirents(files, buffer[:n])
	}
}

// parseDirents appends the regular files in the kernel's list (struct linux_dirent64: inode, offset, length, type, name).
func parseDirents(files []file, b []byte) []file {
	for len(b) > 0 {
		inode, length, kind := binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint16(b[16:]), b[18]
		name, _, _ := bytes.Cut(b[19:length], []byte{0})
		if kind == unix.DT_REG || kind == unix.DT_UNKNOWN {
			files = append(files, file{string(name), inode})
		}
		b = b[length:]
	}
	return files
}

// removeStaleLabels removes labels that are the name of no used address: an earlier build has freed it.
func removeStaleLabels(dir string, files []file) error {
	used := map[uint64]bool{}
	for _, f := range files {
		if _, err := netip.ParseAddr(f.name); err == nil {
			used[f.inode] = true
		}
	}
	for _, f := range files {
		if _, ok := parseLabel(f.name); ok && !used[f.inode] {
			if err := remove(filepath.Join(dir, f.name)); err != nil {
				return err
			}
		}
	}
	return nil
}
