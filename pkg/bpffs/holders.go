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

// holdersName is the directory with a note of each process that holds the node's
// lock. A process keeps its note locked: one that is not locked is of a process
// that was killed. /proc/locks is no alternative: in the agent's container it does
// not show the plugins outside.
const holdersName = "holders"

// mostNamed is how many holders an error names.
const mostNamed = 3

// sign leaves a note of this process and its work until the lock is released. A
// note that can't be written, as on a full disk, is not worth failing for.
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

// describe is the text of a note, such as "ebpf-cni GC (pid 7)", from which an
// operator can tell whether that may take so long. In a container of its own a
// process does not know its number outside.
func describe(work string, pid int) string {
	name := filepath.Base(os.Args[0]) + " " + work
	if pid == 1 {
		return name + " (in a container)"
	}
	return fmt.Sprintf("%s (pid %d)", name, pid)
}

// NameHolders adds to an error that matches ErrLocked who holds the node's lock, and
// what to do. Other errors are returned unchanged.
func NameHolders(stateDir string, err error) error {
	if !errors.Is(err, ErrLocked) {
		return err
	}
	names := holders(filepath.Join(stateDir, holdersName))
	if len(names) == 0 {
		return fmt.Errorf("%w, which left no name: run `lslocks` on the node to find it; if it hangs, end it, which releases the lock", err)
	}
	more := ""
	if n := len(names) - mostNamed; n > 0 {
		names, more = names[:mostNamed], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("%w: %s%s; if one of them hangs, end it, which releases the lock", err, strings.Join(names, ", "), more)
}

// holders describes who holds the node's lock and for how long, the longest first.
// It removes the notes of killed processes.
func holders(dir string) (names []string) {
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
			continue // released meanwhile
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
		names = append(names, fmt.Sprintf("%s for %v", h.name, time.Since(h.since).Round(time.Millisecond)))
	}
	return names
}
