package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archive writes a cpio archive of the kind that the kernel unpacks as its first root ("newc"). It is left uncompressed:
// unpacking is done by emulated processors, reading is not. Several archives one after the other are one root.
type archive struct {
	w    io.Writer
	dirs map[string]bool
	ino  int
	err  error // the first one; nothing is written after it
}

func newArchive(w io.Writer) *archive { return &archive{w: w, dirs: make(map[string]bool)} }

const cpioTrailer = "TRAILER!!!"

// entry writes one header with its content of exactly size bytes.
func (a *archive) entry(name string, mode uint32, size int64, content io.Reader) {
	if a.err != nil {
		return
	}
	a.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.ino, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	if _, a.err = io.WriteString(a.w, header+padding(int64(len(header)))); a.err != nil || content == nil {
		return
	}
	if _, a.err = io.CopyN(a.w, content, size); a.err != nil {
		a.err = fmt.Errorf("archive %s: %w", name, a.err)
		return
	}
	_, a.err = io.WriteString(a.w, padding(size))
}

// padding fills up to the next multiple of four.
func padding(size int64) string { return strings.Repeat("\x00", int(-size&3)) }

// Modes of cpio are those of stat.
const (
	cpioDir  = 0o040755
	cpioFile = 0o100644
	cpioExec = 0o100755
	cpioLink = 0o120777
)

// dir adds a directory and those above it, once.
func (a *archive) dir(name string) {
	if name == "." || name == "/" || name == "" || a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	a.entry(name, cpioDir, 0, nil)
}

// data adds a file of the given content. Names are relative to the root; a leading slash does not matter.
func (a *archive) data(name string, content []byte) {
	name = strings.TrimPrefix(name, "/")
	a.dir(path.Dir(name))
	a.entry(name, cpioFile, int64(len(content)), strings.NewReader(string(content)))
}

// link adds a symbolic link.
func (a *archive) link(name, to string) {
	name = strings.TrimPrefix(name, "/")
	a.dir(path.Dir(name))
	a.entry(name, cpioLink, int64(len(to)), strings.NewReader(to))
}

// file adds a file of the host.
func (a *archive) file(name, from string) {
	if a.err != nil {
		return
	}
	f, err := os.Open(from)
	if err != nil {
		a.err = err
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		a.err = err
		return
	}
	mode := uint32(cpioFile)
	if info.Mode()&0o111 != 0 {
		mode = cpioExec
	}
	name = strings.TrimPrefix(name, "/")
	a.dir(path.Dir(name))
	a.entry(name, mode, info.Size(), f)
}

// tree adds a directory of the host with everything below it, if it is there.
func (a *archive) tree(name, from string) {
	err := filepath.WalkDir(from, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		below, err := filepath.Rel(from, at)
		if err != nil {
			return err
		}
		a.file(path.Join(name, filepath.ToSlash(below)), at)
		return nil
	})
	if err != nil && !os.IsNotExist(err) && a.err == nil {
		a.err = err
	}
}

// end writes the trailer and returns the first error.
func (a *archive) end() error {
	a.entry(cpioTrailer, 0, 0, nil)
	return a.err
}
