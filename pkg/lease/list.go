package lease

import (
	"context"
	"encoding/json"
	"errors"
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
func (f *follower) list(ctx context.Context) (*list, error) {
	l := newList()
	from, end := f.Prefix+"/", clientv3.GetPrefixRangeEnd(f.Prefix+"/")
	for more := true; more; {
		err := f.asked(ctx, func(ctx context.Context) error {
			page, err := f.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(l.revision))
			if err != nil {
				return err
			}
			if l.revision == 0 {
				l.revision, l.cluster = page.Header.Revision, page.Header.ClusterId
			}
			for _, kv := range page.Kvs {
				f.put(l, kv)
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
func (f *follower) put(l *list, kv *mvccpb.KeyValue) {
	key := string(kv.Key)
	if key == f.configKey() {
		l.config = kv.Value
		return
	}
	if text, ok := strings.CutPrefix(key, f.subnetsKey()); ok {
		l.entries[text] = f.network.readEntry(text, kv)
		return
	}
	if text, ok := strings.CutPrefix(key, f.holdersKey()); ok {
		if a, err := netip.ParseAddr(text); err == nil {
			h := holding{lease: clientv3.LeaseID(kv.Lease), modified: kv.ModRevision}
			_ = json.Unmarshal(kv.Value, &h.holder) // one that is unreadable is nobody's, and nobody is we
			l.holders[a] = h
		}
	}
}

// readEntry reads a lease of the network. What is wrong with it is noted.
func (n Network) readEntry(text string, kv *mvccpb.KeyValue) *entry {
	e := &entry{key: text, lease: clientv3.LeaseID(kv.Lease), created: kv.CreateRevision, modified: kv.ModRevision}
	subnet, ok := parseSubnet(text)
	if !ok || subnet.String() != text {
		e.wrong = errors.New("its key names no subnet")
		return e
	}
	e.subnet = subnet
	if e.wrong = json.Unmarshal(kv.Value, &e.record); e.wrong == nil {
		e.macs, e.wrong = e.record.macs()
	}
	for f, a := range e.record.public() {
		if e.wrong == nil && (f == int(wire.IPv4) && !a.Is4() || f == int(wire.IPv6) && a.Is4()) {
			e.wrong = fmt.Errorf("%q is no public %s address", a, wire.Family(f).Name())
		}
	}
	if e.wrong == nil && n.isIn(subnet) {
		e.wrong = errors.New("the whole network is no node's subnet")
	}
	return e
}
