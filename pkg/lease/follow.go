package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

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
	// longestPause is the longest time between two tries in vain.
	longestPause = time.Minute
	// returnPause is how long a node has to lease again what a list lacks, before it counts as gone: its pods are there.
	returnPause = 3 * time.Second
	// inStep is how far apart nodes try again that have tried at once.
	inStep = 50 * time.Millisecond
	// mostRaces is how often others may be faster before that is worth a word.
	mostRaces = 20
	// mostRemarks is how many leases at a time a line each is written of.
	mostRemarks = 10
)

// follower is one Run.
type follower struct {
	*Registry
	Self
	network  Network
	public   [wire.Families]netip.Addr
	guarded  []netip.Addr // see guards
	record   record
	written  Subnet // of the subnet file
	standing Subnet
	deliver  func(source.Update)
	table    table
	own      *held            // nil: there has been none
	spare    clientv3.LeaseID // of etcd's, with nothing on it; 0: there is none
	last     []plan.Node      // as delivered
	said     string           // which error was delivered since; empty: none
	failures int              // tries in vain, in a row
	doubt    string           // why this node's lease is not as it should be
	remarks  map[string]bool  // of the leases as they are now
	config   *[]byte          // what was last listed of it
	begun    *list            // one that had no end, because etcd did not answer
	// listed is when everything was listed last, looked when this node's own keys were asked for.
	listed, looked time.Time
	missed         bool // this node's lease was missing since
	emptied        bool // the newest list was of a registry that has been emptied
	// revision and cluster are of what was last heard.
	revision int64
	cluster  uint64
}

func (f *follower) holder() holder { return holder{f.MachineID, f.Node} }

