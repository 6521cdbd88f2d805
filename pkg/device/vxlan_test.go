package device

import (
	"errors"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var testTunnel = Tunnel{Name: "ec-vxlan", Port: 4789, MAC: net.HardwareAddr{0x02, 0xec, 0, 0, 0, 9}, MTU: 1450}

// ip runs a command of iproute2 in the test's namespace.
func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
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
	if again.Kind != "vxlan" || again.VXLAN != (VXLAN{want.Port, true}) || !again.NoARP || !again.Up() ||
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
	ip(t, "link add br0 type bridge")
	for _, change := range []string{
		"link set ec-vxlan mtu 1300", "link set ec-vxlan address 02:00:00:00:00:01", "link set ec-vxlan arp on", "link set ec-vxlan master br0",
		"link set ec-vxlan name other0",
	} {
		ip(t, change)
		if l := ensured(t, h, testTunnel, true); l.Index != first.Index {
			t.Errorf("after %q the device is another one", change)
		}
	}
	ip(t, "link set ec-vxlan down")
	ensured(t, h, testTunnel, false)
	again := testTunnel
	again.Index = first.Index
	ip(t, "link del ec-vxlan")
	if l := ensured(t, h, again, true); l.Index != first.Index {
		t.Errorf("made anew the device has index %d, wanted as before: %d", l.Index, first.Index)
	}
	again.Port, again.Index = 8472, 0
	if l := ensured(t, h, again, true); l.Index != first.Index {
		t.Errorf("on another port the device has index %d, wanted as before: %d", l.Index, first.Index)
	}
	ip(t, "link del ec-vxlan")
	again.Index = 1 // loopback's
	ensured(t, h, again, true)
}

// TestTunnelNamesWhoHasThePort tries each kind of holder.
func TestTunnelNamesWhoHasThePort(t *testing.T) {
	for _, holder := range []struct{ name, made, says string }{
		{"a flow-based device", "link add other type vxlan external dstport 4789", "device other"},
		{"a device with a VNI", "link add flannel.1 type vxlan id 1 dstport 4789", "device flannel.1"},
		{"a socket", "", "socket"},
	} {
		t.Run(holder.name, func(t *testing.T) {
			h, _ := inside(t)
			if holder.made == "" {
				c, err := net.ListenPacket("udp4", ":4789")
				must(t, err)
				defer c.Close()
			} else {
				ip(t, holder.made)
				ip(t, "link set "+strings.Fields(holder.made)[2]+" up")
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
	for _, foreign := range []string{"bridge", "vxlan id 7 dstport 8472"} {
		t.Run(foreign, func(t *testing.T) {
			h, _ := inside(t)
			ip(t, "link add ec-vxlan type "+foreign)
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
