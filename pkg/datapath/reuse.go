package datapath

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
)

// record says what the pinned programs were made of. Where nothing of that has changed, a start goes on with them instead of
// asking the verifier anew, which takes seconds on a busy node, and all of them the node is behind the cluster.
//
// Whatever a killed process leaves, no other program is taken for one of the record: the kernel gives no ID twice during a boot,
// and no state directory outlives one.
type record struct {
	Source   string                    // a digest of the programs' instructions and constants, and of their maps
	Maps     map[string]ebpf.MapID     // that have pins
	Programs map[string]ebpf.ProgramID // all of them
}

// recordPath is the record's file in the state directory.
func (o Options) recordPath() string { return filepath.Join(o.StateDir, "programs.json") }

// reuse opens the pinned programs if they are those that this start would load. Whatever speaks against it is no error.
func (l *loader) reuse() bool {
	text, err := os.ReadFile(l.opts.recordPath())
	if err != nil {
		return false
	}
	var was record
	if err := json.Unmarshal(text, &was); err != nil {
		return false
	}
	now, err := l.describe()
	if err != nil || was.Source != now.Source || !maps.Equal(was.Maps, now.Maps) {
		return false
	}
	programs := make(map[string]*ebpf.Program)
	for name := range l.spec.Programs {
		p, err := openPinned(l.opts.Dir.Program(name), was.Programs[name])
		if err != nil {
			closePrograms(programs)
			return false
		}
		programs[name] = p
	}
	l.programs, l.ids, l.reused = programs, was.Programs, true
	return true
}

// remember writes the record of the programs that have just been published. Without one, or with one that was cut off, the next
// start loads them anew, which is no reason for this one to fail.
func (l *loader) remember() {
	now, err := l.describe()
	if err == nil {
		err = now.write(l.opts.recordPath())
	}
	if err != nil {
		l.opts.Log.Warn("the next start will load all programs anew", "error", err)
	}
}

func (r record) write(path string) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

// describe is the record of the programs that are loaded, or are to be.
func (l *loader) describe() (record, error) {
	r := record{Source: source(l.spec), Programs: l.ids, Maps: make(map[string]ebpf.MapID)}
	for name, m := range l.tables.Maps() {
		info, err := m.Info()
		if err != nil {
			return record{}, fmt.Errorf("read map %s: %w", name, err)
		}
		r.Maps[name], _ = info.ID()
	}
	return r, nil
}

// source identifies what configured programs are made of.
func source(spec *ebpf.CollectionSpec) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		m := spec.Maps[name]
		fmt.Fprintln(h, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Variables)) {
		fmt.Fprintf(h, "%s %x\n", name, spec.Variables[name].Value)
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		fmt.Fprintln(h, name)
		var text []byte
		for _, ins := range spec.Programs[name].Instructions {
			text = binary.BigEndian.AppendUint16(text, uint16(ins.OpCode))
			text = append(text, byte(ins.Dst), byte(ins.Src))
			text = binary.BigEndian.AppendUint16(text, uint16(ins.Offset))
			text = binary.BigEndian.AppendUint64(text, uint64(ins.Constant))
			text = fmt.Append(text, ins.Reference(), "\n", ins.Symbol(), "\n")
		}
		_, _ = h.Write(text) // which cannot fail
	}
	return hex.EncodeToString(h.Sum(nil))
}

// forget removes the record.
func (o Options) forget() error {
	if err := os.Remove(o.recordPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of programs: %w", err)
	}
	return nil
}

func closePrograms(programs map[string]*ebpf.Program) {
	for _, p := range programs {
		_ = p.Close()
	}
}
