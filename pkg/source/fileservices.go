package source

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// FileServices are the Services, EndpointSlices and ServiceCIDRs in the file that a File reads.
type FileServices struct{ pending *pending }

// NewFileServices makes the two ends: File.Services, and Run.
func NewFileServices() *FileServices { return &FileServices{newPending()} }

// Run delivers all there is as soon as the File has read it, and all of it anew after each change, until ctx ends. A
// file that can't be read is told by an Update with an error.
func (f *FileServices) Run(ctx context.Context, deliver func(service.Update)) error {
	return f.pending.run(ctx, deliver)
}

// replace takes what the file contains now.
func (f *FileServices) replace(c contents) {
	p := f.pending
	p.change(time.Time{}, func() bool {
		changed := p.services.replace(c.services)
		changed = p.slices.replace(c.slices) || changed
		changed = p.cidrs.replace(c.cidrs) || changed
		p.whole = p.whole || changed
		return changed
	})
	p.fail(kindService, nil)
}

func (f *FileServices) fail(err error) { f.pending.fail(kindService, err) }

// others read the objects that are no Nodes, by their kinds.
type others map[string]func(service.Name, json.RawMessage)

const (
	anyService     = "v1 Service"
	anySlice       = "discovery.k8s.io/v1 EndpointSlice"
	anyServiceCIDR = "networking.k8s.io/v1 ServiceCIDR"
)

// otherKinds are all that others read.
var otherKinds = []string{anyService, anySlice, anyServiceCIDR}

// newOthers reads into the contents of a file.
func newOthers(into *contents) others {
	in := &interner{}
	into.services, into.slices, into.cidrs = map[service.Name]service.Service{}, map[service.Name]service.Slice{}, map[service.Name]cidrs{}
	return others{
		anyService:     reader(into.services, in.serviceOf, func(n service.Name, text string) service.Service { return service.Service{Name: n, Malformed: text} }),
		anySlice:       reader(into.slices, in.sliceOf, func(n service.Name, text string) service.Slice { return service.Slice{Name: n, Malformed: text} }),
		anyServiceCIDR: reader(into.cidrs, in.cidrsOf, func(service.Name, string) cidrs { return nil }),
	}
}

// reader reads objects of a kind. One that is unreadable is none but for what says so, so that it hurts no other.
func reader[T, O any](into map[service.Name]T, read func(*O) (T, bool), malformed func(service.Name, string) T) func(service.Name, json.RawMessage) {
	return func(name service.Name, raw json.RawMessage) {
		var o O
		if err := json.Unmarshal(raw, &o); err != nil {
			into[name] = malformed(name, fmt.Sprint(oneLine(err)))
		} else if object, ok := read(&o); ok {
			into[name] = object
		}
	}
}
