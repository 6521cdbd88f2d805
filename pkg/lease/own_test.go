package lease

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

func TestLeaseIsWritten(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, `{"Network": "10.5.0.0/16", "SubnetMin": "10.5.9.0", "SubnetMax": "10.5.9.0", "EnableIPv6": true, "IPv6Network": "fc00::/48",
		"IPv6SubnetMin": "fc00:0:0:34::", "IPv6SubnetMax": "fc00:0:0:34::", "Backend": {"Type": "vxlan", "VNI": 7}}`)
	dual := func(o *Options, _ *Self) { o.Public[wire.IPv6], o.TTL = netip.MustParseAddr("2001:db8::1"), 0 }
	a := start(t, s.URL, dual)
	a.expect("n1=10.5.9.0/24,fc00:0:0:34::/64")
	key, mine := subnetKey("10.5.9.0-24&fc00:0:0:34::-64"), prefix+"/ebpf-cni/192.0.2.1"
	expectKey(t, s, key, `{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8::1","BackendType":"vxlan","BackendData":{"VNI":7,"VtepMAC":"02:00:00:00:00:09"},"BackendV6Data":{"VNI":7,"VtepMAC":"02:00:00:00:00:09"}}`)
	expectKey(t, s, mine, `{"machineID":"m1","node":"n1"}`)
	revision := func(key string) (revision, ttl int64) {
		s.Do(func(ctx context.Context) error {
			answer, err := s.Client.Get(ctx, key)
			if err != nil || len(answer.Kvs) != 1 {
				return fmt.Errorf("%s is not there: %w", key, err)
			}
			left, err := s.Client.TimeToLive(ctx, clientv3.LeaseID(answer.Kvs[0].Lease))
			revision, ttl = answer.Kvs[0].ModRevision, left.GrantedTTL
			return err
		})
		return revision, ttl
	}
	before, ttl := revision(key)
	if _, other := revision(mine); ttl != 24*3600 || other != ttl {
		t.Errorf("the lease lives for %d s, the holder's key %d", ttl, other)
	}
	if ips := a.nodes[0].InternalIPs; !slices.Equal(ips, []string{"192.0.2.1", "2001:db8::1"}) {
		t.Errorf("the node has the addresses %v", ips)
	}
	a.stop()
	// The next one goes on with it, and writes nothing.
	start(t, s.URL, dual).expect("n1=10.5.9.0/24,fc00:0:0:34::/64")
	if after, _ := revision(key); after != before {
		t.Error("the lease was written again")
	}
}

func TestLeaseOfFlanneldIsTakenOver(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	s.Lease(subnetKey("10.5.77.0-24"), recordOf("192.0.2.1"), time.Minute)
	s.Lease(subnetKey("10.6.77.0-24"), recordOf("192.0.2.1"), time.Minute) // of another network
	s.Lease(subnetKey("10.5.78.0-24"), recordOf("192.0.2.2"), time.Minute)
	a := start(t, s.URL)
	a.expect("n1=10.5.77.0/24 192.0.2.2=10.5.78.0/24")
	if got, _ := s.Get(subnetKey("10.5.77.0-24")); !strings.Contains(got, "02:00:00:00:00:09") {
		t.Errorf("the record is %s", got)
	}
	if a.nodes[1].TunnelMACs[wire.IPv4] != (wire.MAC{2, 0, 0, 0, 0, 1}) {
		t.Errorf("inner frames to %s go to %s", a.nodes[1].Name, a.nodes[1].TunnelMACs[wire.IPv4])
	}
}

func TestOrderOfChoice(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	file := func(subnet string) option {
		return func(o *Options, _ *Self) {
			e := Environment{Networks: [2]netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}, Subnets: [2]netip.Prefix{netip.MustParsePrefix(subnet)}}
			if _, err := e.Write(o.SubnetFile); err != nil {
				t.Fatal(err)
			}
		}
	}
	standing := func(_ *Options, self *Self) {
		self.Standing.Own = []netip.Prefix{netip.MustParsePrefix("10.5.40.0/24")}
	}
	a := start(t, s.URL, file("10.5.30.0/24"), standing)
	a.expect("n1=10.5.30.0/24")
	a.stop()
	a = start(t, s.URL, file("10.5.31.0/24"), standing) // it has a lease
	a.expect("n1=10.5.30.0/24")
	a.stop()
	s.Revoke(subnetKey("10.5.30.0-24"))
	s.Lease(subnetKey("10.5.31.0-24"), recordOf("192.0.2.2"), time.Minute)
	start(t, s.URL, file("10.5.31.0/24"), standing).expect("n1=10.5.40.0/24 192.0.2.2=10.5.31.0/24")
}

