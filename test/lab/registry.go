package lab

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// registryDir holds one directory per lab on this machine: everything that the lab keeps in files, and its lock.
const registryDir = "/run/ebpf-cni-lab"

const (
	// lockFile is locked by the lab's owner for as long as it lives; the kernel lets go of it when the owner dies.
	lockFile = "lock"
	// keptFile marks a lab whose owner has ended and wants it left running. It holds the checkout that the lab is from.
	keptFile = "kept"
	// prefix begins the name of every namespace of every lab.
	prefix = "ec"
)

// claim makes the directory of a new lab and locks it. The lock is a flock, so it says whether the owner lives even
// where process ids have come round again.
func claim() (id, dir string, lock *os.File, err error) {
	guard, err := lockRegistry()
	if err != nil {
		return "", "", nil, err
	}
	defer guard.Close()

	for range 100 {
		var raw [2]byte
		if _, err := rand.Read(raw[:]); err != nil {
			return "", "", nil, fmt.Errorf("choose a lab id: %w", err)
		}
		id = hex.EncodeToString(raw[:])
		dir = filepath.Join(registryDir, id)
		err = os.Mkdir(dir, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return "", "", nil, fmt.Errorf("make the lab's directory: %w", err)
		}
		lock, err = takeLock(dir)
		if err != nil {
			return "", "", nil, errors.Join(err, os.RemoveAll(dir))
		}
		return id, dir, lock, nil
	}
	return "", "", nil, fmt.Errorf("choose a lab id: 100 tries found only ids that are taken in %s; run `make clean`", registryDir)
}

// lockRegistry serialises the making and the sweeping of labs, so that a lab is never seen between its directory and
// its lock. Closing the file unlocks.
func lockRegistry() (*os.File, error) {
	if err := os.MkdirAll(registryDir, 0o700); err != nil {
		return nil, fmt.Errorf("make %s: %w", registryDir, err)
	}
	guard, err := os.OpenFile(filepath.Join(registryDir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the labs' lock: %w", err)
	}
	for {
		err = unix.Flock(int(guard.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		guard.Close()
		return nil, fmt.Errorf("lock %s: %w", guard.Name(), err)
	}
	return guard, nil
}

// takeLock locks a lab's directory for this process; errOwned when its owner lives.
func takeLock(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lab's lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errOwned
		}
		return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	// For people who look: nothing reads the number.
	_ = lock.Truncate(0)
	_, _ = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return lock, nil
}

var errOwned = errors.New("the lab's owner is alive")

// namespacesOf lists the named namespaces of one lab.
func namespacesOf(id string) ([]string, error) {
	return namesIn(netnsDir, func(entry fs.DirEntry) bool { return strings.HasPrefix(entry.Name(), prefix+id+"-") })
}

// labIDs lists the labs that are there, of every checkout.
func labIDs() ([]string, error) { return namesIn(registryDir, fs.DirEntry.IsDir) }

// namesIn lists the entries of a directory that are wanted; none of a directory that is not there.
func namesIn(dir string, wanted func(fs.DirEntry) bool) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	var names []string
	for _, entry := range entries {
		if wanted(entry) {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// Remains lists what exists of a lab on this machine: namespaces, processes, mounts, cgroups and its directory. It is empty
// once the lab is closed.
func Remains(id string) ([]string, error) {
	names, err := namespacesOf(id)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, name := range names {
		found = append(found, "namespace "+name)
	}
	processes, err := processesIn(names)
	if err != nil {
		return nil, err
	}
	for _, pid := range processes {
		found = append(found, fmt.Sprintf("process %d", pid))
	}
	mounts, err := mountsUnder(filepath.Join(registryDir, id))
	if err != nil {
		return nil, err
	}
	for _, mount := range mounts {
		found = append(found, "mount "+mount)
	}
	cgroups, err := cgroupsOf(id)
	if err != nil {
		return nil, err
	}
	for _, cgroup := range cgroups {
		found = append(found, "cgroup "+cgroup)
	}
	if _, err := os.Stat(filepath.Join(registryDir, id)); err == nil {
		found = append(found, "directory "+filepath.Join(registryDir, id))
	}
	return found, nil
}
