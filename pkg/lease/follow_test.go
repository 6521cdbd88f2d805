package lease

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestChanges(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	a := start(t, s.URL)
	a.expect("n1=10.5.9.0/24")
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.2"))
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24")
	s.Put(prefix+"/ebpf-cni/192.0.2.2", `{"machineID":"m2","node":"n2"}`)
	a.expect("n1=10.5.9.0/24 n2=10.5.1.0/24")
	s.Put(prefix+"/ebpf-cni/192.0.2.2", `{"machineID":"m2","node":"n1"}`) // as this one is called
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24")
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.3"))
	a.expect("n1=10.5.9.0/24 192.0.2.3=10.5.1.0/24")
	s.Put(subnetKey("10.5.2.0-24"), recordOf("192.0.2.3")) // the older one counts
	a.expectDoubt("192.0.2.3: lease 10.5.2.0-24 has the same public address 192.0.2.3 as lease 10.5.1.0-24, and does not count")
	a.expect("n1=10.5.9.0/24 192.0.2.3=10.5.1.0/24")
	s.Put(subnetKey("10.5.3.0-24"), "nonsense")
	s.Put(subnetKey("10.5.4.0-24"), strings.Replace(recordOf("192.0.2.4"), `"vxlan"`, `"host-gw"`, 1))
	s.Put(subnetKey("10.5.5.0-24"), recordOf("192.0.2.1"))
	s.Put(configKey, vxlan)
	for _, want := range []string{"10.5.3.0-24 is ignored", `its backend is \"host-gw\"`, "gets into force when the agent starts"} {
		until(t, want, func() bool { return strings.Contains(a.log.String(), want) })
	}
	a.expectDoubt("n1: lease 10.5.5.0-24 has this node's public address")
	a.expect("n1=10.5.9.0/24 192.0.2.3=10.5.1.0/24")
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, subnetKey("10.5.1.0-24")); return err })
	a.expect("n1=10.5.9.0/24 192.0.2.3=10.5.2.0/24")
	if n := a.lists(); n != 2 {
		t.Errorf("it has listed %d times, and not only for what is gone", n)
	}
	// Gone, and there again before it is missed.
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, subnetKey("10.5.2.0-24")); return err })
	a.stays("n1=10.5.9.0/24 192.0.2.3=10.5.2.0/24", returnPause/2)
	s.Put(subnetKey("10.5.2.0-24"), recordOf("192.0.2.3"))
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, configKey); return err })
	until(t, "another list", func() bool { return a.lists() == 3 })
	a.stays("n1=10.5.9.0/24 192.0.2.3=10.5.2.0/24", 100*time.Millisecond)
	for _, once := range []string{"gets into force when the agent starts", "configuration has been deleted"} {
		if n := strings.Count(a.log.String(), once); n != 1 {
			t.Errorf("it is said %d times: %s", n, once)
		}
	}
}

func TestEtcdAway(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.2"))
	a := start(t, s.URL)
	const all = "n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24"
	a.expect(all)
	s.Stop()
	a.expectError("etcd at "+s.URL, "connection refused")
	a.stays(all, time.Second)
	s.Start()
	s.Put(subnetKey("10.5.2.0-24"), recordOf("192.0.2.3"))
	a.expect(all + " 192.0.2.3=10.5.2.0/24")
	a.always(all)
	if _, errs, _ := a.now(); len(errs) > 3 {
		t.Errorf("%d errors are told", len(errs))
	}
	if n := a.lists(); n != 1 {
		t.Errorf("with nothing missed it has listed %d times", n)
	}
}

// Whoever comes back after the changes that it has missed are forgotten lists all.
func TestCompaction(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.2"))
	wall := newWall(t, strings.TrimPrefix(s.URL, "http://"))
	a := start(t, "http://"+wall.address)
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24")
	wall.close()
	s.Put(subnetKey("10.5.2.0-24"), recordOf("192.0.2.3"))
	s.Do(func(ctx context.Context) error {
		gone, err := s.Client.Delete(ctx, subnetKey("10.5.1.0-24"))
		if err == nil {
			_, err = s.Client.Compact(ctx, gone.Header.Revision)
		}
		return err
	})
	wall.open()
	a.expect("n1=10.5.9.0/24 192.0.2.3=10.5.2.0/24")
}

func TestEmptied(t *testing.T) {
	t.Parallel()
	for what, empty := range map[string]func(*etcd.Server){
		"all keys deleted": func(s *etcd.Server) {
			s.Do(func(ctx context.Context) error {
				_, err := s.Client.Delete(ctx, prefix+"/", clientv3.WithPrefix())
				return err
			})
		},
		"a new etcd": (*etcd.Server).Empty,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := etcd.Start(t)
			s.Put(configKey, narrow)
			for i := range 3 {
				s.Put(subnetKey(fmt.Sprintf("10.5.%d.0-24", i+1)), recordOf(fmt.Sprintf("192.0.2.%d", i+2)))
			}
			a := start(t, s.URL, func(o *Options, _ *Self) { o.TTL = 6 * time.Second })
			const all = "n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24 192.0.2.3=10.5.2.0/24 192.0.2.4=10.5.3.0/24"
			a.expect(all)
			empty(s)
			until(t, "a new lease", func() bool { _, there := s.Get(subnetKey("10.5.9.0-24")); return there })
			a.always(all)
			// One has another subnet now, another one's subnet is somebody else's by now; the third never comes back.
			s.Put(subnetKey("10.5.7.0-24"), recordOf("192.0.2.2"))
			s.Put(subnetKey("10.5.2.0-24"), recordOf("192.0.2.8"))
			a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.7.0/24 192.0.2.4=10.5.3.0/24 192.0.2.8=10.5.2.0/24")
			a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.7.0/24 192.0.2.8=10.5.2.0/24")
			a.always("n1=10.5.9.0/24")
		})
	}
}

