package cni

import (
	"encoding/json"
	"fmt"
	"maps"
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
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// prevResult is the configuration that a runtime calls CHECK with.
func prevResult(t testing.TB, r *current.Result) map[string]any {
	t.Helper()
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]any{"prevResult": json.RawMessage(raw)}
}

// damage is one way in which the node can stop being as ADD left it, what CHECK says of it, and whether the agent mends it.
type damage struct {
	do     func(d damaged)
	says   string
	mended bool
}

type damaged struct {
	*fixture
	pod       *pod
	inPod     *device.Handle
	link      device.Link // the host's end
	podLink   device.Link
	family    wire.Family // of what is damaged
	addr      netip.Addr
	endpoints *endpoints.Map
	devices   *devices.Map
}

var stranger = net.HardwareAddr{2, 2, 2, 2, 2, 2}

// damages are those of a pod in either family.
func damages(f wire.Family) map[string]damage {
	addr := firstPods[f].String()
	everywhere := netip.PrefixFrom([wire.Families]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[f], 0)
	return map[string]damage{
		"nothing":        {func(damaged) {}, "", false},
		"host link down": {func(d damaged) { d.must(d.host.SetDown(d.link.Index)) }, "is down", true},
		"pod link down":  {func(d damaged) { d.must(d.inPod.SetDown(d.podLink.Index)) }, "the pod's interface eth0 is down", false},
		"host mtu": {func(d damaged) {
			d.must(netlink.LinkSetMTU(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Index: d.link.Index}}, 1300))
		}, "MTU 1300 instead of 1400", false},
		"no host link":   {func(d damaged) { d.must(d.host.DeleteLink(d.link.Index)) }, "the host has no interface", false},
		"host route":     {func(d damaged) { d.must(d.host.DeleteRoute(device.Route{Dst: whole(d.addr)})) }, "the host has no route to " + addr, true},
		"host neighbour": {func(d damaged) { d.must(d.host.DeleteNeighbour(d.link.Index, d.addr)) }, "the host has no permanent neighbour " + addr, true},
		"route's source": {func(d damaged) {
			d.must(d.host.ReplaceRoute(device.Route{Dst: whole(d.addr), Index: d.link.Index}))
		}, "the host's route to " + addr + " has source invalid IP instead of " + nodeIPs[f].String(), true},
		"node without its address": {func(d damaged) {
			d.must(d.host.ReplaceRoute(device.Route{Dst: whole(d.addr), Index: d.link.Index}))
			v := d.config()
			v.NodeAddresses[f] = wire.AddrFrom(nodeIPs[f].Next())
			d.setConfig(v)
		}, "", false},
		"pod default route": {func(d damaged) {
			d.must(d.inPod.ReplaceRoute(device.Route{Dst: everywhere, Unreachable: true, Foreign: true}))
		}, "the pod has no route to " + everywhere.String(), false},
		"pod mtu, less": {func(d damaged) { d.setPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1300) }) }, "", false},
		"pod mtu, more": {func(d damaged) { d.setPod(func(l netlink.Link) error { return netlink.LinkSetMTU(l, 9000) }) }, "MTU 9000, more than the 1400", false},
		"pod MAC": {func(d damaged) {
			d.setPod(func(l netlink.Link) error { return netlink.LinkSetHardwareAddr(l, stranger) })
		}, "instead of", false},
		"pod address": {func(d damaged) { dropAddress(d.t, d.pod.ns, d.addr) }, "lacks address " + addr, false},
		"no program":  {func(d damaged) { d.must(attach.Attacher{Dir: d.pins}.Detach(d.link.Index, attach.FromPod)) }, "no program is attached", true},
		"no program to the pod": {func(d damaged) {
			v := d.config()
			v.Flags |= mapconfig.Services
			d.setConfig(v)
		}, "no program that sees what is sent to the pod is attached", true},
		"endpoints entry": {func(d damaged) { d.must(d.endpoints.Delete(endpoints.Key{Address: wire.AddrFrom(d.addr)})) }, "endpoints entry of " + addr, true},
		"devices entry":   {func(d damaged) { d.must(d.devices.Delete(devices.Key{Ifindex: uint32(d.link.Index)})) }, "devices", true},
		"another's endpoints entry": {func(d damaged) {
			d.must(d.endpoints.Put(endpoints.Key{Address: wire.AddrFrom(d.addr)}, endpoints.Value{Ifindex: 9999}))
		}, "endpoints entry of " + addr, true},
		"devices without the address": {func(d damaged) {
			v, err := d.devices.Get(devices.Key{Ifindex: uint32(d.link.Index)})
			d.must(err)
			v.Addresses[d.family] = wire.Addr{}
			d.must(d.devices.Put(devices.Key{Ifindex: uint32(d.link.Index)}, v))
		}, "lacks address " + addr, true},
		"address store": {func(d damaged) { d.must(os.Remove(filepath.Join(d.stateDir, "ipam/net1", addr))) }, addr + " is not the pod's in the address store", false},
		"another's address": {func(d damaged) {
			d.must(os.WriteFile(filepath.Join(d.stateDir, "ipam/net1", addr), []byte("x\r\neth0"), 0o600))
		}, addr + " is not the pod's in the address store", false},
	}
}

