package agent

import (
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/destinations"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
)

// uplinkState is what a test sees of the uplink.
type uplinkState struct {
	attached, entry, address, host bool
}

func (l *loop) uplinkState(t *testing.T, index uint32) (s uplinkState) {
	t.Helper()
	ok, err := l.dp.Attached(int(index), attach.FromUplink)
	if err != nil {
		t.Fatal(err)
	}
	v, there := l.uplinkEntry(index)
	d, found := l.destination(t, "172.18.0.11/32")
	return uplinkState{ok, there, v.Addresses[wire.IPv4].Netip().IsValid(), found && d.Kind == destinations.Host}
}

// An uplink without its address, and so without routes, stays one for the grace: flows keep the address, new ones get
// none. When the address is back all is as before.
func TestUplinkAwayForAMoment(t *testing.T) {
	l := testLoop(t)
	now := time.Now()
	l.uplinks.absences.now = func() time.Time { return now }
	ready(t, l)
	index := l.view.uplinks[0].Index
	expect := func(when string, want uplinkState) {
		t.Helper()
		l.pass(t.Context())
		if got := l.uplinkState(t, index); got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	usual, away := uplinkState{true, true, true, true}, uplinkState{true, true, false, true}
	expect("with its address", usual)
	run(t, "ip addr del 172.18.0.11/24 dev uplink")
	expect("without its address", away)
	now = now.Add(uplinkGrace - time.Second)
	expect("just before the grace is over", away)
	if next := l.pass(t.Context()); next != time.Second {
		t.Errorf("looked again after %v, want when the grace is over", next)
	}
	run(t, "ip addr add 172.18.0.11/24 dev uplink")
	expect("with its address again", usual)
	run(t, "ip addr del 172.18.0.11/24 dev uplink")
	now = now.Add(time.Second)
	expect("without its address again", away)
	now = now.Add(uplinkGrace)
	expect("when the grace is over", uplinkState{})
	run(t, "ip addr add 172.18.0.11/24 dev uplink")
	expect("an uplink anew", usual)
	run(t, "ip link set uplink down")
	expect("down", uplinkState{true, true, true, true})
	now = now.Add(2 * uplinkGrace)
	expect("down for long, with its address", uplinkState{false, false, false, true})
}

// An interface that is gone takes everything along at once.
func TestUplinkThatIsGoneIsNotWaitedFor(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	index := l.view.uplinks[0].Index
	run(t, "ip link del uplink")
	l.pass(t.Context())
	if _, there := l.uplinkEntry(index); there {
		t.Error("the entry is still there")
	}
	if _, there := l.destination(t, "172.18.0.11/32"); there {
		t.Error("the address is still held")
	}
}

// The next agent on the node waits as well.
func TestAbsenceOutlivesTheAgent(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	index := l.view.uplinks[0].Index
	run(t, "ip addr del 172.18.0.11/24 dev uplink")
	l.uplinks.absences, l.uplinks.numbers = newAbsences(l.log), nil
	l.pass(t.Context())
	if got := l.uplinkState(t, index); got != (uplinkState{true, true, false, true}) {
		t.Errorf("%+v", got)
	}
}

func TestUplinkThatIsNamedNoMoreIsNotWaitedFor(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	index := int(l.view.uplinks[0].Index)
	l.cfg.Uplinks = []string{"far"}
	l.uplinks.absences, l.uplinks.numbers = newAbsences(l.log), nil
	l.pass(t.Context())
	if ok, err := l.dp.Attached(index, attach.FromUplink); ok || err != nil {
		t.Errorf("attached: %v, error %v", ok, err)
	}
}

// A second uplink has another number, and what is reached over it says so.
func TestMasksAreWritten(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	far, err := netlink.LinkByName("far")
	if err != nil {
		t.Fatal(err)
	}
	run(t, "ip addr add 172.18.0.99/24 dev far metric 500")
	l.pass(t.Context())
	if v, ok := l.uplinkEntry(uint32(far.Attrs().Index)); !ok || v.Bit != 1 {
		t.Errorf("entry %+v, %v", v, ok)
	}
	for _, prefix := range []string{"172.18.0.12/32", "10.244.2.0/24"} {
		if v, _ := l.destination(t, prefix); v.Uplinks != 3 || v.Ifindex == 0 {
			t.Errorf("%s: %+v", prefix, v)
		}
	}
	if v, ok := l.destination(t, "172.18.0.255/32"); !ok || v.Kind != destinations.Host {
		t.Errorf("broadcast address: %+v, %v", v, ok)
	}
}

// What arrives by a bridge's port meets the port's programs first, and no route leads there: it is no uplink any more.
func TestUplinkBecomesAPort(t *testing.T) {
	l := testLoop(t)
	ready(t, l)
	index := int(l.view.uplinks[0].Index)
	for _, c := range []string{"ip link add br0 type bridge", "ip link set br0 up", "ip addr del 172.18.0.11/24 dev uplink",
		"ip link set uplink master br0", "ip addr add 172.18.0.11/24 dev br0"} {
		run(t, c)
	}
	l.pass(t.Context())
	bridge, err := netlink.LinkByName("br0")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range map[int]bool{index: false, bridge.Attrs().Index: true} {
		if got, err := l.dp.Attached(i, attach.FromUplink); got != want || err != nil {
			t.Errorf("interface %d has the programs of an uplink: %v, error %v, want %v", i, got, err, want)
		}
	}
}
