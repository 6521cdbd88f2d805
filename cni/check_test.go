package cni

import (
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	mapconfig "github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// prevResult is the configuration that a runtime calls CHECK with.
func prevResult(t *testing.T, r *current.Result) map[string]any {
	t.Helper()
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]any{"prevResult": json.RawMessage(raw)}
}

// damage is one way in which the node can stop being as ADD left it.
type damage struct {
	do   func(d damaged)
	says string
}

type damaged struct {
	*fixture
	pod       *pod
	inPod     *device.Handle
	link      device.Link // the host's end
	podLink   device.Link
	addr      netip.Addr
	endpoints *endpoints.Map
	devices   *devices.Map
}

func damages() map[string]damage {
	stranger := net.HardwareAddr{2, 2, 2, 2, 2, 2}
	return map[string]damage{
		"nothing":        {func(damaged) {}, ""},
		"host link down": {func(d damaged) { d.must(d.host.SetDown(d.link.Index)) }, "is down"},
		"pod link down":  {func(d damaged) { d.must(d.inPod.SetDown(d.podLink.Index)) }, "the pod's interface eth0 is down"},
		"host mtu": {func(d damaged) {
			d.must(netlink.LinkSetMTU(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: d.link.Index}}, 1300))
		}, "MTU 1300 instead of 1400"},
		"no host link":   {func(d damaged) { d.must(d.host.DeleteLink(d.link.Index)) }, "the host has no interface"},
		"host route":     {func(d damaged) { d.must(d.host.DeleteRoute(device.Route{Dst: whole(d.addr)})) }, "the host has no route to 10.9.0.2"},
		"host neighbour": {func(d damaged) { d.must(d.host.DeleteNeighbour(d.link.Index, d.addr)) }, "the host has no permanent neighbour"},
		"route's source": {func(d damaged) {
			d.must(d.host.ReplaceRoute(device.Route{Dst: whole(d.addr), Index: d.link.Index}))
		}, "the host's route to 10.9.0.2 has source invalid IP instead of 192.0.2.1"},
		"node without its address": {func(d damaged) {
			d.must(d.host.ReplaceRoute(device.Route{Dst: whole(d.addr), Index: d.link.Index}))
			d.setConfig(mapconfig.Value{
				Layout: wire.LayoutVersion, NodeAddresses: wire.Addresses{wire.AddrFrom(netip.MustParseAddr("192.0.2.99"))},
				PodCIDRAddresses: wire.Addresses{wire.AddrFrom(netip.MustParseAddr("10.9.0.0"))}, PodCIDRLens: [wire.Families]uint32{24},
			})
		}, ""},
		"rp_filter":         {func(d damaged) { d.setSysctl("rp_filter", "0") }, "rp_filter is 0 instead of 1"},
		"forwarding":        {func(d damaged) { d.setSysctl("forwarding", "0") }, "forwarding is 0 instead of 1"},
		"pod neighbour":     {func(d damaged) { d.must(d.inPod.DeleteNeighbour(d.podLink.Index, gateway)) }, "the pod has no permanent neighbour"},
		"another neighbour": {func(d damaged) { d.must(d.inPod.ReplaceNeighbour(d.podLink.Index, gateway, stranger)) }, "the pod has no permanent neighbour"},
		"pod default route": {func(d damaged) {
			d.must(d.inPod.ReplaceRoute(device.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Unreachable: true, Foreign: true}))
		}, "the pod has no route to 0.0.0.0/0"},
		"pod mtu, less": {func(d damaged) { d.setPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1300) }) }, ""},
		"pod mtu, more": {func(d damaged) { d.setPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 9000) }) }, "MTU 9000, more than the 1400"},
		"pod MAC": {func(d damaged) {
			d.setPod(func(l netlink.Link) error { return netlink.LinkSetHardwareAddr(l, stranger) })
		}, "instead of"},
		"pod address":     {func(d damaged) { dropAddress(d.t, d.pod.ns, d.addr) }, "lacks address 10.9.0.2"},
		"no program":      {func(d damaged) { d.must(attach.Attacher{Dir: d.pins}.Detach(d.link.Index, attach.FromPod)) }, "no program is attached"},
		"endpoints entry": {func(d damaged) { d.must(d.endpoints.Delete(endpoints.Key{Address: wire.AddrFrom(d.addr)})) }, "endpoints"},
		"devices entry":   {func(d damaged) { d.must(d.devices.Delete(devices.Key{Ifindex: uint32(d.link.Index)})) }, "devices"},
		"another's endpoints entry": {func(d damaged) {
			d.must(d.endpoints.Put(endpoints.Key{Address: wire.AddrFrom(d.addr)}, endpoints.Value{Ifindex: 9999}))
		}, "endpoints entry of 10.9.0.2"},
		"devices without the address": {func(d damaged) {
			d.must(d.devices.Put(devices.Key{Ifindex: uint32(d.link.Index)}, devices.Value{}))
		}, "lacks address 10.9.0.2"},
		"address store": {func(d damaged) { d.must(os.Remove(filepath.Join(d.stateDir, "ipam/net1/10.9.0.2"))) }, "not the pod's in the address store"},
		"another's address": {func(d damaged) {
			d.must(os.WriteFile(filepath.Join(d.stateDir, "ipam/net1/10.9.0.2"), []byte("x\r\neth0"), 0o600))
		}, "not the pod's in the address store"},
	}
}

