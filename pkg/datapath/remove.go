package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Remove removes everything that Load, Attach and the plugin have attached and
// pinned: programs on interfaces, the qdiscs that we created, the pin directory and
// the record of qdiscs. It is no error if there is nothing. It uses only the
// directories, the lock's timeout and the logger of Options.
func Remove(ctx context.Context, opts Options) error {
	opts = opts.withDefaults()
	if _, err := os.Stat(opts.StateDir); errors.Is(err, fs.ErrNotExist) {
		return remove(opts)
	}
	loading, err := opts.lockLoading(ctx)
	if err != nil {
		return err
	}
	defer loading.Release()
	pods, err := opts.lock(ctx, "removal")
	if err != nil {
		return err
	}
	defer pods.Release()
	return remove(opts)
}

// remove removes pins last, so that it can be tried again after an error.
func remove(opts Options) error {
	places, err := knownPlaces(opts)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range places {
		errs = append(errs, opts.attacher().Detach(p.Ifindex, p.Hook))
	}
	q := qdiscs{opts.StateDir}
	made, err := q.list()
	errs = append(errs, err)
	for _, ifindex := range made {
		errs = append(errs, q.remove(ifindex))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.RemoveAll(string(opts.Dir)); err != nil {
		return fmt.Errorf("remove pin directory: %w", err)
	}
	if err := os.Remove(q.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record of qdiscs: %w", err)
	}
	return opts.forget()
}
