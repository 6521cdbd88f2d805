package device

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var testTunnel = Tunnel{Name: "ec-vxlan", Port: 4789, MAC: net.HardwareAddr{0x02, 0xec, 0, 0, 0, 9}, MTU: 1450}

// added makes somebody's link.
func added(t *testing.T, h *Handle, l netlink.Link) netlink.Link {
	t.Helper()
	must(t, h.nl.LinkAdd(l))
	return l
}

func named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// renamed gives a link another name, for which Linux before 6.2 wants it to be down.
func renamed(h *Handle, l netlink.Link, name string) error {
	err := h.nl.LinkSetName(l, name)
	if errors.Is(err, unix.EBUSY) {
		err = errors.Join(h.nl.LinkSetDown(l), h.nl.LinkSetName(l, name))
	}
	return err
}

// ensured has the tunnel made or mended, set up, and found unchanged by a second call.
func ensured(t *testing.T, h *Handle, want Tunnel, change bool) Link {
	t.Helper()
	l, changed, err := h.EnsureTunnel(want)
	must(t, err)
	if changed != change {
		t.Errorf("changed %v, want %v", changed, change)
	}
	must(t, h.StartTunnel(l))
	again, changed, err := h.EnsureTunnel(want)
	must(t, err)
	if again.Kind != "vxlan" || again.VXLAN != (VXLAN{want.Port, true}) || !again.NoARP || again.Flags&net.FlagMulticast != 0 || !again.Up() ||
		again.MTU != want.MTU || again.MAC.String() != want.MAC.String() || again.Master != 0 || changed {
		t.Errorf("the device is %+v, changed once more: %v", again, changed)
	}
	links, err := h.Links()
	must(t, err)
	for _, l := range links {
		if l.Index == again.Index {
			again.Flags = l.Flags // lists have fewer
			if diff := cmp.Diff(again, l); diff != "" {
				t.Errorf("alone and in the list (-one +listed):\n%s", diff)
			}
		}
	}
	return again
}

// TestTunnelIsMended alters everything about the device that can be altered.
func TestTunnelIsMended(t *testing.T) {
	h, _ := inside(t)
	first := ensured(t, h, testTunnel, true)
	bridge, device := added(t, h, &netlink.Bridge{LinkAttrs: named("br0")}), byIndex(first.Index)
	for what, change := range map[string]func() error{
		"the MTU":    func() error { return h.nl.LinkSetMTU(device, 1300) },
		"the MAC":    func() error { return h.nl.LinkSetHardwareAddr(device, net.HardwareAddr{2, 0, 0, 0, 0, 1}) },
		"ARP":        func() error { return h.nl.LinkSetARPOn(device) },
		"the bridge": func() error { return h.nl.LinkSetMaster(device, bridge) },
		"the name":   func() error { return renamed(h, device, "other0") },
	} {
		must(t, change())
		if l := ensured(t, h, testTunnel, true); l.Index != first.Index {
			t.Errorf("with %s changed the device is another one", what)
		}
	}
	must(t, h.nl.LinkSetDown(device))
	ensured(t, h, testTunnel, false)
	again := testTunnel
	again.Index = first.Index
	must(t, h.DeleteLink(first.Index))
	if l := ensured(t, h, again, true); l.Index != first.Index {
		t.Errorf("made anew the device has index %d, wanted as before: %d", l.Index, first.Index)
	}
	again.Port, again.Index = 8472, 0
	if l := ensured(t, h, again, true); l.Index != first.Index {
		t.Errorf("on another port the device has index %d, wanted as before: %d", l.Index, first.Index)
	}
	must(t, h.DeleteLink(first.Index))
	again.Index = 1 // loopback's
	ensured(t, h, again, true)
}

// TestTunnelNamesWhoHasThePort tries each kind of holder.
func TestTunnelNamesWhoHasThePort(t *testing.T) {
	for _, holder := range []struct {
		name, says string
		device     netlink.Link
	}{
		{"a flow-based device", "device other", &netlink.Vxlan{LinkAttrs: named("other"), FlowBased: true, Port: 4789}},
		{"a device with a VNI", "device flannel.1", &netlink.Vxlan{LinkAttrs: named("flannel.1"), VxlanId: 1, Port: 4789}},
		{"a socket", "socket", nil},
	} {
		t.Run(holder.name, func(t *testing.T) {
			h, _ := inside(t)
			if holder.device == nil {
				c, err := net.ListenPacket("udp4", ":4789")
				must(t, err)
				defer c.Close()
			} else {
				must(t, h.nl.LinkSetUp(added(t, h, holder.device)))
			}
			l, _, err := h.EnsureTunnel(testTunnel)
			if err == nil {
				err = h.StartTunnel(l)
			}
			if !errors.Is(err, ErrPortTaken) || !strings.Contains(err.Error(), holder.says) || !strings.Contains(err.Error(), "4789") {
				t.Errorf("error %v, want one that names %q and the port", err, holder.says)
			}
		})
	}
}

func TestTunnelTakesNobodysDevice(t *testing.T) {
	for name, foreign := range map[string]netlink.Link{
		"bridge":              &netlink.Bridge{LinkAttrs: named("ec-vxlan")},
		"VXLAN, one VNI only": &netlink.Vxlan{LinkAttrs: named("ec-vxlan"), VxlanId: 7, Port: 8472},
	} {
		t.Run(name, func(t *testing.T) {
			h, _ := inside(t)
			added(t, h, foreign)
			before, err := h.LinkByName("ec-vxlan")
			must(t, err)
			if _, _, err := h.EnsureTunnel(testTunnel); err == nil || !strings.Contains(err.Error(), before.Kind) {
				t.Errorf("error %v, want one that says of what kind it is", err)
			}
			if after, err := h.LinkByName("ec-vxlan"); err != nil || cmp.Diff(before, after) != "" {
				t.Errorf("the foreign device was %+v and is %+v, %v", before, after, err)
			}
		})
	}
}
