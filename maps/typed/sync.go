package typed

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Sync brings a map to the content that is wanted, with the fewest writes, in
// batches. The caller decides whether Add or Remove comes first: packets need new
// entries before old ones go, a full map needs room first. An entry that cannot be
// written does not keep others from being written. Only for maps to which nobody
// else adds entries at the same time.
type Sync[K comparable, V any] struct {
	Map *Map[K, V]
	// Have is what the map holds, such as its Content; Add and Remove keep it up to date.
	Have map[K]V
	// Same reports whether a value that is there needs no write, ignoring fields that
	// the programs own; nil: if the two are equal.
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
	return s.Map.putAll(keys, values, func(i int) { s.Have[keys[i]] = values[i] })
}

// Remove deletes every entry for which keep is false. The error is an Errors of
// those that could not be deleted; an entry that is gone already is no error.
func (s Sync[K, V]) Remove(keep func(K, V) bool) error {
	var keys []K
	for k, v := range s.Have {
		if !keep(k, v) {
			keys = append(keys, k)
		}
	}
	return s.Map.deleteAll(keys, func(i int) { delete(s.Have, keys[i]) })
}

func (s Sync[K, V]) same(have, want V) bool {
	if s.Same == nil {
		return any(have) == any(want)
	}
	return s.Same(have, want)
}

// Errors are the errors of the keys that failed.
type Errors[K comparable] map[K]error

// Error is the first error in the order of their texts, and how many more there are.
func (e Errors[K]) Error() string {
	first := slices.MinFunc(e.Unwrap(), func(a, b error) int { return strings.Compare(a.Error(), b.Error()) }).Error()
	if others := len(e) - 1; others > 0 {
		return fmt.Sprintf("%s, and %d more", first, others)
	}
	return first
}

// Unwrap returns all of them, for errors.Is and errors.As.
func (e Errors[K]) Unwrap() []error { return slices.Collect(maps.Values(e)) }

// Split divides them into those of keys that are so, and the others; nil: there are none.
func (e Errors[K]) Split(so func(K) bool) (yes, no error) {
	are, others := Errors[K]{}, Errors[K]{}
	for k, err := range e {
		if so(k) {
			are[k], yes = err, are
		} else {
			others[k], no = err, others
		}
	}
	return yes, no
}
