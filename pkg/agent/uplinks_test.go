package agent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/uplinks"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
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
	if v, there := l.uplinkEntry(index); !there || v.Addresses[wire.IPv4].Netip() != netip.MustParseAddr("172.18.0.11") {
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
	if !l.doSteps(t.Context(), onNodes) {
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

// An uplink without an Ethernet header gets its own programs, which are loaded when it is there. Until then nothing is masqueraded to its
// address, since no program would translate answers.
func TestBareUplinkWaitsForItsPrograms(t *testing.T) {
	l := testLoop(t)
	l.cfg.KubeProxy = KubeProxyOff
	ready(t, l)
	run(t, "ip tuntap add dev tun9 mode tun")
	run(t, "ip link set dev tun9 up")
	run(t, "ip address add 10.99.0.1/24 dev tun9")
	tun, err := l.host.LinkByName("tun9")
	must(t, err)
	index, zero := uint32(tun.Index), wire.Addr{}
	expect := func(when string, loaded bool) {
		t.Helper()
		v, there := l.uplinkEntry(index)
		if !there || v.Flags != uplinks.Bare || v.Addresses[wire.IPv4] != zero != loaded {
			t.Errorf("%s: entry %+v, %v", when, v, there)
		}
		for _, hook := range attach.BareHooks() {
			if ok, _ := l.dp.Attached(tun.Index, hook); ok != loaded {
				t.Errorf("%s: attached as %s: %v", when, hook, ok)
			}
		}
	}
	l.pass(t.Context())
	expect("before they are loaded", false)
	if !l.follow(t, time.Now()) {
		t.Fatal("no programs were loaded")
	}
	l.pass(t.Context())
	expect("when they are loaded", true)
	run(t, "ip link delete tun9")
	l.pass(t.Context())
	if l.follow(t, time.Now()) {
		t.Error("programs were replaced when the uplink had gone")
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

func TestUplinksAreFollowed(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	far, err := netlink.LinkByName("far")
	if err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr("192.168.9.1/24")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(far, a); err != nil {
		t.Fatal(err)
	}
	l.pass(t.Context())
	index := far.Attrs().Index
	if ok, err := l.dp.Attached(index, attach.FromUplink); !ok {
		t.Fatalf("a new route's interface is no uplink: %v", err)
	}
	if err := netlink.AddrDel(far, a); err != nil {
		t.Fatal(err)
	}
	l.uplinks.absences.grace = 0
	l.pass(t.Context())
	if ok, _ := l.dp.Attached(index, attach.FromUplink); ok {
		t.Error("an interface without routes is still an uplink")
	}
	if len(l.plan.Uplinks) != 1 {
		t.Errorf("uplinks %v", l.plan.Uplinks)
	}
}

// Another network's guests: a link each, with a route to one address. They are more than the map has room for.
func TestLinksOfSingleAddressesAreNoUplinks(t *testing.T) {
	l := testLoop(t)
	const guests = 300
	for i := range guests {
		guest := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("tap%d", i)}, PeerName: fmt.Sprintf("guest%d", i)}
		if err := netlink.LinkAdd(guest); err != nil {
			t.Fatal(err)
		}
		if err := netlink.LinkSetUp(guest); err != nil {
			t.Fatal(err)
		}
		address := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, byte(i >> 8), byte(i)}), 32)
		if err := l.host.ReplaceRoute(device.Route{Dst: address, Index: guest.Attrs().Index, Foreign: true}); err != nil {
			t.Fatal(err)
		}
	}
	ready(t, l)
	if found := names(l.view.uplinks); len(found) != 1 || found[0] != "uplink" {
		t.Errorf("uplinks %v", found)
	}
	l.cfg.Uplinks = []string{"uplink", "tap7"}
	l.pass(t.Context())
	if found := names(l.view.uplinks); len(found) != 2 || !slices.Contains(found, "tap7") {
		t.Errorf("uplinks %v, with one of the links named", found)
	}
	l.assertReady(t)
}

// manyUplinks makes interfaces that lead to nobody whom pods need, before this node's own uplink is made anew: it comes last.
func manyUplinks(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		tap := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("tap%d", i)}, PeerName: fmt.Sprintf("guest%d", i)}
		must(t, netlink.LinkAdd(tap))
		must(t, netlink.LinkSetUp(tap))
		_, dst, _ := net.ParseCIDR(fmt.Sprintf("198.18.%d.0/24", i))
		must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: tap.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK}))
	}
	old, err := netlink.LinkByName("uplink")
	must(t, err)
	must(t, netlink.LinkDel(old))
	up := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "far"}
	must(t, netlink.LinkAdd(up))
	a, err := netlink.ParseAddr("172.18.0.11/24")
	must(t, err)
	must(t, netlink.AddrAdd(up, a))
	must(t, netlink.LinkSetUp(up))
}

