package agent

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// movePod gives the pod's end of a link to a namespace of its own, in which it is eth0 and up.
func movePod(t *testing.T, l *loop, e endpoint.Endpoint) *device.NetNS {
	t.Helper()
	var ns *device.NetNS
	priv.InNetNS(t, func() (err error) {
		ns, err = device.CurrentNetNS()
		return err
	})
	t.Cleanup(func() { ns.Close() })
	host, err := l.host.LinkByIndex(e.HostIndex)
	if err != nil {
		t.Fatal(err)
	}
	end := podEnd(host.PeerIndex)
	err = netlink.LinkSetNsFd(end, ns.FD())
	if err == nil {
		err = ns.Do(func() error { return netlink.LinkSetName(end, "eth0") })
	}
	if err == nil {
		err = ns.Do(func() error { return netlink.LinkSetUp(end) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func podEnd(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// tune gives the pod's interface an Ethernet address, as the plugin tuning does.
func tune(t *testing.T, ns *device.NetNS, mac net.HardwareAddr) {
	t.Helper()
	err := ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetHardwareAddr(l, mac)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// knows reports whether all that leads to the pod has the Ethernet address.
func (l *loop) knows(t *testing.T, e endpoint.Endpoint, mac net.HardwareAddr) bool {
	t.Helper()
	now, err := endpoint.Read(l.cfg.State, e.ID)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := l.dp.Maps.Endpoints.Get(endpoints.Key{Address: wire.AddrFrom(e.Addresses[0])})
	if err != nil {
		t.Fatal(err)
	}
	neighbours, err := l.host.Neighbours(e.HostIndex)
	if err != nil {
		t.Fatal(err)
	}
	known := slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(e.Addresses[0], mac) })
	if same := now.PodMAC == wire.MAC(mac); same != known || same != (entry.PodMAC == wire.MAC(mac)) {
		t.Errorf("they disagree on %s: state file %s, map %s, neighbours %v", mac, now.PodMAC, entry.PodMAC, neighbours)
	}
	return known
}

// The agent follows an Ethernet address that another plugin has given a pod, and says so once.
func TestChangedMACIsFollowed(t *testing.T) {
	l, e := withPod(t)
	log := logged(l)
	ns := movePod(t, l, e)
	first, second := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}, net.HardwareAddr{2, 0, 0, 0, 0, 0x78}
	tune(t, ns, first)
	for range 3 {
		l.pass(t.Context())
	}
	if !l.knows(t, e, first) {
		t.Error("an old pod's new Ethernet address is not followed by a look at the whole node")
	}
	if n := strings.Count(log.String(), "new Ethernet address"); n != 1 {
		t.Errorf("said %d times, want once", n)
	}
	if n := strings.Count(log.String(), "endpoint repaired"); n != 0 {
		t.Errorf("%d lines about repairs, want none: nothing was damaged\n%s", n, log)
	}
	tune(t, ns, second)
	l.passOver(t.Context(), false)
	if l.knows(t, e, second) {
		t.Error("each pod is asked for at each look")
	}
	now, err := endpoint.Read(l.cfg.State, e.ID)
	if err != nil {
		t.Fatal(err)
	}
	now.Created = time.Now()
	if err := endpoint.Write(l.cfg.State, now); err != nil {
		t.Fatal(err)
	}
	l.passOver(t.Context(), false)
	if !l.knows(t, e, second) {
		t.Error("a new pod's Ethernet address is not followed by a look at pods")
	}
	if !l.endpoints.changed() {
		t.Error("a new pod is not soon looked at again: tuning may still be to come")
	}
}

// Behind a port of a bridge in the pod is what has the pod's address, such as a virtual machine, not the port.
func TestMACOfABridgePortIsNotFollowed(t *testing.T) {
	l, e := withPod(t)
	ns := movePod(t, l, e)
	err := ns.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bridge"}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		port, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.LinkSetMaster(port, bridge)
	})
	if err != nil {
		t.Fatal(err)
	}
	tune(t, ns, net.HardwareAddr{2, 0, 0, 0, 0, 0x77})
	l.pass(t.Context())
	if !l.knows(t, e, e.PodMAC[:]) {
		t.Error("packets for the pod no longer have the address of what is behind the bridge")
	}
}
