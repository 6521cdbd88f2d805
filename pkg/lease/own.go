package lease

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// held is the lease of this node.
type held struct {
	subnet Subnet
	// lease is etcd's. Of a reservation only the holder's key ends with it.
	lease clientv3.LeaseID
	// renewed tells of each renewal, and is closed when there are no more.
	renewed <-chan *clientv3.LeaseKeepAliveResponse
	stop    context.CancelFunc
	// chosen says that the subnet was free a moment ago.
	chosen bool
	// ended says that it is, as far as the client knows.
	ended bool
}

// errRaced says that somebody was faster.
var errRaced = errors.New("another node was faster")

// ensure has this node hold a lease, given all there is: the one that it holds, one with its public address, or a new one.
func (f *follower) ensure(ctx context.Context, l *list) error {
	public := f.public[wire.IPv4]
	h, noted := l.holders[public]
	if noted && h.holder != f.holder() {
		node, id := "without a name", "unknown"
		if isPlain(h.Node) {
			node = h.Node
		}
		if isPlain(h.MachineID) {
			id = h.MachineID
		}
		return fmt.Errorf("public address %s is held by node %s with machine id %s, whose lease has not ended: give this node another one (--public-ip), or, if that one is gone for good, delete etcd's key %s",
			public, node, id, f.holderKey(public))
	}
	mine := f.mine(l)
	i := slices.IndexFunc(mine, func(e *entry) bool { return f.network.fits(e.subnet) && f.overlapped(l, e) == nil })
	switch {
	case i < 0:
		return f.takeAnother(ctx, l, mine)
	case f.isWhole(mine[i], h):
		return f.adopt(ctx, mine[i], h.lease)
	}
	return f.write(ctx, l, mine[i].subnet, slices.Concat(mine[:i], mine[i+1:]))
}

// mine are the leases with this node's public address: the one that is held, the one that is noted to be, that of the subnet which
// pods have, then the older ones. Anybody can write a lease with this address, and is not to move the node.
func (f *follower) mine(l *list) (mine []*entry) {
	for _, e := range l.entries {
		if f.isMine(e) {
			mine = append(mine, e)
		}
	}
	noted := l.holders[f.public[wire.IPv4]].lease
	rank := func(e *entry) int {
		return slices.Index([]bool{
			f.own != nil && f.own.subnet == e.subnet,
			noted != 0 && e.lease == noted,
			e.subnet == f.standing,
			e.subnet == f.written,
			true,
		}, true)
	}
	slices.SortFunc(mine, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.created, b.created))
	})
	return mine
}

// isMine reports whether a lease has this node's public address, or is unreadable and in the place of what this node has had.
func (f *follower) isMine(e *entry) bool {
	had := e.subnet == f.standing || f.own != nil && e.subnet == f.own.subnet
	return e.record.PublicIP == f.public[wire.IPv4] || e.wrong != nil && had && e.subnet != Subnet{}
}

// isWhole reports whether a lease, with its holder's key, is as this node would write it.
func (f *follower) isWhole(e *entry, h holding) bool {
	has, err := json.Marshal(e.record)
	want, err2 := json.Marshal(f.record)
	return err == nil && err2 == nil && e.wrong == nil && string(has) == string(want) && f.network.fits(e.subnet) &&
		h.lease != 0 && (e.lease == h.lease || e.lease == 0)
}

// overlapped returns the lease of another node that had a part of a lease's subnet before. In a network of both families two nodes
// that choose at once may get the same subnet of one family.
func (f *follower) overlapped(l *list, e *entry) *entry {
	for _, o := range l.entries {
		if o != e && o.wrong == nil && f.network.fits(o.subnet) && o.record.PublicIP != e.record.PublicIP && o.created < e.created && o.subnet.overlaps(e.subnet) {
			return o
		}
	}
	return nil
}

// adopt goes on with a lease that is this node's, unless etcd has none to renew.
func (f *follower) adopt(ctx context.Context, e *entry, lease clientv3.LeaseID) error {
	if f.own != nil && f.own.subnet == e.subnet && f.own.lease == lease && !f.own.ended {
		return nil
	}
	err := f.asked(ctx, func(ctx context.Context) error {
		_, err := f.client.KeepAliveOnce(ctx, lease)
		return err
	})
	if err != nil {
		return fmt.Errorf("renew the lease: %w", err)
	}
	return f.hold(ctx, e.subnet, lease)
}

// takeAnother writes a new lease, where none of those with this node's public address will do.
func (f *follower) takeAnother(ctx context.Context, l *list, mine []*entry) error {
	prefer := []Subnet{f.written, f.standing}
	if f.own != nil {
		prefer = slices.Insert(prefer, 0, f.own.subnet)
	}
	for _, e := range mine { // of a network of one family that has become one of both
		prefer = append(prefer, e.subnet)
	}
	subnet, err := f.network.choose(prefer, f.takenBy(l))
	if err != nil {
		return err
	}
	if f.own != nil && f.own.subnet != subnet {
		f.log.Error("another node holds this node's subnet, so this node gets another one, and other nodes no longer reach pods with addresses of the old one", "old", f.own.subnet, "new", subnet)
	}
	return f.write(ctx, l, subnet, mine)
}