// carrying are the uplinks with our programs, which are those in the map.
func (l *loop) carrying(t *testing.T) (carrying []string) {
	t.Helper()
	for _, u := range l.view.uplinks {
		on, err := l.dp.Attached(int(u.Index), attach.FromUplink)
		must(t, err)
		if _, there := l.uplinkEntry(u.Index); there != on {
			t.Errorf("%s: entry %v, programs %v", u.Name, there, on)
		}
		if on {
			carrying = append(carrying, u.Name)
		}
	}
	return carrying
}

// Where not all uplinks fit, those that pods need have room, whatever had it before.
func TestUplinksThatPodsNeedHaveRoom(t *testing.T) {
	l := testLoop(t)
	manyUplinks(t, 5)
	l.dp.Maps.Uplinks = small(t, l.dp.Maps.Uplinks, uplinks.Name, 3)
	assert := func(when string, want ...string) {
		t.Helper()
		l.pass(t.Context())
		if got := l.carrying(t); !slices.Equal(got, want) {
			t.Errorf("%s: programs on %v, want %v", when, got, want)
		}
		l.assertReady(t)
	}
	l.accept(list(n1()))
	assert("nobody needs any", "tap0", "tap1", "tap2")
	l.accept(list(n1(), n2()))
	assert("another node is on the last", "tap0", "tap1", "uplink")
	assert("a pass later", "tap0", "tap1", "uplink")
	if says := l.complaints.degraded()["uplinks/pass"]; says != "map uplinks is full (3 entries), and others are needed more: no programs on tap2, tap3, tap4; --uplink names those that count" {
		t.Errorf("degraded by %q", says)
	}
	tap4, err := netlink.LinkByName("tap4")
	must(t, err)
	_, world, _ := net.ParseCIDR("0.0.0.0/0")
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: tap4.Attrs().Index, Dst: world, Scope: netlink.SCOPE_LINK}))
	assert("the default route leads over another", "tap0", "tap4", "uplink")
	must(t, netlink.RouteDel(&netlink.Route{LinkIndex: tap4.Attrs().Index, Dst: world, Scope: netlink.SCOPE_LINK}))
	assert("no longer, which gives no other one the room", "tap0", "tap4", "uplink")
	l.uplinks.attached, l.uplinks.numbers = map[uint32]string{}, nil
	assert("nor does another agent", "tap0", "tap4", "uplink")
	must(t, netlink.LinkDel(tap4))
	assert("which is gone", "tap0", "tap1", "uplink")
	pins, err := attach.PinnedLinks(l.cfg.BPFFS)
	must(t, err)
	for _, pin := range pins {
		if pin.Ifindex == tap4.Attrs().Index {
			t.Errorf("a link that is gone has left the pin of its %s", pin.Hook)
		}
	}
	for _, name := range []string{"tap2", "tap3"} {
		link, err := netlink.LinkByName(name)
		must(t, err)
		must(t, netlink.LinkDel(link))
	}
	assert("all fit", "tap0", "tap1", "uplink")
	if degraded := l.complaints.degraded(); len(degraded) > 0 {
		t.Errorf("degraded by %v", degraded)
	}
}

// What links leave in the map that are gone is no reason to refuse new ones, for no moment.
func TestMapFullOfFormerUplinks(t *testing.T) {
	l := testLoop(t)
	l.dp.Maps.Uplinks = small(t, l.dp.Maps.Uplinks, uplinks.Name, 3)
	for gone := range uint32(3) {
		must(t, l.dp.Maps.Uplinks.Put(uplinks.Key{Ifindex: 4242 + gone}, uplinks.Value{Bit: gone}))
	}
	ready(t, l)
	if got := l.carrying(t); len(got) != 1 || len(l.complaints.degraded()) > 0 {
		t.Errorf("programs on %v, degraded by %v", got, l.complaints.degraded())
	}
}

func TestNumbersOfUplinks(t *testing.T) {
	links := func(indexes ...uint32) (out []plan.Link) {
		for _, i := range indexes {
			out = append(out, plan.Link{Index: i})
		}
		return out
	}
	n := numbers{5: 0, 6: 0, 7: 9} // of a version without numbers, and another
	for _, step := range []struct {
		indexes []uint32
		want    []uint32
	}{
		{[]uint32{5, 6, 7}, []uint32{0, 1, 9}},
		{[]uint32{6, 7, 8}, []uint32{1, 9, 0}},
		{[]uint32{5, 6, 7, 8}, []uint32{2, 1, 9, 0}},
	} {
		all := links(step.indexes...)
		beyond := n.give(all)
		for i, link := range all {
			if link.Bit != step.want[i] || beyond != 0 {
				t.Errorf("%v: %d has number %d, want %d (beyond: %d)", step.indexes, link.Index, link.Bit, step.want[i], beyond)
			}
		}
	}
	many := make([]plan.Link, uplinks.Bits+2)
	for i := range many {
		many[i].Index = uint32(100 + i)
	}
	for range 2 {
		if beyond := n.give(many); beyond != 2 {
			t.Errorf("%d beyond, want 2", beyond)
		}
		for i, link := range many {
			if link.Bit != uint32(min(i, uplinks.Bits-1)) {
				t.Errorf("%d has number %d", link.Index, link.Bit)
			}
		}
	}
}
