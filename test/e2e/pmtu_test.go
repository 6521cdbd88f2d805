package e2e

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// narrowed is the MTU behind a router, in bytes of IP packet, where it is less than that of pods.
const narrowed = 1300

// narrow has a router refuse what is larger on its way to a prefix, through a gateway or straight out of a link. What it receives may be as large as before.
func narrow(t *testing.T, router *lab.Namespace, to netip.Prefix, via netip.Addr, name string, mtu int) {
	t.Helper()
	link, err := router.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	route := &netlink.Route{
		Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())}, LinkIndex: link.Attrs().Index, MTU: mtu, MTULock: true,
	}
	if via.IsValid() {
		route.Gw = via.AsSlice()
	}
	if err := router.Netlink().RouteReplace(route); err != nil {
		t.Fatal(err)
	}
}

// mtuOf is a link's.
func mtuOf(t *testing.T, ns *lab.Namespace, name string) int {
	t.Helper()
	link, err := ns.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().MTU
}
