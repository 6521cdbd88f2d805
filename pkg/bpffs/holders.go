package bpffs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// holdersName is the directory in which those who hold the node's lock say who
// they are, each in a file that it keeps locked: one that is not locked is of a
// process that was killed. /proc/locks would show an agent in a container
// nothing of the plugins outside.
const holdersName = "holders"

// mostNamed is how many holders an error names.
const mostNamed = 3

// sign leaves a note of this process and what it does for as long as the lock is
// held. That it can't be written, as on a full disk, is no reason not to work.
func (l *Lock) sign(stateDir, work string) {
	dir := filepath.Join(stateDir, holdersName)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return
	}
	f, err := os.CreateTemp(dir, "")
	if err != nil {
		return
	}
	l.note, l.files = f.Name(), append(l.files, f)
	if try(f, unix.LOCK_EX) == nil {
		_, _ = f.WriteString(describe(work, os.Getpid()))
	}
}

// describe is what a process says of itself, as in "ebpf-cni GC (pid 7)": whoever
// reads it must see whether that may take so long. In a container of its own its
// number is nobody else's.
func describe(work string, pid int) string {
	name := filepath.Base(os.Args[0]) + " " + work
	if pid == 1 {
		return name + " (in a container)"
	}
	return fmt.Sprintf("%s (pid %d)", name, pid)
}

// NameHolders adds to an error that matches ErrLocked who holds the node's lock,
// and what to do.
func NameHolders(stateDir string, err error) error {
	if !errors.Is(err, ErrLocked) {
		return err
	}
	said := holders(filepath.Join(stateDir, holdersName))
	if len(said) == 0 {
		return fmt.Errorf("%w, which says no name: `lslocks` on the node may know it; if it hangs, end it, which frees the lock", err)
	}
	more := ""
	if n := len(said) - mostNamed; n > 0 {
		said, more = said[:mostNamed], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("%w: %s%s; if one is not at work but hangs, end it, which frees the lock", err, strings.Join(said, ", "), more)
}

// holders are those who hold the node's lock, with the time that they have held
// it, the longest first. It removes the notes of those that were killed.
func holders(dir string) (said []string) {
	type holder struct {
		name  string
		since time.Time
	}
	var found []holder
	files, _ := os.ReadDir(dir) // without it nobody is named
	for _, file := range files {
		path := filepath.Join(dir, file.Name())
		info, err := file.Info()
		if err != nil {
			continue // given back meanwhile
		}
		if busy, err := Held(path); err != nil || !busy {
			_ = os.Remove(path)
			continue
		}
		if name, err := os.ReadFile(path); err == nil && len(name) > 0 { // empty: the disk was full
			found = append(found, holder{string(name), info.ModTime()})
		}
	}
	slices.SortFunc(found, func(a, b holder) int { return a.since.Compare(b.since) })
	for _, h := range found {
		said = append(said, fmt.Sprintf("%s for %v", h.name, time.Since(h.since).Round(time.Millisecond)))
	}
	return said
}
