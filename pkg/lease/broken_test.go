package lease

import (
	"context"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/ebpf-cni/ebpf-cni/test/etcd"
)

// A lease that is broken takes no other one away, and is said once.
func TestBrokenLeases(t *testing.T) {
	t.Parallel()
	s := etcd.Start(t)
	s.Put(configKey, narrow)
	// Older than all others, which makes their claims strong: everything, this node's subnet by an odd name, and a node that is called
	// like another one.
	s.Put(subnetKey("0.0.0.0-0"), recordOf("192.0.2.66"))
	s.Put(subnetKey("10.5.0.0-16"), recordOf("192.0.2.66"))
	s.Put(subnetKey("10.5.9.7-24"), recordOf("192.0.2.67"))
	s.Put(subnetKey("10.5.5.0-24"), recordOf("192.0.2.5"))
	s.Put(prefix+"/ebpf-cni/192.0.2.5", `{"machineID":"m5","node":"192.0.2.3"}`)
	id := s.Lease(subnetKey("10.5.2.0-24"), recordOf("192.0.2.2"), time.Minute)
	s.Do(func(ctx context.Context) error {
		_, err := s.Client.Put(ctx, prefix+"/ebpf-cni/192.0.2.2", `{"machineID":"m2","node":"n2"}`, clientv3.WithLease(id))
		return err
	})
	s.Put(subnetKey("10.5.3.0-24"), recordOf("192.0.2.3"))
	const mine = "n1=10.5.9.0/24"
	others := []string{"192.0.2.3=10.5.3.0/24", "192.0.2.5=10.5.5.0/24", "n2=10.5.2.0/24"}
	a := start(t, s.URL)
	a.expect(mine + " " + strings.Join(others, " "))
	s.Put(subnetKey("10.5.8.0-23"), recordOf("192.0.2.68")) // packets are not sent there: see the package plan
	long := strings.Repeat("9", 1<<20)
	broken := []struct{ key, value, said string }{
		{"0.0.0.0-0", "", "lease 0.0.0.0-0 is ignored"},
		{"10.5.0.0-16", "", "lease 10.5.0.0-16 is ignored"},
		{"10.5.9.7-24", "", "lease 10.5.9.7-24 is ignored"},
		{"10.5.20.0-24", strings.Replace(recordOf("192.0.2.20"), "192.0.2.20", long, 1), "lease 10.5.20.0-24 is ignored"},
		{"10.5.21.0-24", strings.Replace(recordOf("192.0.2.21"), "vxlan", long, 1), "lease 10.5.21.0-24 of 192.0.2.21 is ignored"},
		{"10.5.22.0-24", `{"PublicIP":"192.0.2.22","BackendType":"vxlan","BackendData":"garbage"}`, "lease 10.5.22.0-24 is ignored"},
		{"10.5.23.0-24/x", recordOf("192.0.2.23"), "lease 10.5.23.0-24/x is ignored"},
		{"../config", recordOf("192.0.2.24"), "lease ../config is ignored"},
		{"127.0.0.0-24", recordOf("192.0.2.25"), "lease 127.0.0.0-24 is ignored"}, // etcd's address is there
		{"8.8.8.0-24", recordOf("192.0.2.26"), "lease 8.8.8.0-24 is ignored"},
		{"10.5.3.0-24", "garbage", "lease 10.5.3.0-24 is what it was"},
		{"10.5.9.0-24", "garbage", "subnet leased"},
	}
	s.Put(subnetKey("10.5.7.0-24"), recordOf("192.0.2.2")) // another one is that which its node renews
	s.Put(subnetKey("10.5.6.0-24"), recordOf("192.0.2.1"))
	for _, b := range broken {
		if b.value != "" {
			s.Put(subnetKey(b.key), b.value)
		}
	}
	until(t, "this node's lease is written again", func() bool {
		got, _ := s.Get(subnetKey("10.5.9.0-24"))
		return strings.Contains(got, "02:00:00:00:00:09")
	})
	a.expect(mine + " 192.0.2.3=10.5.3.0/24 192.0.2.5=10.5.5.0/24 192.0.2.68=10.5.8.0/23 n2=10.5.2.0/24")
	a.expectDoubt("n2: lease 10.5.7.0-24 has the same public address 192.0.2.2 as lease 10.5.2.0-24, and does not count")
	a.expectDoubt("n1: lease 10.5.6.0-24 has this node's public address 192.0.2.1 as well")
	for _, has := range append(others, mine) {
		a.always(has)
	}
	for _, b := range broken {
		want := 1
		if b.said == "subnet leased" {
			want = 2
		}
		until(t, b.said, func() bool { return strings.Count(a.log.String(), b.said) >= want })
		if n := strings.Count(a.log.String(), b.said); n > want {
			t.Errorf("%q is said %d times", b.said, n)
		}
	}
	if n := len(a.log.String()); n > 10_000 {
		t.Errorf("the log has %d bytes", n)
	}
}
