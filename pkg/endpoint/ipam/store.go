package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// ErrAllocated is returned by Allocate for an owner that has addresses already.
var ErrAllocated = errors.New("has an address already")

// ErrExhausted is returned (wrapped) by Allocate when no address is left, or the one asked for is taken.
var ErrExhausted = errors.New("no address available")

// DefaultQuarantine is how long a freed address is in quarantine if the configuration does not say.
const DefaultQuarantine = 60 * time.Second

const (
	quarantinePrefix = "quarantine."
	lastPrefix       = "last_reserved_ip." // the library's, which reads it
	lockName         = "lock"
	maxNetworkName   = 200 // bytes: it is the name of a directory
)

// Owner is the attachment that an address belongs to.
type Owner struct {
	ContainerID string
	IfName      string
}

// Options of a Store.
type Options struct {
	// Quarantine is how long a freed address is not allocated again; zero: it can be at once.
	Quarantine time.Duration
	// Now is the clock, time.Now if nil.
	Now func() time.Time
}

// Store is the store of one network. Pods that come and go at once do not wait for each other here. The caller sees to it
// that nobody else works for the same owner meanwhile.
type Store struct {
	stateDir   string
	dir        string
	quarantine time.Duration
	now        func() time.Time
}

// Dir is the directory of the stores of all networks.
func Dir(stateDir string) string { return filepath.Join(stateDir, "ipam") }

// Open returns the store of a network, which the first Allocate makes.
func Open(stateDir, network string, o Options) (*Store, error) {
	if err := utils.ValidateNetworkName(network); err != nil || len(network) > maxNetworkName {
		return nil, fmt.Errorf("network name %q: must be at most %d letters, digits, '.', '_', '-'", network, maxNetworkName)
	}
	s := &Store{stateDir: stateDir, dir: filepath.Join(Dir(stateDir), network), quarantine: o.Quarantine, now: o.Now}
	if s.now == nil {
		s.now = time.Now
	}
	return s, nil
}

// Allocate allocates one address of each range set to the owner, or none at all. A requested address is allocated even
// if it is in quarantine; otherwise the next one that is not, or if there is none the one that was freed first. It
// fails with ErrAllocated or ErrExhausted.
func (s *Store) Allocate(ctx context.Context, o Owner, c Config) ([]netip.Addr, error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make address store: %w", err)
	}
	return s.allocate(ctx, o, c)
}

// allocate is Allocate once the directory exists. Beside others, what looks like no address may be one that was just
// taken by another, or that nobody could clean up.
func (s *Store) allocate(ctx context.Context, o Owner, c Config) ([]netip.Addr, error) {
	got, beside, err := s.allocateUnder(ctx, bpffs.FileAmong, o, c)
	if beside && errors.Is(err, ErrExhausted) {
		got, _, err = s.allocateUnder(ctx, alone, o, c)
	}
	return got, err
}

func (s *Store) allocateUnder(ctx context.Context, take taker, o Owner, c Config) (got []netip.Addr, beside bool, err error) {
	err = s.locked(ctx, take, func(others bool) error {
		beside = others
		all, err := s.scan(&o, beside)
		if err != nil {
			return err
		}
		if owned := all.ownedBy(o); len(owned) > 0 {
			return fmt.Errorf("%s of container %s %w: %s", o.IfName, o.ContainerID, ErrAllocated, owned[0])
		}
		got, err = s.allocateAll(o, c, all)
		return err
	})
	return got, beside, err
}

func (s *Store) allocateAll(o Owner, c Config, all entries) (got []netip.Addr, err error) {
	library, err := disk.New(filepath.Base(s.dir), filepath.Dir(s.dir))
	if err != nil {
		return nil, fmt.Errorf("open address store %s: %w", s.dir, err)
	}
	defer library.Close()
	defer func() {
		_ = os.Remove(filepath.Join(s.dir, o.newLabel()))
		for _, a := range got {
			if err != nil {
				_ = s.discard(Entry{Owner: o, Address: a})
			}
		}
	}()
	for i := range c.Ranges {
		a, err := s.allocateOne(library, i, o, c, all)
		if err != nil {
			return got, err
		}
		got = append(got, a)
	}
	return got, nil
}

func (s *Store) allocateOne(library *disk.Store, i int, o Owner, c Config, all entries) (netip.Addr, error) {
	set, want := c.Ranges[i], c.requestedIn(i)
	r := &reserver{Store: library, store: s, known: all.byAddress(), force: want}
	alloc := allocator.NewIPAllocator(&set, r, i)
	ip, err := alloc.Get(o.ContainerID, o.IfName, asIP(want))
	if err != nil && !want.IsValid() && r.oldest.Address.IsValid() {
		r.force = r.oldest.Address
		ip, err = alloc.Get(o.ContainerID, o.IfName, asIP(r.force))
	}
	if err != nil && r.err != nil {
		return netip.Addr{}, fmt.Errorf("write address store %s: %w", s.dir, r.err)
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: %w (address store %s)", ErrExhausted, err, s.dir)
	}
	a, _ := netip.AddrFromSlice(ip.Address.IP)
	return a.Unmap(), nil
}

// quarantineOver reports whether an address freed at that time may be allocated again. It may if the time is in the
// future, because the clock was set back: better than waiting until the clock has caught up.
func (s *Store) quarantineOver(since time.Time) bool {
	age := s.now().Sub(since)
	return age < 0 || age >= s.quarantine
}

// rests reports whether the address is in quarantine.
func (s *Store) rests(a netip.Addr) bool {
	info, err := os.Lstat(s.quarantinePath(a))
	return err == nil && !s.quarantineOver(info.ModTime())
}

