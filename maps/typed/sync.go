package typed

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
)

// Sync brings a map from what it holds to what it should hold, with the fewest
// writes, in batches. Which of Add and Remove comes first is the caller's to say:
// packets need what is new before what is old goes, a full map needs the room.
// What cannot be written keeps back nothing else. Only for maps that nobody else
// adds entries to at the same time.
type Sync[K comparable, V any] struct {
	Map *Map[K, V]
	// Have is what the map holds, such as its Content; Add and Remove keep it up to date.
	Have map[K]V
	// Same says that a value which is there needs no write, so that fields the
	// programs own do not count; nil: the two are equal.
	Same func(have, want V) bool
}

// Add writes every entry that is missing or differs. The error is an Errors of
// those that could not be written.
func (s Sync[K, V]) Add(want map[K]V) error {
	var keys []K
	var values []V
	for k, v := range want {
		if have, ok := s.Have[k]; !ok || !s.same(have, v) {
			keys, values = append(keys, k), append(values, v)
		}
	}
	return s.inBatches(keys, "write %v to", func(from int) (int, error) {
		return s.Map.BatchUpdate(keys[from:], values[from:], nil)
	}, func(i int) { s.Have[keys[i]] = values[i] })
}

// Remove deletes every entry that keep is not true of. The error is an Errors of
// those that could not be deleted; one that is gone already is none of them.
func (s Sync[K, V]) Remove(keep func(K, V) bool) error {
	var keys []K
	for k, v := range s.Have {
		if !keep(k, v) {
			keys = append(keys, k)
		}
	}
	return s.inBatches(keys, "delete %v from", func(from int) (int, error) {
		n, err := s.Map.BatchDelete(keys[from:], nil)
		if errors.Is(err, ErrKeyNotExist) && n < len(keys)-from {
			return n + 1, nil
		}
		return n, err
	}, func(i int) { delete(s.Have, keys[i]) })
}

func (s Sync[K, V]) same(have, want V) bool {
	if s.Same == nil {
		return any(have) == any(want)
	}
	return s.Same(have, want)
}

// inBatches calls batch with where it is to go on, until all keys are through:
// the one at which it stops with an error has failed. done is told of the others.
func (s Sync[K, V]) inBatches(keys []K, doing string, batch func(from int) (int, error), done func(i int)) error {
	failed := make(Errors[K])
	for at := 0; at < len(keys); {
		n, err := batch(at)
		if errors.Is(err, ebpf.ErrNotSupported) {
			return fmt.Errorf("write map %s in batches: %w", s.Map.name, err)
		}
		for i := range n {
			done(at + i)
		}
		at += n
		if err != nil && at < len(keys) {
			failed[keys[at]] = fmt.Errorf(doing+" map %s: %w", keys[at], s.Map.name, err)
			at++
		}
	}
	if len(failed) == 0 {
		return nil
	}
	return failed
}

// Errors are what went wrong, by key.
type Errors[K comparable] map[K]error

// Error names the first by its text, and how many others there are.
func (e Errors[K]) Error() string {
	first := slices.MinFunc(e.Unwrap(), func(a, b error) int { return strings.Compare(a.Error(), b.Error()) }).Error()
	if others := len(e) - 1; others > 0 {
		return fmt.Sprintf("%s, and %d more", first, others)
	}
	return first
}

// Unwrap lets errors.Is and errors.As see each of them.
func (e Errors[K]) Unwrap() []error { return slices.Collect(maps.Values(e)) }