// An agent that starts knows by what stands whether the registry has been emptied, and what stood.
func TestEmptiedBeforeAStart(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	mac := wire.MAC{2, 0, 0, 0, 0, 2}
	via, alias := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")
	stood := func(_ *Options, self *Self) {
		self.Standing = plan.Standing{
			Own:     []netip.Prefix{netip.MustParsePrefix("10.5.9.0/24")},
			Claims:  map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.5.1.0/24"): via, netip.MustParsePrefix("fc00:0:0:1::/64"): alias, netip.MustParsePrefix("127.0.0.0/24"): netip.MustParseAddr("192.0.2.3")},
			Aliases: map[netip.Addr]netip.Addr{via: alias, alias: via}, MACs: map[netip.Addr]wire.MAC{via: mac},
		}
	}
	a := start(t, s.URL, stood)
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.1.0/24") // the network has no IPv6
	if n := a.nodes[1]; n.TunnelMACs[wire.IPv4] != mac || !slices.Equal(n.InternalIPs, []string{"192.0.2.2", "2001:db8::2"}) {
		t.Errorf("kept is %+v", n)
	}
	a.stop()
	// Its own lease is there: what is missing has ended.
	start(t, s.URL, stood).expect("n1=10.5.9.0/24")
}

func TestConfigIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	a := start(t, s.URL)
	a.expectError(configKey, "is missing; waiting for it")
	s.Put(configKey, `{"Network": "10.5.0.0/16", "SubnetLen": 31}`)
	a.expectError(configKey + ": SubnetLen: is 31")
	s.Put(configKey, `{"Network": "10.5.0.0/16"}`)
	s.Put(subnetKey("10.5.1.0-24"), `{"PublicIP":"192.0.2.2","BackendType":"udp"}`)
	a.expectError(configKey+": Backend: is absent", "192.0.2.2")
	if _, there := s.Get(prefix + "/ebpf-cni/192.0.2.1"); there {
		t.Error("it has leased")
	}
	s.Put(subnetKey("10.5.1.0-24"), recordOf("192.0.2.2"))
	until(t, "a lease", func() bool {
		nodes, _, failing := a.now()
		return strings.Contains(nodes, "192.0.2.2=10.5.1.0/24") && !failing
	})
	s.Put(subnetKey("10.5.2.0-24"), `{"PublicIP":"192.0.2.3","BackendType":"udp"}`) // too late to be refused
	s.Put(subnetKey("10.5.3.0-24"), recordOf("192.0.2.4"))
	until(t, "that it goes on", func() bool {
		nodes, _, failing := a.now()
		return strings.Contains(nodes, "192.0.2.4=10.5.3.0/24") && !failing && strings.Contains(a.log.String(), `its backend is \"udp\"`)
	})
	a.stop()
	again := start(t, s.URL, func(_ *Options, self *Self) { self.Standing.Own = []netip.Prefix{netip.MustParsePrefix("10.5.9.0/24")} })
	until(t, "that the next one goes on, too", func() bool { nodes, _, _ := again.now(); return strings.Contains(nodes, "192.0.2.4=10.5.3.0/24") })
}

