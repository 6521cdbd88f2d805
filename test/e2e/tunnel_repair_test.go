package e2e

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/drops"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

// tunnelBreaks are what can be done to the tunnel's device. All of it comes back with the number that the device had.
func (d *damaged) tunnelBreaks(t *testing.T, attach string) map[string]func() error {
	t.Helper()
	nl := d.node.Netlink()
	device, err := nl.LinkByName(tunnelDevice)
	if err != nil {
		t.Fatal(err)
	}
	index := device.Attrs().Index
	sysctl := func(name, value string) func() error {
		return func() error { return d.node.WriteSysctl("net/ipv4/conf/"+tunnelDevice+"/"+name, value) }
	}
	breaks := map[string]func() error{
		"the tunnel":                  func() error { return nl.LinkDel(device) },
		"the tunnel's being up":       func() error { return nl.LinkSetDown(device) },
		"the tunnel's name":           func() error { return renameTunnel(nl, device) },
		"the tunnel's MTU":            func() error { return nl.LinkSetMTU(device, 1300) },
		"the tunnel's MAC":            func() error { return nl.LinkSetHardwareAddr(device, net.HardwareAddr{2, 1, 2, 3, 4, 5}) },
		"the tunnel's having no ARP":  func() error { return nl.LinkSetARPOn(device) },
		"the tunnel's incoming hook":  func() error { return d.detach(attach, index, "from_tunnel") },
		"the tunnel's outgoing hook":  func() error { return d.detach(attach, index, "to_tunnel") },
		"the tunnel's rp_filter":      sysctl("rp_filter", "1"),
		"the tunnel's forwarding":     sysctl("forwarding", "0"),
		"the tunnel, for another one": func() error { return replaceTunnel(nl, device) },
	}
	for _, cidr := range d.node.PodCIDRs {
		address := only(cidr.Addr()).String()
		breaks["the tunnel's address "+address] = func() error { return nl.AddrDel(device, &netlink.Addr{IPNet: prefix(address)}) }
	}
	return breaks
}

// renameTunnel gives the device another name, for which Linux before 6.2 wants it to be down.
func renameTunnel(nl *netlink.Handle, device netlink.Link) error {
	err := nl.LinkSetName(device, "renamed0")
	if errors.Is(err, unix.EBUSY) {
		err = errors.Join(nl.LinkSetDown(device), nl.LinkSetName(device, "renamed0"))
	}
	return err
}

// replaceTunnel puts a device on another port in its place, before the agent makes it again.
func replaceTunnel(nl *netlink.Handle, device netlink.Link) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = tunnelDevice, device.Attrs().Index
	var err error
	for range 50 {
		if err = nl.LinkDel(device); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
		if err = nl.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: 8472}); !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return err
}

// Flows through the tunnel live on whatever is done to its device.
func TestFlowsOutliveTheTunnelsDevice(t *testing.T) {
	t.Parallel()
	forNewestAttach(t, testFlowsOutliveTheTunnelsDevice)
}

func testFlowsOutliveTheTunnelsDevice(t *testing.T, attach string) {
	d := startDamaged(t, []string{attach, "--routing-mode=vxlan"}, drops.NodeOffLink, drops.NotIP)
	far := addPod(t, d.Nodes[1], "far")
	at, host := serve(t, far.Namespace), serve(t, d.Nodes[1].Namespace)
	var flows []*connections
	for _, from := range []*lab.Namespace{d.pod.Namespace, d.node.Namespace} {
		for _, to := range []netip.AddrPort{at, host} {
			flows = append(flows, connect(t, from, to, 0, 2))
		}
	}
	before := lookAt(func() lab.Snapshot { return d.state(t) })
	for name, do := range d.tunnelBreaks(t, attach) {
		if err := do(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		before.assertBack(t, repairPromise, name)
		for _, f := range flows {
			f.assertAlive(t, name)
		}
	}
	assertReaches(t, d.pod.Namespace, at, d.pod.Addr())
	assertReaches(t, d.node.Namespace, at, d.node.Addr())
}
