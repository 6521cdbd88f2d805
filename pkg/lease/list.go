package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"time"

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
	// began is when it was begun, next the key that it goes on with.
	began time.Time
	next  string
}

func newList() *list { return &list{entries: map[string]*entry{}, holders: map[netip.Addr]holding{}} }

// list reads all that is in the registry. Of one that etcd has not answered to its end the next one has the beginning.
func (f *follower) list(ctx context.Context) (*list, error) {
	l, end := f.begun, clientv3.GetPrefixRangeEnd(f.Prefix+"/")
	if l == nil {
		l = newList()
		l.began, l.next = time.Now(), f.Prefix+"/"
	}
	f.begun = nil
	for more := true; more; {
		err := f.asked(ctx, func(ctx context.Context) error {
			page, err := f.client.Get(ctx, l.next, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(l.revision))
			if err != nil {
				return err
			}
			if l.revision == 0 {
				l.revision, l.cluster = page.Header.Revision, page.Header.ClusterId
			}
			if page.Header.ClusterId != l.cluster {
				return errors.New("another etcd answers by now")
			}
			for _, kv := range page.Kvs {
				f.put(l, kv)
				l.next = string(kv.Key) + "\x00"
			}
			more = page.More
			return nil
		})
		if errors.Is(err, errNoAnswer) {
			f.begun = l
		}
		if err != nil {
			return nil, fmt.Errorf("list leases: %w", err)
		}
	}
	return l, nil
}

// listOwn reads this node's own keys.
func (f *follower) listOwn(ctx context.Context) (*list, error) {
	l := newList()
	err := f.asked(ctx, func(ctx context.Context) error {
		answer, err := f.client.Txn(ctx).Then(clientv3.OpGet(f.subnetKey(f.own.subnet)), clientv3.OpGet(f.holderKey(f.public[wire.IPv4]))).Commit()
		if err != nil {
			return err
		}
		l.revision, l.cluster = answer.Header.Revision, answer.Header.ClusterId
		for _, r := range answer.Responses {
			for _, kv := range r.GetResponseRange().Kvs {
				f.put(l, kv)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look at this node's lease: %w", err)
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
		e := readEntry(text, kv)
		if e.wrong == nil && e.record.PublicIP != f.public[wire.IPv4] {
			e.wrong = f.strange(e.subnet)
		}
		l.entries[text] = e
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

// strange says why another node's subnet is none of this network; nil: it may be one. Whoever writes a lease says by it where packets
// to its subnet go, and those to etcd are to reach etcd: there would be no way to hear that the lease is gone.
func (f *follower) strange(s Subnet) error {
	for family, r := range f.network.Ranges {
		if p := s[family]; r.Prefix.IsValid() && p.IsValid() && !r.has(p) {
			return fmt.Errorf("%s is no part of the network %s", p, r.Prefix)
		}
		for _, a := range f.guarded {
			if s[family].Contains(a) {
				return fmt.Errorf("%s contains %s, the address of etcd or of this node", s[family], a)
			}
		}
	}
	return nil
}

// guards are the addresses that no other node's subnet has: those of etcd's members, if they are known by addresses, and this node's.
func (f *follower) guards() (all []netip.Addr) {
	for _, text := range f.Endpoints {
		if u, err := url.Parse(text); err == nil {
			if a, err := netip.ParseAddr(u.Hostname()); err == nil {
				all = append(all, a.Unmap())
			}
		}
	}
	for _, a := range f.public {
		if a.IsValid() {
			all = append(all, a)
		}
	}
	return all
}

// readEntry reads a lease of the network. What is wrong with it is noted.
func readEntry(text string, kv *mvccpb.KeyValue) *entry {
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
	return e
}
