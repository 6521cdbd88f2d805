package observe

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/bpf"
	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// A node of a large cluster, and what looking at it may cost of a processor's time.
const (
	manyPods     = 250
	manyNodes    = 5000
	surveyBudget = time.Second
)

func (n *node) grow() {
	n.t.Helper()
	for i := range manyPods {
		index := uint32(n.link(fmt.Sprintf("pod%d", i)))
		a := wire.AddrFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}))
		put(n.t, n.Reader, endpoints.Name, typed.Entry[endpoints.Key, endpoints.Value]{
			Key: endpoints.Key{Address: a}, Value: endpoints.Value{Ifindex: index},
		})
		put(n.t, n.Reader, devices.Name, typed.Entry[devices.Key, devices.Value]{
			Key: devices.Key{Ifindex: index}, Value: devices.Value{Addresses: wire.Addresses{a}},
		})
	}
	n.enlargeDestinations()
	var peers []typed.Entry[destinations.Key, destinations.Value]
	for i := range manyNodes {
		address := netip.AddrFrom4([4]byte{172, 19, byte(i >> 8), byte(i)})
		cidr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
		peers = append(
			peers,
			typed.Entry[destinations.Key, destinations.Value]{
				Key: destinations.KeyFrom(cidr), Value: destinations.Value{
					Kind: destinations.PodCIDR, Ifindex: uint32(n.uplink), Node: wire.AddrFrom(address),
				},
			},
			typed.Entry[destinations.Key, destinations.Value]{
				Key: destinations.KeyFrom(netip.PrefixFrom(address, 32)), Value: destinations.Value{Kind: destinations.Node},
			},
		)
	}
	put(n.t, n.Reader, destinations.Name, peers...)
}

// enlargeDestinations pins an empty map of the product's capacity.
func (n *node) enlargeDestinations() {
	n.t.Helper()
	spec, err := bpf.LoadDataplane()
	if err != nil {
		n.t.Fatal(err)
	}
	m, err := ebpf.NewMap(spec.Maps[destinations.Name])
	if err != nil {
		n.t.Fatal(err)
	}
	defer m.Close()
	if err := os.Remove(n.Dir.Map(destinations.Name)); err != nil {
		n.t.Fatal(err)
	}
	if err := m.Pin(n.Dir.Map(destinations.Name)); err != nil {
		n.t.Fatal(err)
	}
}

// processorTime is what this process has used.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestSurveyOfALargeNodeCostsLittle(t *testing.T) {
	n := newNode(t, attach.Auto)
	n.grow()
	before := processorTime(t)
	s, err := n.Survey()
	if err != nil {
		t.Fatal(err)
	}
	took := processorTime(t) - before
	if len(s.Peers) < manyNodes || s.Peers[0].Interface != "eth0" || len(s.Attachments) < manyPods {
		t.Errorf("%d peers, the first over %q, and %d attachments", len(s.Peers), s.Peers[0].Interface, len(s.Attachments))
	}
	if took > priv.Patience(surveyBudget) {
		t.Errorf("it took %v of processor time, more than %v", took, surveyBudget)
	}
	t.Logf("%v of processor time", took)
}
