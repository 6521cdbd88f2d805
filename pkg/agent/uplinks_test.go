package agent

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// beginPass is the beginning of a pass.
func (l *loop) beginPass(t *testing.T) {
	t.Helper()
	if err := l.look(&l.state); err != nil {
		t.Fatal(err)
	}
	l.makePlan()
}

func (l *loop) uplinkEntry(index uint32) (uplinks.Value, bool) {
	v, err := l.dp.Maps.Uplinks.Get(uplinks.Key{Ifindex: index})
	return v, err == nil
}

// An agent that is killed anywhere finds by the map where its programs may be.
func TestUplinkHasAnEntryWhileItHasPrograms(t *testing.T) {
	l := testLoop(t)
	l.accept(list(n1(), n2()))
	l.beginPass(t)
	index := l.view.uplinks[0].Index
	if err := l.uplinks.attach(&l.state); err != nil {
		t.Fatal(err)
	}
	if v, there := l.uplinkEntry(index); !there || v != (uplinks.Value{}) {
		t.Errorf("with the programs, before anything else: entry %+v, %v; want one without an address", v, there)
	}
	l.pass(t.Context())
	if v, there := l.uplinkEntry(index); !there || v.IPv4.Netip() != netip.MustParseAddr("172.18.0.11") {
		t.Errorf("after a pass: entry %+v, %v", v, there)
	}
	up, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr("172.18.0.11/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrDel(up, a); err != nil {
		t.Fatal(err)
	}
	l.uplinks.absences.grace = 0
	l.beginPass(t)
	if !l.take(t.Context(), onNodes) {
		t.Fatal(l.failures(onPass))
	}
	if _, there := l.uplinkEntry(index); !there {
		t.Error("the entry is gone before the programs are")
	}
	if err := l.uplinks.deleteEntries(&l.state, map[int]bool{int(index): true}); err != nil {
		t.Fatal(err)
	}
	if _, there := l.uplinkEntry(index); !there {
		t.Error("the entry is gone although programs are left")
	}
	if err := l.uplinks.detach(&l.state); err != nil {
		t.Fatal(err)
	}
	if _, there := l.uplinkEntry(index); there {
		t.Error("the entry outlives the programs")
	}
	if ok, err := l.dp.Attached(int(index), attach.FromUplink); ok || err != nil {
		t.Errorf("attached: %v, error %v", ok, err)
	}
}

func TestEntryOfALinkThatIsGoneIsDeleted(t *testing.T) {
	l := testLoop(t)
	const gone = 4242
	if err := l.dp.Maps.Uplinks.Put(uplinks.Key{Ifindex: gone}, uplinks.Value{}); err != nil {
		t.Fatal(err)
	}
	ready(t, l)
	if _, there := l.uplinkEntry(gone); there {
		t.Error("it is still there")
	}
}

// A pod's link may come between the list of links and that of routes.
func TestRouteOverAnUnknownLinkIsNotOurs(t *testing.T) {
	v := testView()
	ours := device.Route{Dst: netip.MustParsePrefix("10.244.1.0/24"), Unreachable: true, Protocol: device.Protocol}
	newPod := device.Route{Dst: netip.MustParsePrefix("10.244.1.77/32"), Index: 77, Protocol: device.Protocol}
	v.routes = append(v.routes, ours, newPod)
	have := v.ownRoutes()
	for prefix, want := range map[string]bool{"10.244.1.0/24": true, "10.244.2.0/24": true, "10.244.1.5/32": false, "10.244.1.77/32": false} {
		if _, got := have[netip.MustParsePrefix(prefix)]; got != want {
			t.Errorf("%s: %v, want %v", prefix, got, want)
		}
	}
}

func TestEntryOfAPodWhoseStateIsUnreadableStays(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	const outside = "10.9.9.9/32"
	key := destinations.KeyFrom(netip.MustParsePrefix(outside))
	if err := l.dp.Maps.Destinations.Put(key, destinations.Value{Kind: destinations.Local}); err != nil {
		t.Fatal(err)
	}
	if err := endpoint.Write(l.cfg.State, endpoint.Endpoint{ID: endpoint.ID{ContainerID: "broken", IfName: "eth0"}}); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(endpoint.Dir(l.cfg.State), "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("state files %v, error %v", files, err)
	}
	if err := os.WriteFile(files[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if _, there := l.destination(t, outside); !there {
		t.Error("the entry of a pod that can't be told from others is gone")
	}
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	if _, there := l.destination(t, outside); there {
		t.Error("nobody's entry is still there")
	}
}
