package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/source"
)

// Self is this node.
type Self struct {
	// Node is its name, MachineID what tells it from another one of that name.
	Node, MachineID string
	// MAC is the address of its end of the tunnel.
	MAC wire.MAC
	// Standing is what is in force on it.
	Standing plan.Standing
	// Heard is called each time the registry has answered; nil: nobody asks.
	Heard func()
}

const (
	// listPause is the least time between two complete lists, leases that vanish in a crowd have one made for all.
	listPause = time.Second
	// checkInterval is how often the registry is asked whether it is what it was.
	checkInterval = 15 * time.Second
	// returnPause is how long a node has to lease again what a list lacks, before it counts as gone: its pods are there.
	returnPause = 3 * time.Second
	// inStep is how far apart nodes try again that have tried at once.
	inStep = 50 * time.Millisecond
	// mostRaces is how often others may be faster before that is worth a word.
	mostRaces = 20
)

// follower is one Run.
type follower struct {
	*Registry
	Self
	network  Network
	public   [wire.Families]netip.Addr
	record   record
	written  Subnet // of the subnet file
	standing Subnet
	deliver  func(source.Update)
	table    table
	own      *held       // nil: there has been none
	last     []plan.Node // as delivered
	remarks  []string
	listed   time.Time // when everything was listed last
	emptied  bool      // the newest list was of a registry that has been emptied
	// revision and cluster are of what was last heard.
	revision int64
	cluster  uint64
}

func (f *follower) holder() holder { return holder{f.MachineID, f.Node} }

