package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
)

// record is what cleanup needs to know of how the node was before us. It lives
// in the state directory and is written before anything that it records is changed.
type record struct {
	path string
	// Made are the directories that were not there.
	Made []string `json:"directories_made"`
	// Sysctls by name, as they were and as we wrote them.
	Sysctls map[string]setting `json:"sysctls"`
}

// setting is a sysctl that we changed.
type setting struct {
	Before string `json:"before"`
	Ours   string `json:"ours"`
}

const recordName = "node.json"

// openRecord makes the directories that are missing and reads the record of
// before, if there is one. made are the directories that the caller made.
func openRecord(d Directories, made []string) (*record, error) {
	for _, dir := range []string{d.Conf, d.Bin} {
		if dir == "" {
			continue
		}
		parents, err := makeAll(dir)
		if err != nil {
			return nil, fmt.Errorf("make directory: %w", err)
		}
		made = append(made, parents...)
	}
	if err := os.Chmod(d.State, 0o700); err != nil {
		return nil, fmt.Errorf("restrict the state directory: %w", err)
	}
	r, err := readRecord(d.State)
	if err != nil {
		return nil, err
	}
	for _, dir := range made {
		if !slices.Contains(r.Made, dir) {
			r.Made = append(r.Made, dir)
		}
	}
	return r, r.write()
}

// makeAll makes a directory and those above it, and returns the new ones,
// the deepest first. The runtime's directories are for everybody to read.
func makeAll(dir string) ([]string, error) {
	var missing []string
	for at := dir; ; at = filepath.Dir(at) {
		_, err := os.Stat(at)
		if err == nil || at == filepath.Dir(at) {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		missing = append(missing, at)
	}
	return missing, os.MkdirAll(dir, 0o755)
}

// removeMade takes a state directory away again that was made for nothing.
func removeMade(stateDir string, made []string) {
	if len(made) == 0 {
		return
	}
	_ = os.Remove(filepath.Join(stateDir, bpffs.AgentLock))
	for _, dir := range made {
		_ = os.Remove(dir) // one that is not empty stays
	}
}

func readRecord(stateDir string) (*record, error) {
	r := &record{path: filepath.Join(stateDir, recordName)}
	content, err := os.ReadFile(r.path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the record of this node: %w", err)
	}
	if err == nil {
		if err := json.Unmarshal(content, r); err != nil {
			return nil, fmt.Errorf("read the record of this node %s: %w (delete it to go on; cleanup then restores none of the node's former settings)", r.path, err)
		}
	}
	if r.Sysctls == nil {
		r.Sysctls = map[string]setting{}
	}
	return r, nil
}

// note writes that a sysctl is about to be changed. What can't be written does not count as changed.
func (r *record) note(name string, to setting) error {
	return r.change(func() { r.Sysctls[name] = to })
}

// forget writes that a sysctl is as it was before us.
func (r *record) forget(name string) error { return r.change(func() { delete(r.Sysctls, name) }) }

func (r *record) change(sysctls func()) error {
	before := r.Sysctls
	r.Sysctls = maps.Clone(before)
	sysctls()
	err := r.write()
	if err != nil {
		r.Sysctls = before
	}
	return err
}

func (r *record) write() error {
	content, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the record of this node: %w", err)
	}
	content = append(content, '\n')
	if have, err := os.ReadFile(r.path); err == nil && bytes.Equal(have, content) {
		return nil // a full disk is no reason not to start again
	}
	if err := replaceFile(r.path, content); err != nil {
		return fmt.Errorf("write the record of this node: %w", err)
	}
	return nil
}

// replaceFile writes a file anew. Whoever reads it finds the old content or the new one, whole.
func replaceFile(path string, content []byte) error {
	next := path + ".next"
	if err := os.WriteFile(next, content, 0o600); err != nil {
		return err
	}
	return os.Rename(next, path)
}
