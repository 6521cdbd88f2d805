package source

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// kept is what the reflector of a kind writes to: objects of the API become ours, and what does not change them ends here.
type kept[T any, O object] struct {
	pending *pending
	table   *table[T]
	reach   *reach
	// read reads an object; false: it is none of ours.
	read func(O) (T, bool)
}

// object is one of the API.
type object interface {
	runtime.Object
	metav1.Object
}

// item is an object as it is kept: the reflector collects these while a list is streamed.
type item[T any] struct {
	name   service.Name
	object T
	ours   bool
	// triggered is when the API says that something happened which the object tells of; zero: it does not say.
	triggered time.Time
}

// GetObjectMeta implements metav1.ObjectMetaAccessor, by which the reflector learns the name.
func (i *item[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: i.name.Namespace, Name: i.name.Name}
}

// Transformer makes the reflector keep nothing but items for itself.
func (k *kept[T, O]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return k.item(o) }
}

func (k *kept[T, O]) item(o any) (*item[T], error) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	if i, ok := o.(*item[T]); ok {
		return i, nil
	}
	sent, ok := o.(O)
	if !ok {
		var want O
		return nil, fmt.Errorf("the API sent a %T in place of a %T", o, want)
	}
	i := &item[T]{name: service.Name{Namespace: sent.GetNamespace(), Name: sent.GetName()}}
	i.object, i.ours = k.read(sent)
	i.triggered, _ = time.Parse(time.RFC3339Nano, sent.GetAnnotations()[corev1.EndpointsLastChangeTriggerTime]) // zero where it is none
	return i, nil
}

// Add implements cache.ReflectorStore.
func (k *kept[T, O]) Add(o any) error { return k.Update(o) }

// Update implements cache.ReflectorStore.
func (k *kept[T, O]) Update(o any) error {
	i, err := k.item(o)
	if err != nil {
		return err
	}
	k.pending.change(i.triggered, func() bool {
		if !i.ours {
			return k.table.remove(i.name)
		}
		return k.table.put(i.name, i.object)
	})
	return nil
}

// Delete implements cache.ReflectorStore.
func (k *kept[T, O]) Delete(o any) error {
	i, err := k.item(o)
	if err != nil {
		return err
	}
	k.pending.change(time.Time{}, func() bool { return k.table.remove(i.name) })
	return nil
}

// Replace implements cache.ReflectorStore: a complete list has arrived.
func (k *kept[T, O]) Replace(objects []any, _ string) error {
	all := make(map[service.Name]T, len(objects))
	for n, o := range objects {
		i, err := k.item(o)
		if err != nil {
			return err
		}
		if i.ours {
			all[i.name] = i.object
		}
		objects[n] = nil // what was read of it is enough
	}
	k.reach.noteList()
	k.pending.change(time.Time{}, func() bool {
		changed := k.table.replace(all)
		k.pending.whole = k.pending.whole || changed
		return changed
	})
	return nil
}

// Resync implements cache.ReflectorStore.
func (k *kept[T, O]) Resync() error { return nil }