// Run leases a subnet for this node, renews the lease, and delivers all nodes of the network, now and after each change, until ctx
// ends. What goes wrong is told by an Update with an error, once, and tried again.
func (r *Registry) Run(ctx context.Context, network Network, self Self, deliver func(source.Update)) error {
	f := &follower{Registry: r, Self: self, network: network, standing: parts(self.Standing.Own), deliver: deliver}
	f.table.entries = leasesOf(self.Standing, network.Backend.Kind)
	if f.Heard == nil {
		f.Heard = func() {}
	}
	var err error
	if f.written, err = readSubnet(r.SubnetFile); err != nil {
		r.log.Warn("the subnet file of before can't be read", "error", err)
	}
	defer f.release()
	said, races := "", 0
	for {
		err := f.round(ctx)
		pause := listPause
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			said, races = "", 0
			continue
		case errors.Is(err, errRaced) && races < mostRaces:
			races++
			pause = 0
		case err.Error() != said:
			said = err.Error()
			deliver(source.Update{Err: err, Changed: time.Now()})
		}
		pause += time.Duration(rand.Int64N(int64(inStep))) //nolint:gosec // no secret
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// round lists everything, has this node hold a lease, delivers, and follows changes until there is a reason to list again.
func (f *follower) round(ctx context.Context) error {
	if err := f.introduce(); err != nil {
		return err
	}
	f.listed = time.Now()
	l, err := f.list(ctx)
	if err != nil {
		return err
	}
	f.Heard()
	if err := f.refuseUDP(l); err != nil {
		return err
	}
	f.compare(l.config)
	known := f.emptied
	if f.emptied = f.isEmptied(l); f.emptied && !known {
		f.log.Warn("the registry has been emptied, or is another one: what stands of other nodes stays until they have leased anew, or their leases would have ended", "revision", l.revision, "leases", len(l.entries))
	}
	failed := f.ensure(ctx, l)
	end := f.listed.Add(returnPause)
	if f.emptied {
		end = f.listed.Add(f.ttl())
	}
	f.table.replace(l, end, f.listed)
	f.revision, f.cluster, f.last = l.revision, l.cluster, nil
	if failed == nil && f.own.chosen && f.own.subnet[wire.IPv6].IsValid() {
		f.own.chosen = false
		return errRaced // perhaps: of a subnet of both families another node may have got a part
	}
	f.tell(f.listed)
	if failed != nil {
		return failed
	}
	f.log.Debug("leases listed", "leases", len(l.entries), "took", time.Since(f.listed))
	return f.watch(ctx, l.revision+1)
}

// introduce finds out how other nodes reach this one.
func (f *follower) introduce() (err error) {
	if f.public[wire.IPv4].IsValid() {
		return nil
	}
	var found [wire.Families]netip.Addr
	for family, r := range f.network.Ranges {
		if !r.Prefix.IsValid() {
			continue
		}
		found[family] = f.Public[family]
		if !found[family].IsValid() {
			if found[family], err = sourceOfDefaultRoute(wire.Family(family)); err != nil {
				return fmt.Errorf("find this node's public %s address: %w; give --public-ip", wire.Family(family).Name(), err)
			}
		}
	}
	if f.record, err = newRecord(found, f.network.Backend, f.MAC); err == nil {
		f.public = found
	}
	return err
}

// sourceOfDefaultRoute is the address by which packets to the world leave. Nothing is sent.
func sourceOfDefaultRoute(f wire.Family) (netip.Addr, error) {
	world := [wire.Families][2]string{wire.IPv4: {"udp4", "192.0.2.1:9"}, wire.IPv6: {"udp6", "[2001:db8::1]:9"}} // examples of RFC 5737 and RFC 3849
	c, err := net.Dial(world[f][0], world[f][1])
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	return netip.MustParseAddrPort(c.LocalAddr().String()).Addr(), nil
}

// refuseUDP refuses to serve by VXLAN a network that names no backend, while a node of it goes by what that means to flannel. A node
// that is served already goes on.
func (f *follower) refuseUDP(l *list) error {
	if !f.network.Backend.Absent || f.own != nil {
		return nil
	}
	for _, e := range l.entries {
		if e.record.BackendType == udp {
			return fmt.Errorf("etcd key %s: Backend: is absent, and node %s goes by flannel's udp (key %s), which is not served here: set vxlan or host-gw for all nodes", f.configKey(), e.record.PublicIP, f.subnetKey(e.subnet))
		}
	}
	return nil
}

// compare says that the configuration is no more the one that is in force.
func (f *follower) compare(text []byte) {
	switch n, err := f.parseNetwork(text); {
	case err != nil:
		f.log.Warn("the network's configuration can't be used; the one of before stays in force", "error", err)
	case n != f.network:
		f.log.Warn("the network's configuration has changed; it gets into force when the agent starts", "key", f.configKey())
	}
}

// isEmptied reports whether what a list lacks may be missing for another reason than that its lease has ended: the lease of this
// node is missing, that it holds, or that an earlier agent held.
func (f *follower) isEmptied(l *list) bool {
	if f.cluster != 0 && (l.cluster != f.cluster || l.revision < f.revision) {
		return true
	}
	if f.own == nil {
		return len(f.Standing.Own) > 0 && len(f.mine(l)) == 0
	}
	e := l.entries[f.own.subnet.String()]
	return e == nil || !f.isMine(e)
}

// tell delivers what is known, if this node has a lease and it is something new.
func (f *follower) tell(changed time.Time) {
	if f.own == nil {
		return
	}
	self := (&entry{subnet: f.own.subnet, record: f.record}).asNode()
	self.Name = f.Node
	nodes, remarks := f.table.nodes(*self, f.own.subnet, f.public[wire.IPv4], f.network.Backend.Kind)
	for _, text := range remarks {
		if !slices.Contains(f.remarks, text) {
			f.log.Warn("a lease of the network", "problem", text)
		}
	}
	f.remarks = remarks
	if slices.EqualFunc(nodes, f.last, plan.Node.Equal) {
		return
	}
	f.last = nodes
	f.deliver(source.Update{Nodes: nodes, Changed: changed})
}

// watch follows changes, until it is time to list everything again. Changes come in crowds: meanwhile it goes on.
func (f *follower) watch(ctx context.Context, from int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var changes clientv3.WatchChan
	opened := f.open(ctx, from)
	connection, wait := f.followConnection(ctx)
	defer wait()
	defer cancel()
	check := time.NewTicker(checkInterval)
	defer check.Stop()
	var due <-chan time.Time
	var at time.Time // when that is
	until := func(t time.Time) {
		if at.IsZero() || t.Before(at) {
			at, due = t, time.After(time.Until(t))
		}
	}
	if first := f.table.nextEnd(); !first.IsZero() {
		until(f.listed.Add(max(listPause, first.Sub(f.listed))))
	}
	soon := func() { until(f.listed.Add(listPause)) }
	renewed := f.own.renewed
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-due:
			return nil
		case changes = <-opened:
		case answer, ok := <-changes:
			if err := answer.Err(); !ok || err != nil {
				return f.isLost(err)
			}
			f.Heard()
			now := time.Now()
			if f.apply(answer) {
				soon()
			}
			f.tell(now)
		case _, ok := <-renewed:
			if !ok {
				f.own.ended, renewed = true, nil
				soon()
			}
		case <-connection:
			soon()
			if _, err := f.check(ctx); err != nil {
				return err
			}
		case <-check.C:
			another, err := f.check(ctx)
			if err != nil {
				return err
			}
			if another {
				soon()
			}
		}
	}
}