func TestReservationStays(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	s.Put(subnetKey("10.5.66.0-24"), `{"PublicIP":"192.0.2.1"}`)
	s.Put(subnetKey("10.5.67.0-24"), `{"PublicIP":"192.0.2.3"}`)
	a := start(t, s.URL)
	a.expect("n1=10.5.66.0/24") // of 192.0.2.3 nobody knows by which backend it is reached
	s.Do(func(ctx context.Context) error {
		answer, err := s.Client.Get(ctx, subnetKey("10.5.66.0-24"))
		if err == nil && (answer.Kvs[0].Lease != 0 || !strings.Contains(string(answer.Kvs[0].Value), "02:00:00:00:00:09")) {
			t.Errorf("the reservation has become %v", answer.Kvs[0])
		}
		return err
	})
	s.Revoke(prefix + "/ebpf-cni/192.0.2.1")
	until(t, "the holder's key comes back", func() bool { _, there := s.Get(prefix + "/ebpf-cni/192.0.2.1"); return there })
	a.always("n1=10.5.66.0/24")
}

func TestAnotherHolderIsRefused(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	first := start(t, s.URL)
	until(t, "a lease", func() bool { nodes, _, _ := first.now(); return nodes != "" })
	was, _, _ := first.now()
	for what, change := range map[string]option{
		"another machine": func(_ *Options, s *Self) { s.MachineID = "m2" },
		"another name":    func(_ *Options, s *Self) { s.Node = "n2" },
	} {
		a := start(t, s.URL, change)
		a.expectError("192.0.2.1 is held by node n1 with machine id m1", "--public-ip", prefix+"/ebpf-cni/192.0.2.1")
		if nodes, _, _ := a.now(); nodes != "" {
			t.Errorf("%s: told has been %s", what, nodes)
		}
		a.stop()
	}
	first.stays(was, 100*time.Millisecond)
	// It is gone for good.
	first.stop()
	a := start(t, s.URL, func(_ *Options, s *Self) { s.Node = "n2" })
	a.expectError("held by node n1")
	s.Do(func(ctx context.Context) error {
		_, err := s.Client.Delete(ctx, prefix+"/ebpf-cni/192.0.2.1")
		return err
	})
	a.expect("n2" + strings.TrimPrefix(was, "n1"))
}

func TestRevokedLeaseIsTakenAgain(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, vxlan)
	s.Lease(subnetKey("10.5.77.0-24"), recordOf("192.0.2.1"), time.Minute)
	s.Lease(subnetKey("10.5.78.0-24"), recordOf("192.0.2.2"), time.Minute)
	a := start(t, s.URL)
	const all = "n1=10.5.77.0/24 192.0.2.2=10.5.78.0/24"
	a.expect(all)
	until(t, "our record", func() bool { got, _ := s.Get(subnetKey("10.5.77.0-24")); return strings.Contains(got, ":09") })
	s.Revoke(subnetKey("10.5.77.0-24"))
	until(t, "the same subnet", func() bool { _, there := s.Get(subnetKey("10.5.77.0-24")); return there })
	a.expect(all)
	until(t, "a list", func() bool { return a.lists() == 2 })
	if strings.Contains(a.log.String(), "emptied") {
		t.Error("one lease that is revoked is taken for a registry that has been emptied")
	}
	// The subnet has passed to somebody else.
	s.Do(func(ctx context.Context) error {
		_, err := s.Client.Put(ctx, subnetKey("10.5.77.0-24"), recordOf("192.0.2.3"))
		return err
	})
	until(t, "another subnet", func() bool { nodes, _, _ := a.now(); return strings.Contains(nodes, "192.0.2.3=10.5.77.0/24") })
	nodes, _, _ := a.now()
	if strings.Contains(nodes, "n1=10.5.77.0/24") || !strings.Contains(a.log.String(), "another node holds this node") {
		t.Errorf("nodes are %s", nodes)
	}
	a.always("192.0.2.2=10.5.78.0/24")
}

// A lease that nobody renews ends; ours does not, and is taken again where etcd was out of reach for so long that it has run out.
func TestLeaseIsRenewed(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	s.Lease(subnetKey("10.5.78.0-24"), recordOf("192.0.2.2"), 2*time.Second)
	wall := newWall(t, strings.TrimPrefix(s.URL, "http://"))
	a := start(t, "http://"+wall.address, func(o *Options, _ *Self) { o.TTL = 2 * time.Second })
	a.expect("n1=10.5.9.0/24 192.0.2.2=10.5.78.0/24")
	a.expect("n1=10.5.9.0/24")
	if strings.Count(a.log.String(), "subnet leased") != 1 {
		t.Error("the lease was made again")
	}
	there := func() bool { _, there := s.Get(subnetKey("10.5.9.0-24")); return there }
	wall.close()
	until(t, "the lease runs out", func() bool { return !there() })
	wall.open()
	until(t, "it is taken again", there)
	a.expect("n1=10.5.9.0/24")
	a.always("n1=10.5.9.0/24")
}