func (d damaged) setPod(set func(netlink.Link) error) {
	d.t.Helper()
	d.must(d.pod.ns.Do(func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return set(l)
	}))
}

func (d damaged) setSysctl(name, value string) {
	d.t.Helper()
	_, err := device.Sysctl{}.Set("net/ipv4/conf/"+d.link.Name+"/"+name, value)
	d.must(err)
}

func TestCheckSeesWhatIsMissing(t *testing.T) {
	for name, c := range damages() {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			p := w.newPod()
			r := w.add(p, nil)
			d := damaged{fixture: w, pod: p, addr: netip.MustParseAddr("10.9.0.2")}
			var err error
			d.inPod, err = device.OpenIn(p.ns)
			w.must(err)
			defer d.inPod.Close()
			d.link, err = w.host.LinkByName(p.id.HostLinkName())
			w.must(err)
			d.podLink, err = d.inPod.LinkByName("eth0")
			w.must(err)
			d.endpoints, err = endpoints.Open(w.pins.Map(endpoints.Name))
			w.must(err)
			defer d.endpoints.Close()
			d.devices, err = devices.Open(w.pins.Map(devices.Name))
			w.must(err)
			defer d.devices.Close()
			c.do(d)
			if c.says == "" {
				w.ok("CHECK", p, prevResult(t, r))
				return
			}
			w.refused(codeCheckFailed, "CHECK", p, prevResult(t, r), c.says)
			w.ok("DEL", p, nil) // whatever is broken can be taken away
		})
	}
}

func TestCheckComparesPrevResult(t *testing.T) {
	w := newFixture(t)
	p := w.newPod()
	r := w.add(p, nil)
	for says, change := range map[string]func(*current.Result){
		"prevResult lacks address":     func(r *current.Result) { r.IPs = nil },
		"lacks address 10.9.0.99":      func(r *current.Result) { r.IPs[0].Address.IP = net.IPv4(10, 9, 0, 99).To4() },
		"prevResult lacks interface":   func(r *current.Result) { r.Interfaces = nil; r.IPs[0].Interface = nil },
		"instead of 02:02:02:02:02":    func(r *current.Result) { r.Interfaces[1].Mac = "02:02:02:02:02:02" },
		"prevResult says 02:03:02":     func(r *current.Result) { r.Interfaces[0].Mac = "02:03:02:02:02:02" },
		`"nonsense" of interface eth0`: func(r *current.Result) { r.Interfaces[1].Mac = "nonsense" },
		"no route to 10.0.0.0/8": func(r *current.Result) {
			r.Routes[0].Dst = net.IPNet{IP: net.IPv4(10, 0, 0, 0).To4(), Mask: net.CIDRMask(8, 32)}
		},
	} {
		changed := &current.Result{}
		raw, err := json.Marshal(r)
		w.must(err)
		w.must(json.Unmarshal(raw, changed))
		change(changed)
		w.refused(codeCheckFailed, "CHECK", p, prevResult(t, changed), says)
	}
	w.ok("CHECK", p, prevResult(t, r))

	w.refused(7, "CHECK", p, nil, "prevResult")
	w.refused(7, "CHECK", p, map[string]any{"prevResult": map[string]any{"cniVersion": "1.1.0", "ips": 7}}, "prevResult")
	elsewhere := w.newPod()
	elsewhere.id = p.id
	w.refused(codeCheckFailed, "CHECK", elsewhere, prevResult(t, r), "not the network namespace of ADD", "the pod has no interface eth0")
	w.refused(3, "CHECK", w.newPod(), prevResult(t, r), "unknown")
	w.ok("DEL", p, nil)
	w.refused(3, "CHECK", p, prevResult(t, r), "unknown")
}
