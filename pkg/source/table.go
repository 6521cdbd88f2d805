package source

import (
	"reflect"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// table are the objects of a kind, and the names of those of which the consumer has not heard.
type table[T any] struct {
	have   map[service.Name]T
	news   map[service.Name]struct{}
	listed bool // a whole list has arrived
}

// put takes an object and reports whether it is another than before. What has not changed stays, so that nothing is kept twice.
func (t *table[T]) put(name service.Name, object T) (changed bool) {
	if had, ok := t.have[name]; ok && reflect.DeepEqual(had, object) {
		return false
	}
	if t.have == nil {
		t.have = map[service.Name]T{}
	}
	t.have[name] = object
	t.note(name)
	return true
}

// remove forgets an object and reports whether there was one.
func (t *table[T]) remove(name service.Name) (changed bool) {
	if _, ok := t.have[name]; !ok {
		return false
	}
	delete(t.have, name)
	t.note(name)
	return true
}

// replace takes all objects there are and reports whether that is news.
func (t *table[T]) replace(all map[service.Name]T) (changed bool) {
	changed = !t.listed
	t.listed = true
	for name := range t.have {
		if _, ok := all[name]; !ok {
			changed = t.remove(name) || changed
		}
	}
	for name, object := range all {
		changed = t.put(name, object) || changed
	}
	return changed
}

func (t *table[T]) note(name service.Name) {
	if t.news == nil {
		t.news = map[service.Name]struct{}{}
	}
	t.news[name] = struct{}{}
}

// take returns all objects, or those of which the consumer has not heard and the names of those that are gone, and takes them for heard of.
func (t *table[T]) take(whole bool) (objects []T, gone []service.Name) {
	names := make([]service.Name, 0, len(t.news))
	if whole {
		names = slices.Grow(names, len(t.have))
		for name := range t.have {
			names = append(names, name)
		}
	} else {
		for name := range t.news {
			names = append(names, name)
		}
	}
	t.news = nil
	slices.SortFunc(names, service.Name.Compare) // a map has no order, and rules may look at the list's
	for _, name := range names {
		if object, ok := t.have[name]; ok {
			objects = append(objects, object)
		} else {
			gone = append(gone, name)
		}
	}
	return objects, gone
}