// open asks for changes, and returns at once: etcd may be away, and answers when it is there.
func (f *follower) open(ctx context.Context, from int64) <-chan clientv3.WatchChan {
	opened := make(chan clientv3.WatchChan, 1)
	go func() {
		opened <- f.client.Watch(clientv3.WithRequireLeader(ctx), f.Prefix+"/", clientv3.WithPrefix(), clientv3.WithRev(from))
	}()
	return opened
}

// isLost judges the end of a watch. A complete list puts right what has been compacted meanwhile.
func (f *follower) isLost(err error) error {
	if err == nil || errors.Is(err, rpctypes.ErrCompacted) {
		f.log.Info("changes of leases have been missed; listing all", "error", err)
		return nil
	}
	return fmt.Errorf("follow changes of leases: %w", err)
}

// followConnection rings when the connection is lost, and when there is one again: perhaps to another etcd, where the watch would wait
// for a revision that is far away. wait waits for its end, which comes with that of ctx.
func (f *follower) followConnection(ctx context.Context) (rings <-chan struct{}, wait func()) {
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	connection := f.client.ActiveConnection()
	go func() {
		defer close(ended)
		// A list has just been had: whatever else the state is, it has changed since.
		for state := connectivity.Ready; connection.WaitForStateChange(ctx, state); {
			was := state == connectivity.Ready
			if state = connection.GetState(); was == (state == connectivity.Ready) {
				continue
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return changed, func() { <-ended }
}

// check asks whether the registry answers, and is the one that it was.
func (f *follower) check(ctx context.Context) (again bool, err error) {
	err = f.asked(ctx, func(ctx context.Context) error {
		answer, err := f.client.Get(ctx, f.configKey(), clientv3.WithKeysOnly())
		if err == nil {
			again = answer.Header.ClusterId != f.cluster || answer.Header.Revision < f.revision
		}
		return err
	})
	if err == nil {
		f.Heard()
	}
	return again, err
}

// apply takes changes into the table. It reports whether everything has to be listed again: something is about this node's own lease,
// or a lease has gone.
func (f *follower) apply(answer clientv3.WatchResponse) (again bool) {
	f.revision = max(f.revision, answer.Header.Revision)
	changed := newList()
	for _, e := range answer.Events {
		if e.Type == clientv3.EventTypeDelete {
			again = true
			continue
		}
		f.put(changed, e.Kv)
	}
	if changed.config != nil {
		f.compare(changed.config)
	}
	for key, e := range changed.entries {
		if key == f.own.subnet.String() {
			again = again || e.lease != f.own.lease && e.lease != 0 || e.record.PublicIP != f.public[wire.IPv4]
			continue
		}
		again = again || e.record.PublicIP == f.public[wire.IPv4] || e.subnet.overlaps(f.own.subnet)
		f.table.put(key, e)
	}
	for a, h := range changed.holders {
		again = again || a == f.public[wire.IPv4] && h.holder != f.holder()
		f.table.holders[a] = h
	}
	return again
}
