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

func (all entries) byAddress() map[netip.Addr]Entry {
	m := make(map[netip.Addr]Entry, len(all))
	for _, e := range all {
		m[e.Address] = e
	}
	return m
}

// List reads the stores of all networks, sorted by network and address. It takes no lock and changes nothing: addresses
// that are allocated or freed meanwhile may or may not be in it. It is empty if there is no state directory.
func List(stateDir string) ([]Entry, error) {
	networks, err := os.ReadDir(Dir(stateDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read address store: %w", err)
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
	files, err := listFiles(s.dir)
	if err != nil {
		return nil, err
	}
	all, err := load(s.dir, files, &o)
	return all.ownedBy(o), err
}

func read(dir string) (entries, error) {
	files, err := listFiles(dir)
	if err != nil {
		return nil, err
	}
	return load(dir, files, nil)
}

// load makes entries of a store's files, sorted by address. For an owner it opens no file of an address that somebody
// else uses, as its label says, or that is in quarantine: these entries lack the owner, and used ones the time.
func load(dir string, files []file, o *Owner) (entries, error) {
	labels := map[uint64]string{}
	for _, f := range files {
		if label, ok := parseLabel(f.name); ok && o != nil {
			labels[f.inode] = label
		}
	}
	var all entries
	for _, f := range files {
		name, quarantined := strings.CutPrefix(f.name, quarantinePrefix)
		a, err := netip.ParseAddr(name)
		if err != nil {
			continue // a label, the lock, the library's note of the last address, or a file that is not ours
		}
		e := Entry{Network: filepath.Base(dir), Address: a, State: Used, file: f.name}
		if quarantined {
			e.State = Quarantined
		}
		switch label := labels[f.inode]; {
		case o == nil || !quarantined && (label == "" || label == o.label()):
			err = e.readOwner(dir)
		case quarantined:
			err = e.readTime(dir)
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read address store: %w", err)
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b Entry) int { return a.Address.Compare(b.Address) })
	return all.withoutHidden(), nil
}

// withoutHidden leaves out the quarantine of addresses that are used again.
func (all entries) withoutHidden() entries {
	used := map[netip.Addr]bool{}
	for _, e := range all {
		used[e.Address] = used[e.Address] || e.State == Used
	}
	return slices.DeleteFunc(all, func(e Entry) bool { return e.State == Quarantined && used[e.Address] })
}

func (e *Entry) readTime(dir string) error {
	info, err := os.Lstat(filepath.Join(dir, e.file))
	if err == nil {
		e.Since = info.ModTime()
	}
	return err
}

func (e *Entry) readOwner(dir string) error {
	content, err := os.ReadFile(filepath.Join(dir, e.file))
	if err != nil {
		return err
	}
	owner, ok := parseOwner(string(content))
	if e.Owner = owner; !ok {
		e.State = Garbage
	}
	return e.readTime(dir)
}
