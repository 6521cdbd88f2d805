package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
)

var labID = regexp.MustCompile(`^[0-9a-f]{4}$`)

// Sweep ends the labs whose owner is dead and returns their ids: processes, namespaces, mounts, pins and files. Labs
// that were kept on purpose stay, and so does every lab whose owner lives.
func Sweep() ([]string, error) {
	return sweep(func(KeptLab) bool { return false })
}

// SweepKept does what Sweep does, and also ends the labs that were kept from this checkout: the others are somebody
// else's.
func SweepKept() ([]string, error) {
	here := checkout()
	return sweep(func(k KeptLab) bool { return k.From == here })
}

// End ends one lab, kept or left by a dead owner.
func End(id string) error {
	if !labID.MatchString(id) {
		return fmt.Errorf("end lab %q: an id is four hexadecimal digits; `ls %s` shows those there are", id, registryDir)
	}
	guard, err := lockRegistry()
	if err != nil {
		return err
	}
	defer guard.Close()
	if _, err := os.Stat(filepath.Join(registryDir, id)); err != nil {
		return fmt.Errorf("end lab %s: there is none; `ls %s` shows those there are", id, registryDir)
	}
	ended, err := sweepOne(id)
	if err == nil && !ended {
		err = fmt.Errorf("%w; end that process", errOwned)
	}
	if err != nil {
		return fmt.Errorf("end lab %s: %w", id, err)
	}
	return nil
}

// KeptLab is a lab that somebody keeps.
type KeptLab struct {
	ID string
	// From is the directory of the checkout that the lab was started in.
	From string
}

// Kept lists the labs that are kept, of every checkout.
func Kept() ([]KeptLab, error) {
	ids, err := labIDs()
	if err != nil {
		return nil, err
	}
	var all []KeptLab
	for _, id := range ids {
		k, ok, err := keptOf(id)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, k)
		}
	}
	return all, nil
}

// keptOf reads the mark of a kept lab; false for a lab that has none.
func keptOf(id string) (KeptLab, bool, error) {
	from, err := os.ReadFile(filepath.Join(registryDir, id, keptFile))
	if errors.Is(err, fs.ErrNotExist) {
		return KeptLab{}, false, nil
	}
	if err != nil {
		return KeptLab{}, false, fmt.Errorf("read whose lab %s is: %w", id, err)
	}
	return KeptLab{ID: id, From: string(from)}, true, nil
}

// checkout tells the labs of one copy of the sources from those of another; outside of any, it is the working
// directory.
func checkout() string {
	if root, err := Checkout(); err == nil {
		return root
	}
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	return dir
}

// sweep ends the labs of dead owners, of the kept ones those that are chosen.
func sweep(chosen func(KeptLab) bool) ([]string, error) {
	guard, err := lockRegistry()
	if err != nil {
		return nil, err
	}
	defer guard.Close()

	ids, err := labIDs()
	if err != nil {
		return nil, err
	}
	var swept []string
	var failed []error
	for _, id := range ids {
		kept, ok, err := keptOf(id)
		done := false
		if err == nil && (!ok || chosen(kept)) {
			done, err = sweepOne(id)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("sweep lab %s: %w", id, err))
		}
		if done {
			swept = append(swept, id)
		}
	}
	return swept, errors.Join(failed...)
}

// sweepOne ends a lab, unless its owner lives: then it is false.
func sweepOne(id string) (bool, error) {
	lock, err := takeLock(filepath.Join(registryDir, id))
	if errors.Is(err, errOwned) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer lock.Close()
	if err := demolish(id); err != nil {
		return true, err
	}
	return true, removeFiles(id)
}