// ownDamages are those of what only one family has.
func ownDamages(f wire.Family) map[string]damage {
	hostSysctl := func(name, value string) func(damaged) {
		return func(d damaged) { d.setSysctl(d.link.Name, name, value) }
	}
	podSysctl := func(name, value string) func(damaged) {
		return func(d damaged) {
			d.must(d.pod.ns.Do(func() error {
				d.setSysctl("eth0", name, value)
				return nil
			}))
		}
	}
	gateway := gateways[f]
	return [wire.Families]map[string]damage{
		{
			"rp_filter":         {hostSysctl("rp_filter", "0"), "rp_filter is 0 instead of 1", true},
			"forwarding":        {hostSysctl("forwarding", "0"), "forwarding is 0 instead of 1", true},
			"pod neighbour":     {func(d damaged) { d.must(d.inPod.DeleteNeighbour(d.podLink.Index, gateway)) }, "the pod has no permanent neighbour", false},
			"another neighbour": {func(d damaged) { d.must(d.inPod.ReplaceNeighbour(d.podLink.Index, gateway, stranger)) }, "the pod has no permanent neighbour", false},
		},
		{
			"forwarding":            {hostSysctl("forwarding", "0"), "forwarding is 0 instead of 1", true},
			"host follows routers":  {hostSysctl("accept_ra", "2"), "accept_ra is 2 instead of 0", true},
			"host's own address":    {hostSysctl("addr_gen_mode", "0"), "addr_gen_mode is 0 instead of 1", true},
			"host without IPv6":     {hostSysctl("disable_ipv6", "1"), "disable_ipv6 is 1 instead of 0", true},
			"pod follows routers":   {podSysctl("accept_ra", "1"), "eth0/accept_ra is 1 instead of 0", false},
			"pod follows prefixes":  {podSysctl("autoconf", "1"), "eth0/autoconf is 1 instead of 0", false},
			"pod looks for doubles": {podSysctl("accept_dad", "1"), "eth0/accept_dad is 1 instead of 0", false},
			"pod without IPv6":      {podSysctl("disable_ipv6", "1"), "eth0/disable_ipv6 is 1 instead of 0", false},
		},
	}[f]
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

func (d damaged) setSysctl(link, name, value string) {
	d.t.Helper()
	_, err := device.Sysctl{}.Set(fmt.Sprintf("net/%s/conf/%s/%s", d.family, link, name), value)
	d.must(err)
}

func TestCheckSeesWhatIsMissing(t *testing.T) {
	for f, families := range [wire.Families][]wire.Family{{wire.IPv4}, {wire.IPv4, wire.IPv6}} {
		t.Run(wire.Family(f).String(), func(t *testing.T) {
			w := newFixture(t, families...)
			w.conf["addressQuarantine"] = "0s"
			w.conf["args"] = map[string]any{"cni": map[string]any{"ips": w.pick(firstPods)}}
			all := damages(wire.Family(f))
			maps.Copy(all, ownDamages(wire.Family(f)))
			for name, c := range all {
				t.Log("damage:", name)
				w.damage(wire.Family(f), c)
			}
		})
	}
}

// damage makes a pod, breaks something of it and compares what CHECK says.
func (w *fixture) damage(f wire.Family, c damage) {
	w.t.Helper()
	p := w.newPod()
	r := w.add(p, nil)
	d := damaged{fixture: w, pod: p, family: f, addr: firstPods[f], endpoints: w.openEndpoints()}
	var err error
	d.inPod, err = device.OpenIn(p.ns)
	w.must(err)
	defer d.inPod.Close()
	d.link, err = w.host.LinkByName(p.id.HostLinkName())
	w.must(err)
	d.podLink, err = d.inPod.LinkByName("eth0")
	w.must(err)
	d.devices, err = devices.Open(w.pins.Map(devices.Name))
	w.must(err)
	defer d.devices.Close()
	c.do(d)
	if c.says == "" {
		w.ok("CHECK", p, prevResult(w.t, r))
	} else {
		w.refused(codeCheckFailed, "CHECK", p, prevResult(w.t, r), c.says)
	}
	if c.mended {
		w.repair(p)
		w.ok("CHECK", p, prevResult(w.t, r))
	}
	w.ok("DEL", p, nil) // whatever is broken can be taken away
	w.setConfig(w.config())
	w.must(os.RemoveAll(ipam.Dir(w.stateDir))) // what another owner has of it
}

// repair does what the agent does for a pod.
func (w *fixture) repair(p *pod) {
	w.t.Helper()
	n, err := endpoint.Releaser{StateDir: w.stateDir, Pins: w.pins}.Open()
	w.must(err)
	defer n.Close()
	w.must(n.Ready(attach.Auto))
	work := &endpoint.Work{Node: n}
	work.Endpoint, err = endpoint.Read(w.stateDir, p.id)
	w.must(err)
	work.LinkRoutes, err = w.host.OwnRoutes()
	w.must(err)
	work.Neighbours, err = w.host.Neighbours(work.HostIndex)
	w.must(err)
	_, err = work.Repair(w.t.Context())
	w.must(err)
}

func TestCheckComparesPrevResult(t *testing.T) {
	w := newDual(t)
	p := w.newPod()
	r := w.add(p, nil)
	for says, change := range map[string]func(*current.Result){
		"prevResult lacks address 10.9.0.2":  func(r *current.Result) { r.IPs = r.IPs[1:] },
		"prevResult lacks address fd00:9::2": func(r *current.Result) { r.IPs = r.IPs[:1] },
		"lacks address 10.9.0.99":            func(r *current.Result) { r.IPs[0].Address.IP = net.IPv4(10, 9, 0, 99).To4() },
		"lacks address fd00:9::99":           func(r *current.Result) { r.IPs[1].Address.IP = net.ParseIP("fd00:9::99") },
		"prevResult lacks interface":         func(r *current.Result) { r.Interfaces = nil; r.IPs[0].Interface = nil },
		"instead of 02:02:02:02:02":          func(r *current.Result) { r.Interfaces[1].Mac = "02:02:02:02:02:02" },
		"prevResult says 02:03:02":           func(r *current.Result) { r.Interfaces[0].Mac = "02:03:02:02:02:02" },
		`"nonsense" of interface eth0`:       func(r *current.Result) { r.Interfaces[1].Mac = "nonsense" },
		"no route to 10.0.0.0/8": func(r *current.Result) {
			r.Routes[0].Dst = net.IPNet{IP: net.IPv4(10, 0, 0, 0).To4(), Mask: net.CIDRMask(8, 32)}
		},
		"no route to fd00::/8": func(r *current.Result) {
			r.Routes[1].Dst = net.IPNet{IP: net.ParseIP("fd00::"), Mask: net.CIDRMask(8, 128)}
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