// Run leases a subnet for this node, renews the lease, and delivers all nodes of the network, now and after each change, until ctx
// ends. What goes wrong is told by an Update with an error, once, and tried again.
func (r *Registry) Run(ctx context.Context, network Network, self Self, deliver func(source.Update)) error {
	f := &follower{Registry: r, Self: self, network: network, standing: parts(self.Standing.Own), deliver: deliver}
	if f.Heard == nil {
		f.Heard = func() {}
	}
	var err error
	if f.written, err = readSubnet(r.SubnetFile); err != nil {
		r.log.Warn("the subnet file of before can't be read", "error", err)
	}
	defer f.release()
	for races := 0; ; {
		err := f.round(ctx)
		pause := rand.N(inStep) //nolint:gosec // no secret
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil:
			races = 0
			continue
		case errors.Is(err, errRaced) && races < mostRaces:
			races++
		default:
			f.say(err)
			if pause = listPause + f.drawTurn(); !f.isAway() {
				f.failures++
				pause = f.pause()
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// pause is how long to wait after tries in vain of an etcd that is there: longer each time, and by chance, since what fails for one
// mostly fails for all.
func (f *follower) pause() time.Duration {
	least := min(listPause<<min(max(f.failures, 1)-1, 10), longestPause/2)
	return least + rand.N(least) //nolint:gosec // no secret
}

// drawTurn returns how long to wait before a list that all nodes have a reason for.
func (f *follower) drawTurn() time.Duration {
	return rand.N(time.Duration(len(f.table.entries)+1) * time.Second / listsPerSecond) //nolint:gosec // no secret
}

// say tells an error, once. It stays until there is something else to tell.
func (f *follower) say(err error) {
	if text := err.Error(); text != f.said {
		f.said = text
		f.deliver(source.Update{Err: err, Changed: time.Now()})
	}
}

// round lists everything, has this node hold a lease, delivers, and follows changes until there is a reason to list again.
func (f *follower) round(ctx context.Context) error {
	if err := f.introduce(); err != nil {
		return err
	}
	l, err := f.list(ctx)
	if err != nil {
		return err
	}
	f.listed, f.looked = l.began, time.Now()
	f.Heard()
	if err := f.refuseUDP(l); err != nil {
		return err
	}
	f.compare(l.config)
	known, another := f.emptied, f.isAnother(l)
	f.emptied = f.isEmptied(l)
	failed := f.ensure(ctx, l)
	end := f.listed.Add(returnPause)
	if f.emptied {
		end = f.listed.Add(f.ttl())
	}
	missing := f.table.replace(l, end, f.listed, f.emptied)
	if f.emptied && !known && (another || missing > 0) {
		f.log.Warn("the registry has been emptied, or is another one: what stands of other nodes stays until they have leased anew, or their leases would have ended", "revision", l.revision, "leases", len(l.entries), "missing", missing)
	}
	f.revision, f.cluster, f.missed = l.revision, l.cluster, false
	if failed == nil && f.own.chosen && f.own.subnet[wire.IPv6].IsValid() {
		f.own.chosen = false
		return errRaced // perhaps: of a subnet of both families another node may have got a part
	}
	if failed != nil && f.own == nil {
		return failed
	}
	w := f.newWatcher(l.revision + 1)
	w.look.by(time.Now().Add(min(f.judge(failed), lookInterval)))
	f.tell(f.listed)
	f.log.Debug("leases listed", "leases", len(l.entries), "took", time.Since(f.listed))
	return w.watch(ctx)
}

// judge takes note of how it went with this node's lease. It returns the pause before the next try.
func (f *follower) judge(err error) time.Duration {
	switch {
	case err == nil:
		f.failures, f.doubt = 0, ""
	case errors.Is(err, errRaced):
		return rand.N(inStep) //nolint:gosec // no secret
	default:
		f.failures++
		f.doubt = err.Error()
		return f.pause()
	}
	return lookInterval
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
		f.guarded = f.guards()
		f.table.entries = leasesOf(f.Standing, f.network.Backend.Kind)
		maps.DeleteFunc(f.table.entries, func(_ string, e *entry) bool { return f.strange(e.subnet) != nil })
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
// that is served already, perhaps by an agent before, goes on.
func (f *follower) refuseUDP(l *list) error {
	if !f.network.Backend.Absent || f.own != nil || len(f.Standing.Own) > 0 {
		return nil
	}
	for _, e := range l.entries {
		if e.record.BackendType == udp && e.wrong == nil {
			return fmt.Errorf("etcd key %s: Backend: is absent, and node %s goes by flannel's udp (key %s), which is not served here: set vxlan or host-gw for all nodes", f.configKey(), e.record.PublicIP, f.subnetKey(e.subnet))
		}
	}
	return nil
}

// compare says, once, that the configuration is no more the one that is in force.
func (f *follower) compare(text []byte) {
	if f.config != nil && (*f.config == nil) == (text == nil) && bytes.Equal(*f.config, text) {
		return
	}
	f.config = &text
	switch n, err := f.parseNetwork(text); {
	case text == nil:
		f.log.Warn("the network's configuration has been deleted; the one of before stays in force", "key", f.configKey())
	case err != nil:
		f.log.Warn("the network's configuration can't be used; the one of before stays in force", "error", err)
	case n != f.network:
		f.log.Warn("the network's configuration has changed; it gets into force when the agent starts", "key", f.configKey())
	}
}

// isAnother reports whether a list is of another registry than the one of before, or of what that was.
func (f *follower) isAnother(l *list) bool {
	return f.cluster != 0 && (l.cluster != f.cluster || l.revision < f.revision)
}

// isEmptied reports whether what a list lacks may be missing for another reason than that its lease has ended: the lease of this
// node is missing, that it holds, or that an earlier agent held.
func (f *follower) isEmptied(l *list) bool {
	if f.isAnother(l) || f.missed {
		return true
	}
	if f.own == nil {
		return len(f.Standing.Own) > 0 && len(f.mine(l)) == 0
	}
	e := l.entries[f.own.subnet.String()]
	return e == nil || !f.isMine(e)
}

// remark says what has not been wrong with leases before, of many the first ones.
func (f *follower) remark(remarks []string) {
	before, said := f.remarks, 0
	f.remarks = map[string]bool{}
	for _, text := range remarks {
		f.remarks[text] = true
		if before[text] {
			continue
		}
		if said++; said <= mostRemarks {
			f.log.Warn("a lease of the network", "problem", text)
		}
	}
	if said > mostRemarks {
		f.log.Warn("more leases of the network have problems", "more", said-mostRemarks)
	}
}

// tell delivers what is known, if this node has a lease and it is something new.
func (f *follower) tell(changed time.Time) {
	if f.own == nil {
		return
	}
	self := (&entry{subnet: f.own.subnet, record: f.record}).asNode(f.network)
	self.Name = f.Node
	if f.doubt != "" {
		self.Doubts = []string{f.doubt}
	}
	nodes, remarks := f.table.nodes(*self, f.own.subnet, f.public[wire.IPv4], f.network)
	f.remark(remarks)
	if slices.EqualFunc(nodes, f.last, plan.Node.Equal) && f.said == "" {
		return
	}
	f.last, f.said = nodes, ""
	f.deliver(source.Update{Nodes: nodes, Changed: changed})
}
