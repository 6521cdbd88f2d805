package service

import (
	"cmp"
	"maps"
	"slices"
)

// hash is what a hash map holds, and what it held before the changes that are not yet among the writes.
type hash[K, V comparable] struct {
	have   map[K]V
	before map[K]held[V]
	// gone counts the keys that are in before and no longer in have: they take room until they have been deleted.
	gone    int
	compare func(a, b K) int
}

type held[V any] struct {
	value V
	there bool
}

func newHash[K, V comparable](content map[K]V, compare func(a, b K) int) hash[K, V] {
	have := maps.Clone(content)
	if have == nil {
		have = map[K]V{}
	}
	return hash[K, V]{have: have, before: map[K]held[V]{}, compare: compare}
}

func (h *hash[K, V]) put(k K, v V) {
	value, there := h.have[k]
	if there && value == v {
		return
	}
	if !there && h.remember(k).there {
		h.gone--
	}
	h.remember(k)
	h.have[k] = v
}

func (h *hash[K, V]) remove(k K) {
	if _, there := h.have[k]; !there {
		return
	}
	if h.remember(k).there {
		h.gone++
	}
	delete(h.have, k)
}

// costs says whether a key would need room that the map has to have: not one that it has, nor one that is to go with the same
// writes.
func (h *hash[K, V]) costs(k K) bool {
	_, there := h.have[k]
	return !there && !h.before[k].there
}

// remember notes what was there before the first change.
func (h *hash[K, V]) remember(k K) held[V] {
	was, known := h.before[k]
	if !known {
		was.value, was.there = h.have[k]
		h.before[k] = was
	}
	return was
}

// flush returns what has changed, in order of the keys.
func (h *hash[K, V]) flush() (put Batch[K, V], gone Gone[K]) {
	for _, k := range slices.SortedFunc(maps.Keys(h.before), h.compare) {
		was := h.before[k]
		v, there := h.have[k]
		switch {
		case !there && was.there:
			gone = append(gone, k)
		case there && (!was.there || was.value != v):
			put.add(k, v)
		}
	}
	h.before, h.gone = map[K]held[V]{}, 0 // not cleared: it would stay as big as the first writes were, and to walk it as slow
	return put, gone
}

// array is what an array map holds, and what of it has changed since the last writes.
type array[V comparable] struct {
	have   []V
	before []entry[V]
	// changed has a bit for each index in before.
	changed []uint64
}

type entry[V any] struct {
	index uint32
	value V
}

func newArray[V comparable](content []V, capacity uint32) array[V] {
	have := make([]V, max(int(capacity), len(content)))
	copy(have, content)
	return array[V]{have: have, changed: make([]uint64, len(have)/64+1)}
}

func (a *array[V]) put(i uint32, v V) {
	if a.have[i] == v {
		return
	}
	if bit := uint64(1) << (i % 64); a.changed[i/64]&bit == 0 {
		a.changed[i/64] |= bit
		a.before = append(a.before, entry[V]{i, a.have[i]})
	}
	a.have[i] = v
}

// flush calls write for what has changed, in order of the index.
func (a *array[V]) flush(write func(i uint32, before, now V)) {
	slices.SortFunc(a.before, func(a, b entry[V]) int { return cmp.Compare(a.index, b.index) })
	for _, was := range a.before {
		a.changed[was.index/64] = 0
		if now := a.have[was.index]; was.value != now {
			write(was.index, was.value, now)
		}
	}
	a.before = nil
}

func (b *Batch[K, V]) add(k K, v V) {
	b.Keys, b.Values = append(b.Keys, k), append(b.Values, v)
}