// takenBy are the subnets that this node can't have: those of other nodes, also of such as have vanished, and reservations; and what
// has the address of etcd or of this node.
func (f *follower) takenBy(l *list) (taken []Subnet) {
	for _, e := range l.entries {
		if e.lease == 0 || e.record.PublicIP != f.public[wire.IPv4] {
			taken = append(taken, f.network.within(e.subnet))
		}
	}
	for key, e := range f.table.entries {
		if l.entries[key] == nil && e.wrong == nil && e.record.PublicIP != f.public[wire.IPv4] {
			taken = append(taken, e.subnet)
		}
	}
	for _, a := range f.guarded {
		taken = append(taken, f.network.within(parts([]netip.Prefix{netip.PrefixFrom(a, a.BitLen())})))
	}
	return taken
}

// write writes the lease, and the holder's key with it, provided that both are as they have been listed. Other leases of this node's
// go, but no reservations.
func (f *follower) write(ctx context.Context, l *list, subnet Subnet, others []*entry) error {
	value, err := json.Marshal(f.record)
	holder, err2 := json.Marshal(f.holder())
	if err := errors.Join(err, err2); err != nil {
		return fmt.Errorf("encode the lease: %w", err)
	}
	lease, err := f.grant(ctx)
	if err != nil {
		return err
	}
	key, holderKey := f.subnetKey(subnet), f.holderKey(f.public[wire.IPv4])
	had := l.entries[subnet.String()]
	with, modified := []clientv3.OpOption{clientv3.WithLease(lease)}, int64(0)
	if had != nil {
		modified = had.modified
	}
	if had != nil && had.lease == 0 && had.wrong == nil {
		with = nil
	}
	ops := []clientv3.Op{clientv3.OpPut(key, string(value), with...), clientv3.OpPut(holderKey, string(holder), clientv3.WithLease(lease))}
	for _, e := range others {
		if e.lease != 0 {
			ops = append(ops, clientv3.OpDelete(f.subnetKey(e.subnet)))
		}
	}
	var done *clientv3.TxnResponse
	err = f.asked(ctx, func(ctx context.Context) (err error) {
		done, err = f.client.Txn(ctx).If(
			clientv3.Compare(clientv3.ModRevision(key), "=", modified),
			clientv3.Compare(clientv3.ModRevision(holderKey), "=", l.holders[f.public[wire.IPv4]].modified),
		).Then(ops...).Commit()
		return err
	})
	if err == nil && !done.Succeeded {
		f.spare = lease
		return fmt.Errorf("lease %s: %w", subnet, errRaced)
	}
	if err != nil {
		_ = f.asked(ctx, func(ctx context.Context) error { _, err := f.client.Revoke(ctx, lease); return err }) // else it ends by itself
		return fmt.Errorf("lease %s: %w", subnet, err)
	}
	f.log.Info("subnet leased", "subnet", listOfSubnet(subnet), "address", f.public[wire.IPv4], "again", f.own != nil, "reserved", with == nil)
	// In the list as well, which is what nodes are made of.
	l.entries[subnet.String()] = &entry{key: subnet.String(), subnet: subnet, record: f.record, lease: lease, modified: done.Header.Revision, created: done.Header.Revision}
	err = f.hold(ctx, subnet, lease)
	if err == nil {
		f.own.chosen = had == nil
	}
	return err
}

// grant returns a lease of etcd's, that of a race that was lost or a new one.
func (f *follower) grant(ctx context.Context) (lease clientv3.LeaseID, err error) {
	if lease, f.spare = f.spare, 0; lease != 0 {
		return lease, nil
	}
	err = f.asked(ctx, func(ctx context.Context) error {
		granted, err := f.client.Grant(ctx, int64(f.ttl().Seconds()))
		if err == nil {
			lease = granted.ID
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("get a lease: %w", err)
	}
	return lease, nil
}

// hold has the lease renewed until it is released, or another one is held: for longer than ctx, which may be of what has found that
// there was none.
func (f *follower) hold(ctx context.Context, subnet Subnet, lease clientv3.LeaseID) error {
	f.release()
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	renewed, err := f.client.KeepAlive(ctx, lease)
	if err != nil {
		stop()
		return fmt.Errorf("renew the lease: %w", err)
	}
	f.own = &held{subnet: subnet, lease: lease, renewed: renewed, stop: stop}
	return nil
}

// release ends the renewing; what is held is remembered.
func (f *follower) release() {
	if f.own != nil {
		f.own.stop()
	}
}

func listOfSubnet(s Subnet) (texts []string) {
	for _, p := range s.all() {
		texts = append(texts, p.String())
	}
	return texts
}

// parts are prefixes as a subnet.
func parts(all []netip.Prefix) (s Subnet) {
	for _, p := range all {
		s[wire.FamilyOf(p.Addr())] = p
	}
	return s
}