func TestConfigIsKept(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	dir := t.TempDir()
	read := func(prefix string) (Network, error) {
		r, err := Open(Options{Endpoints: []string{s.URL}, Prefix: prefix}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		ctx, cancel := context.WithTimeout(t.Context(), priv.Patience(3*time.Second))
		defer cancel()
		return r.Network(ctx, dir, func(error) {})
	}
	want, err := read(prefix)
	if err != nil {
		t.Fatal(err)
	}
	s.Do(func(ctx context.Context) error { _, err := s.Client.Delete(ctx, configKey); return err })
	if got, err := read(prefix); err != nil || got != want {
		t.Errorf("without the key: %v, error %v", got, err)
	}
	s.Stop()
	if got, err := read(prefix); err != nil || got != want {
		t.Errorf("without etcd: %v, error %v", got, err)
	}
	if _, err := read("/another"); err == nil {
		t.Error("another prefix has the same network")
	}
}

// A list that was not answered to its end goes on where it was, and is of one revision of one etcd.
func TestListGoesOn(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	for i := range 3 {
		s.Put(subnetKey(fmt.Sprintf("10.5.%d.0-24", i+1)), recordOf(fmt.Sprintf("192.0.2.%d", i+2)))
	}
	r, err := Open(Options{Endpoints: []string{s.URL}, Prefix: prefix}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f := &follower{Registry: r, network: networkOf(t, vxlan)}
	l, err := f.list(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	delete(l.entries, "10.5.2.0-24")
	delete(l.entries, "10.5.3.0-24")
	l.next = subnetKey("10.5.1.0-24") + "\x00"
	s.Put(subnetKey("10.5.4.0-24"), recordOf("192.0.2.5"))
	f.begun = l
	if again, err := f.list(t.Context()); err != nil || again != l || len(l.entries) != 3 || l.entries["10.5.4.0-24"] != nil {
		t.Errorf("listed are %v, error %v", l.entries, err)
	}
	l.cluster++
	f.begun = l
	if _, err := f.list(t.Context()); err == nil {
		t.Error("a list is of two etcds")
	}
	if again, err := f.list(t.Context()); err != nil || len(again.entries) != 4 {
		t.Errorf("after that it has %v, error %v", again, err)
	}
	short, cancel := context.WithTimeout(t.Context(), 0) // ours to wait, not etcd's to answer
	defer cancel()
	if _, err := f.list(short); err == nil || f.begun != nil {
		t.Errorf("after its context's end: %v, kept %v", err, f.begun)
	}
}

// Nodes that start at once get different subnets.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, `{"Network": "10.5.0.0/20", "SubnetLen": 26, "EnableIPv6": true, "IPv6Network": "fc00::/58", "Backend": {"Type": "host-gw"}}`)
	const nodes = 30 // of 63 subnets
	var agents []*agent
	for i := range nodes {
		agents = append(agents, start(t, s.URL, func(o *Options, self *Self) {
			o.Public[wire.IPv4], o.Public[wire.IPv6] = netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", i+1))
			self.Node = fmt.Sprint("n", i)
		}))
	}
	for i, a := range agents {
		until(t, fmt.Sprint("all that agent ", i, " is to know"), func() bool {
			now, _, failing := a.now()
			seen := map[string]bool{}
			for node := range strings.FieldsSeq(now) {
				_, subnets, _ := strings.Cut(node, "=")
				for p := range strings.SplitSeq(subnets, ",") {
					seen[p] = true
				}
			}
			return len(seen) == 2*nodes && len(strings.Fields(now)) == nodes && !failing
		})
	}
}

// 5 000 leases are listed within a second, and a change is told within 50 ms.
func TestManyLeases(t *testing.T) {
	s := etcd.Start(t)
	s.Put(configKey, `{"Network": "10.0.0.0/8", "SubnetMin": "10.99.0.0", "Backend": {"Type": "vxlan"}}`)
	nodes := 1000
	if priv.Long() {
		nodes = 5000
	}
	const at = 50 // in a transaction
	for i := 0; i < nodes; i += at {
		s.Do(func(ctx context.Context) error {
			var ops []clientv3.Op
			for n := i; n < i+at; n++ {
				address := netip.AddrFrom4([4]byte{192, 168, byte(n >> 8), byte(n)})
				ops = append(ops, clientv3.OpPut(subnetKey(fmt.Sprintf("10.%d.%d.0-24", n>>8, n&255)), recordOf(address.String())),
					clientv3.OpPut(prefix+"/ebpf-cni/"+address.String(), fmt.Sprintf(`{"machineID":"m%d","node":"node-%[1]d"}`, n)))
			}
			_, err := s.Client.Txn(ctx).Then(ops...).Commit()
			return err
		})
	}
	a := start(t, s.URL)
	count := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.nodes)
	}
	began := time.Now()
	until(t, "all nodes", func() bool { return count() == nodes+1 })
	if took := time.Since(began); took > priv.Patience(time.Second) {
		t.Errorf("%d leases took %v", nodes, took)
	} else {
		t.Logf("%d leases took %v", nodes, took)
	}
	var all []time.Duration
	for i := range 100 {
		began := time.Now()
		s.Put(subnetKey(fmt.Sprintf("10.98.%d.0-24", i)), recordOf(fmt.Sprintf("192.0.2.%d", i+2)))
		for count() != nodes+2+i {
			if time.Since(began) > priv.Patience(10*time.Second) {
				t.Fatal("a change is not told")
			}
			time.Sleep(200 * time.Microsecond)
		}
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	t.Logf("changes took %v, at most %v", all[len(all)/2], all[len(all)-1])
	judged := all[len(all)/2] // beside other tests
	if priv.Long() {
		judged = all[98]
	}
	if judged > priv.Patience(50*time.Millisecond) {
		t.Errorf("a change took %v", judged)
	}
	// Of a new etcd the node's turn to list all may be far away; changes are heard all the same.
	s.Empty()
	until(t, "a new lease", func() bool { _, there := s.Get(prefix + "/ebpf-cni/192.0.2.1"); return there })
	s.Put(subnetKey("10.97.1.0-24"), recordOf("192.0.2.200"))
	until(t, "a change", func() bool { return count() == nodes+1+len(all)+1 })
}
