package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// qdiscs is the record of the clsact qdiscs that we created and that cleanup may
// remove: a file with one ifindex per line.
type qdiscs struct {
	stateDir string
}

func (q qdiscs) path() string { return filepath.Join(q.stateDir, "qdiscs") }

// attach attaches a program and records a qdisc that this creates. It does so
// beforehand, so that a killed process leaves none unrecorded.
func (q qdiscs) attach(a attach.Attacher, ifindex int, hook attach.Hook, prog *ebpf.Program) error {
	if a.Mode == attach.TCX || hook.OnSockets() {
		_, err := a.Attach(ifindex, hook, prog)
		return err
	}
	added, err := q.add(ifindex)
	// On a full disk a qdisc may be left behind by cleanup; that is better than no program.
	if err != nil && !errors.Is(err, unix.ENOSPC) {
		return err
	}
	made, err := a.Attach(ifindex, hook, prog)
	if added && !made {
		err = errors.Join(err, q.drop(ifindex))
	}
	return err
}

// remove deletes the qdisc of an interface if we created it and it has no filters.
func (q qdiscs) remove(ifindex int) error {
	made, err := q.list()
	if err != nil || !slices.Contains(made, ifindex) {
		return err
	}
	if removed, err := attach.RemoveQdisc(ifindex); err != nil || !removed {
		return err
	}
	return q.drop(ifindex)
}

// list returns the recorded interfaces.
func (q qdiscs) list() ([]int, error) {
	text, err := os.ReadFile(q.path())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read record of qdiscs: %w", err)
	}
	var out []int
	for line := range strings.FieldsSeq(string(text)) {
		i, err := strconv.Atoi(line)
		if err != nil || i <= 0 {
			return nil, fmt.Errorf("read record of qdiscs %s: %q is not an interface index (delete the file)", q.path(), line)
		}
		out = append(out, i)
	}
	return out, nil
}

func (q qdiscs) add(ifindex int) (bool, error) {
	made, err := q.list()
	if err != nil || slices.Contains(made, ifindex) {
		return false, err
	}
	return true, q.write(append(made, ifindex))
}

func (q qdiscs) drop(ifindex int) error {
	made, err := q.list()
	if err != nil {
		return err
	}
	return q.write(slices.DeleteFunc(made, func(i int) bool { return i == ifindex }))
}

// prune removes interfaces that are gone from the record.
func (q qdiscs) prune() error {
	made, err := q.list()
	if err != nil || len(made) == 0 {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(made), func(i int) bool { return !interfaceExists(i) })
	if len(left) == len(made) {
		return nil
	}
	if err := q.write(left); !errors.Is(err, unix.ENOSPC) { // an index is not used twice, so the next start can still do it
		return err
	}
	return nil
}

func (q qdiscs) write(made []int) error {
	var text strings.Builder
	for _, i := range made {
		fmt.Fprintln(&text, i)
	}
	next := q.path() + ".next"
	if err := os.WriteFile(next, []byte(text.String()), 0o600); err != nil {
		return fmt.Errorf("write record of qdiscs: %w", err)
	}
	if err := os.Rename(next, q.path()); err != nil {
		return fmt.Errorf("write record of qdiscs: %w", err)
	}
	return nil
}
