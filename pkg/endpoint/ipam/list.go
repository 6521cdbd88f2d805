package ipam

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// State of an address in the store.
type State string

// The states. An address that is free has no entry.
const (
	Used        State = "used"
	Quarantined State = "quarantined"
	Garbage     State = "garbage" // a file without an owner, left by a kill; the next change of the store removes it
)

// Entry is one address of a store.
type Entry struct {
	Network string
	Address netip.Addr
	// Owner of a used address; the last one of an address in quarantine.
	Owner
	// Since is when the address was allocated or freed.
	Since time.Time
	State State

	file string
}

type entries []Entry

func (all entries) ownedBy(o Owner) (owned []netip.Addr) {
	for _, e := range all {
		if e.State == Used && e.Owner == o {
			owned = append(owned, e.Address)
		}
	}
	return owned
}

func (all entries) quarantined(over func(time.Time) bool) map[netip.Addr]Entry {
	m := map[netip.Addr]Entry{}
	for _, e := range all {
		if e.State == Quarantined && !over(e.Since) {
			m[e.Address] = e
		}
	}
	return m
}

// List reads the stores of all networks, sorted by network and address. It takes no lock and changes nothing: addresses
// that are allocated or freed meanwhile may or may not be in it. It is empty if there is no state directory.
func List(stateDir string) ([]Entry, error) {
	networks, err := readDir(Dir(stateDir))
	if err != nil {
		return nil, err
	}
	var all []Entry
	for _, n := range networks {
		if !n.IsDir() {
			continue
		}
		one, err := read(filepath.Join(Dir(stateDir), n.Name()))
		if err != nil {
			return nil, err
		}
		all = append(all, one...)
	}
	return all, nil
}

// Entries lists this store's addresses, as List does.
func (s *Store) Entries() ([]Entry, error) { return read(s.dir) }

// Owned returns the addresses that an owner has.
func (s *Store) Owned(o Owner) ([]netip.Addr, error) {
	all, err := read(s.dir)
	return all.ownedBy(o), err
}

func read(dir string) (entries, error) {
	files, err := readDir(dir)
	if err != nil {
		return nil, err
	}
	var all entries
	for _, f := range files {
		name, quarantined := strings.CutPrefix(f.Name(), quarantinePrefix)
		a, err := netip.ParseAddr(name)
		if err != nil || !f.Type().IsRegular() {
			continue // the lock, the library's note of the last address, or a file that is not ours
		}
		e := Entry{Network: filepath.Base(dir), Address: a, file: f.Name()}
		ok, err := e.load(filepath.Join(dir, f.Name()), quarantined)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b Entry) int { return a.Address.Compare(b.Address) })
	return all, nil
}

// load reads an entry's file; false: the file is gone.
func (e *Entry) load(path string, quarantined bool) (bool, error) {
	content, changed, err := readWhole(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read address store: %w", err)
	}
	e.Since = changed
	owner, ok := parseOwner(string(content))
	switch {
	case !ok:
		e.State = Garbage
	case quarantined:
		e.Owner, e.State = owner, Quarantined
	default:
		e.Owner, e.State = owner, Used
	}
	return true, nil
}

// readWhole returns a file's content and modification time. A store has a file for each address of the node, and every
// ADD and DEL reads all of them: these four system calls take a third of the time of os.ReadFile and os.Stat.
func readWhole(path string) (content []byte, changed time.Time, err error) {
	fd, err := open(path)
	if err != nil {
		return nil, changed, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, changed, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	content = make([]byte, st.Size)
	n := 0
	for n < len(content) {
		got, err := unix.Read(fd, content[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, changed, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if got == 0 {
			break
		}
		n += got
	}
	return content[:n], time.Unix(st.Mtim.Unix()), nil
}

func open(path string) (int, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func readDir(dir string) ([]fs.DirEntry, error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read address store: %w", err)
	}
	return list, nil
}
