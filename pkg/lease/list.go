package lease

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// pageSize is how many keys are asked for at a time.
const pageSize = 1000

// list is all that is in the registry, at one revision of one etcd.
type list struct {
	entries  map[string]*entry
	holders  map[netip.Addr]holding
	config   []byte // nil: there is none
	revision int64
	cluster  uint64
}

func newList() *list { return &list{entries: map[string]*entry{}, holders: map[netip.Addr]holding{}} }

// list reads all that is in the registry.
func (r *Registry) list(ctx context.Context) (*list, error) {
	l := newList()
	from, end := r.Prefix+"/", clientv3.GetPrefixRangeEnd(r.Prefix+"/")
	for more := true; more; {
		err := r.asked(ctx, func(ctx context.Context) error {
			page, err := r.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(l.revision))
			if err != nil {
				return err
			}
			if l.revision == 0 {
				l.revision, l.cluster = page.Header.Revision, page.Header.ClusterId
			}
			for _, kv := range page.Kvs {
				r.put(l, kv)
				from = string(kv.Key) + "\x00"
			}
			more = page.More
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("list leases: %w", err)
		}
	}
	return l, nil
}

// put takes a key and its value into a list.
func (r *Registry) put(l *list, kv *mvccpb.KeyValue) {
	key := string(kv.Key)
	if key == r.configKey() {
		l.config = kv.Value
		return
	}
	if text, ok := strings.CutPrefix(key, r.subnetsKey()); ok {
		if e, ok := readEntry(text, kv); ok {
			l.entries[text] = e
		}
		return
	}
	if text, ok := strings.CutPrefix(key, r.holdersKey()); ok {
		if a, err := netip.ParseAddr(text); err == nil {
			h := holding{lease: clientv3.LeaseID(kv.Lease), modified: kv.ModRevision}
			_ = json.Unmarshal(kv.Value, &h.holder) // one that is unreadable is nobody's, and nobody is we
			l.holders[a] = h
		}
	}
}

// readEntry reads a lease; false: its key is none of a subnet.
func readEntry(text string, kv *mvccpb.KeyValue) (*entry, bool) {
	subnet, ok := parseSubnet(text)
	if !ok {
		return nil, false
	}
	e := &entry{key: text, subnet: subnet, lease: clientv3.LeaseID(kv.Lease), created: kv.CreateRevision, modified: kv.ModRevision}
	if e.wrong = json.Unmarshal(kv.Value, &e.record); e.wrong == nil {
		e.macs, e.wrong = e.record.macs()
	}
	for f, a := range e.record.public() {
		if e.wrong == nil && (f == int(wire.IPv4) && !a.Is4() || f == int(wire.IPv6) && a.Is4()) {
			e.wrong = fmt.Errorf("%q is no public %s address", a, wire.Family(f).Name())
		}
	}
	return e, true
}