// Release frees every address of the owner and returns them. Neither an owner without addresses nor a missing store is
// an error.
func (s *Store) Release(ctx context.Context, o Owner) ([]netip.Addr, error) {
	return s.releaseIf(ctx, bpffs.FileAmong, &o, s.free, func(e Entry) bool { return e.Owner == o })
}

// Discard is Release for addresses that have not been in use: they need no quarantine but that of an earlier use.
func (s *Store) Discard(ctx context.Context, o Owner) ([]netip.Addr, error) {
	return s.releaseIf(ctx, bpffs.FileAmong, &o, s.discard, func(e Entry) bool { return e.Owner == o })
}

// ReleaseExcept frees every address whose owner is not in keep.
func (s *Store) ReleaseExcept(ctx context.Context, keep map[Owner]bool) ([]netip.Addr, error) {
	return s.releaseIf(ctx, alone, nil, s.free, func(e Entry) bool { return !keep[e.Owner] })
}

// releaseIf releases the used addresses that match, of all or of those that may be the owner's.
func (s *Store) releaseIf(ctx context.Context, take taker, o *Owner, release func(Entry) error, match func(Entry) bool) ([]netip.Addr, error) {
	if _, err := os.Stat(s.dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var freed []netip.Addr
	err := s.locked(ctx, take, func(beside bool) error {
		all, err := s.scan(o, beside)
		if err != nil {
			return err
		}
		for _, e := range all {
			if e.State != Used || !match(e) {
				continue
			}
			if err := release(e); err != nil {
				return err
			}
			freed = append(freed, e.Address)
		}
		return nil
	})
	if errors.Is(err, errNoStore) { // removed a moment ago
		return nil, nil
	}
	return freed, err
}

// free frees an address. The rename puts it into quarantine in one step.
func (s *Store) free(e Entry) error {
	if s.quarantine <= 0 {
		return s.discard(e)
	}
	if err := s.removeLabels(e); err != nil {
		return err
	}
	path, now := s.path(e.Address), s.now()
	if err := os.Chtimes(path, now, now); err != nil {
		return fmt.Errorf("free address %s: %w", e.Address, err)
	}
	if err := os.Rename(path, s.quarantinePath(e.Address)); err != nil {
		return fmt.Errorf("free address %s: %w", e.Address, err)
	}
	return nil
}

// discard frees an address without a quarantine of its own.
func (s *Store) discard(e Entry) error {
	if err := s.removeLabels(e); err != nil {
		return err
	}
	return remove(s.path(e.Address))
}

// removeLabels removes what names the address's file as its owner's. One that a killed process has linked, and not yet
// renamed, is still a new label.
func (s *Store) removeLabels(e Entry) error {
	return errors.Join(remove(s.labelPath(e)), remove(filepath.Join(s.dir, e.Owner.newLabel())))
}

func (s *Store) labelPath(e Entry) string { return filepath.Join(s.dir, e.Owner.labelOf(e.Address)) }

func (s *Store) quarantinePath(a netip.Addr) string {
	return filepath.Join(s.dir, quarantinePrefix+a.String())
}

func (s *Store) path(a netip.Addr) string { return filepath.Join(s.dir, a.String()) }

// errNoStore is returned (wrapped) when the store has no directory.
var errNoStore = errors.New("the directory of the address store is gone")

// taker takes the store's lock, and says whether that is beside others.
type taker func(ctx context.Context, path string) (l *bpffs.Lock, beside bool, err error)

func alone(ctx context.Context, path string) (*bpffs.Lock, bool, error) {
	l, err := bpffs.File(ctx, path)
	return l, false, err
}

// locked runs fn under the store's lock, on the same file as the library's own lock. Without a directory it fails with
// errNoStore.
func (s *Store) locked(ctx context.Context, take taker, fn func(beside bool) error) error {
	l, beside, err := take(ctx, filepath.Join(s.dir, lockName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w, somebody has removed it (try again): %w", errNoStore, err)
	}
	if err != nil {
		return fmt.Errorf("lock address store: %w", bpffs.NameHolders(s.stateDir, err))
	}
	defer l.Release()
	return fn(beside)
}

// scan reads the store as work for one owner needs it, or whole. Unless there are others beside it, whose work looks
// like that for a moment, it removes what a killed process left, which is a file that was made and never written, labels
// of freed addresses, and the files of addresses whose quarantine is over.
func (s *Store) scan(o *Owner, beside bool) (entries, error) {
	files, err := listFiles(s.dir)
	if err != nil {
		return nil, err
	}
	all, err := load(s.dir, files, o)
	if err != nil {
		return nil, err
	}
	over := func(e Entry) bool { return e.State == Quarantined && s.quarantineOver(e.Since) }
	if beside {
		return slices.DeleteFunc(all, over), nil
	}
	if err := removeStaleLabels(s.dir, files); err != nil {
		return nil, err
	}
	var kept entries
	for _, e := range all {
		if e.State != Garbage && !over(e) {
			kept = append(kept, e)
		} else if err := remove(filepath.Join(s.dir, e.file)); err != nil {
			return nil, err
		}
	}
	return kept, nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("clean address store: %w", err)
	}
	return nil
}

func asIP(a netip.Addr) net.IP {
	if !a.IsValid() {
		return nil
	}
	return a.AsSlice()
}

func parseOwner(content string) (Owner, bool) {
	id, ifname, ok := strings.Cut(strings.TrimSpace(content), disk.LineBreak)
	if !ok || id == "" || ifname == "" {
		return Owner{}, false
	}
	return Owner{id, ifname}, true
}
