package endpoint

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

func TestClaim(t *testing.T) {
	dir := bpffs.Dir(filepath.Join(priv.Isolate(t), "ec"))
	pins.Maps(t, dir)
	m, err := endpoints.Open(dir.Map(endpoints.Name))
	must(t, err)
	defer m.Close()
	host, err := device.Open()
	must(t, err)
	defer host.Close()
	n := &Node{Releaser: Releaser{StateDir: t.TempDir()}, Host: host, Tables: Tables{Endpoints: m}}
	lo, err := net.InterfaceByName("lo")
	must(t, err)

	for _, a := range []netip.Addr{netip.MustParseAddr("10.9.0.9"), netip.MustParseAddr("fd00:9::9")} {
		claimAt(t, n, a, lo.Index)
	}
}

func claimAt(t *testing.T, n *Node, a netip.Addr, there int) {
	t.Helper()
	claim := func(index int, mac byte) error {
		w := &Work{Node: n, Endpoint: Endpoint{HostIndex: index, PodMAC: wire.MAC{mac}}, ctx: context.Background()}
		return w.claim(a)
	}
	expect := func(index int, mac byte) {
		t.Helper()
		v, err := n.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(a)})
		if want := (endpoints.Value{Ifindex: uint32(index), PodMAC: wire.MAC{mac}}); err != nil || v != want {
			t.Errorf("the entry is %+v, %v; want %+v", v, err, want)
		}
	}
	must(t, claim(4242, 1)) // free
	must(t, claim(4242, 2)) // its own
	expect(4242, 2)
	must(t, claim(there, 3)) // of a link that is gone
	expect(there, 3)
	var taken *TakenError
	if err := claim(4242, 4); !errors.As(err, &taken) || taken.Address != a || !strings.Contains(taken.Holder, "lo") {
		t.Errorf("taken from a link that is there: %v", err)
	}
	expect(there, 3)
	e := example()
	e.HostIndex, e.Pod = there, "shop/web"
	must(t, Write(n.StateDir, e))
	if err := claim(4242, 4); err == nil || !strings.Contains(err.Error(), "pod shop/web (interface eth0 of container abc, link "+e.HostName) {
		t.Errorf("the holder is not named: %v", err)
	}
	must(t, Remove(n.StateDir, e.ID))
}

func TestMarkReleasingTakesNoSpace(t *testing.T) {
	dir := t.TempDir()
	e := example()
	must(t, markReleasing(dir, e.ID)) // gone already
	must(t, Write(dir, e))
	if got, err := Read(dir, e.ID); err != nil || got.Releasing {
		t.Errorf("before: %v, %v", got.Releasing, err)
	}
	for range 2 {
		must(t, markReleasing(dir, e.ID))
		if got, err := Read(dir, e.ID); err != nil || !got.Releasing {
			t.Errorf("marked: %v, %v", got.Releasing, err)
		}
	}
	must(t, Write(dir, e)) // an ADD of the same attachment
	if got, err := Read(dir, e.ID); err != nil || got.Releasing {
		t.Errorf("written anew: %v, %v", got.Releasing, err)
	}
}

func TestPodOnAKernelWithoutIPv6(t *testing.T) {
	priv.Isolate(t)
	ns, err := device.CurrentNetNS()
	must(t, err)
	defer ns.Close()
	n := &Node{Sysctl: device.Sysctl{Dir: t.TempDir()}}
	for address, says := range map[string]string{"10.9.0.9": "", "fd00:9::9": "interface eth0"} {
		w := &Work{Node: n, Namespace: ns, Endpoint: Endpoint{ID: ID{IfName: "eth0"}, Addresses: []netip.Addr{netip.MustParseAddr(address)}}}
		err := w.setPodSysctls()
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", address, err, says)
		}
	}
}
