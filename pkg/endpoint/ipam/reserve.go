package ipam

import (
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"
)

// reserver is the library's store plus the quarantine, for one allocation under the store's lock.
type reserver struct {
	*disk.Store
	store  *Store
	known  map[netip.Addr]Entry // those that are not free
	force  netip.Addr           // allocated although it is in quarantine
	made   bool                 // the owner's file that becomes the address's
	oldest Entry                // of those in quarantine that were passed over
	err    error                // why an address could not be written
}

var _ backend.Store = (*reserver)(nil)

// Lock does nothing: the whole allocation holds the lock already, and the library would wait for it forever.
func (r *reserver) Lock() error { return nil }

// Unlock does nothing, see Lock.
func (r *reserver) Unlock() error { return nil }

// Reserve gives the address to the owner unless it is used or in quarantine. The quarantine's file stays, hidden by the
// address's own, in case that is discarded.
func (r *reserver) Reserve(id, ifname string, ip net.IP, rangeID string) (bool, error) {
	a, _ := netip.AddrFromSlice(ip)
	a = a.Unmap()
	switch e := r.known[a]; {
	case e.State == Used, e.State == Garbage:
		return false, nil
	case e.State == Quarantined && a != r.force:
		if !r.oldest.Address.IsValid() || e.Since.Before(r.oldest.Since) {
			r.oldest = e
		}
		return false, nil
	}
	e := Entry{Owner: Owner{id, ifname}, Address: a}
	ok, err := r.claim(e)
	if ok {
		err = os.WriteFile(filepath.Join(r.store.dir, lastPrefix+rangeID), []byte(a.String()), 0o600)
	}
	if err != nil {
		r.err = err
		if ok {
			_ = r.store.discard(e)
		}
		return false, err
	}
	return ok, nil
}

// claim makes the address's file, as a second name of one that is complete, and becomes its label: nobody ever sees an
// address without its owner. It reports whether the address was free.
func (r *reserver) claim(e Entry) (bool, error) {
	label, path := filepath.Join(r.store.dir, e.Owner.newLabel()), r.store.path(e.Address)
	if !r.made {
		if err := writeNew(label, e.ContainerID+disk.LineBreak+e.IfName); err != nil {
			return false, err
		}
		r.made = true
	}
	err := os.Link(label, path)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if e.Address != r.force && r.store.rests(e.Address) { // freed since the store was read
		return false, remove(path)
	}
	r.made = false
	_ = os.Rename(label, r.store.labelPath(e)) // without a label the file is read
	return true, nil
}

// writeNew writes a new file. One that a killed process has left may be an address's as well, and is not written to.
func writeNew(path, content string) error {
	if err := remove(path); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o600)
}

// GetByID returns nothing: Allocate has checked already, and the library's answer would include addresses of other
// interfaces, from files of an old format.
func (r *reserver) GetByID(string, string) []net.IP { return nil }

// ReleaseByID is not needed for allocations; the library's falls back to all addresses of the container.
func (r *reserver) ReleaseByID(string, string) error {
	return errors.New("not supported: release through Store.Release")
}
