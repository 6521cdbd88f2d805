package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/maps/devices"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/attach"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
)

// check is CHECK: is everything that ADD made and prevResult promises still there? All that is missing is reported at
// once.
func (p *plugin) check(args *skel.CmdArgs) error {
	c, done, err := p.begin("CHECK", args)
	if err != nil {
		return err
	}
	defer done()
	return c.finish(c.checkEndpoint())
}

func (c *call) checkEndpoint() error {
	prev, err := c.prevResult()
	if err != nil {
		return err
	}
	if prev == nil {
		return fieldError("prevResult", "is missing: CHECK compares with it")
	}
	netns, err := openNetNS(c.args.Netns)
	if err != nil {
		return err
	}
	defer netns.Close()
	var by giver
	err = c.shared(func(context.Context) (err error) {
		by, err = c.compare(prev, netns)
		return err
	})
	if err != nil || by.hostLocal() || by.conf == nil {
		return err
	}
	return c.ask(context.Background(), by, c.delegateArgs("CHECK"))
}

// comparison is one CHECK on its way; found collects what is wrong.
type comparison struct {
	*call
	state endpoint.Endpoint
	by    giver
	plane *dataplane
	found []string
}

func (c *comparison) wrong(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

func (c *call) compare(prev *current.Result, netns *device.NetNS) (by giver, err error) {
	state, err := endpoint.Read(c.stateDir, c.id)
	if errors.Is(err, fs.ErrNotExist) {
		return by, types.NewError(types.ErrUnknownContainer, fmt.Sprintf("%s of container %s is unknown", c.id.IfName, c.id.ContainerID), err.Error())
	}
	if err != nil {
		return by, err
	}
	if by, err = c.giverOf(state); err != nil {
		return by, err
	}
	plane, err := openDataplane(c.pins)
	if err != nil {
		return by, err
	}
	defer plane.close()
	cmp := &comparison{call: c, state: state, by: by, plane: plane}
	if state.Releasing {
		cmp.wrong("the endpoint is being released")
	}
	if ns, err := inode(netns); err != nil || ns != state.NetNSInode {
		cmp.wrong("%s is another network namespace than that of ADD", netns.Path())
	}
	cmp.checkResult(prev)
	for _, part := range []func() error{
		func() error { return cmp.checkPod(prev, netns) }, cmp.checkHost, cmp.checkStore,
	} {
		if err := part(); err != nil {
			return by, err
		}
	}
	if len(cmp.found) == 0 {
		return by, nil
	}
	return by, types.NewError(codeCheckFailed, "not as ADD left it: "+strings.Join(cmp.found, "; "), "")
}

// checkResult compares prevResult, which other plugins of the list may have added to, with the endpoint.
func (c *comparison) checkResult(prev *current.Result) {
	var promised []netip.Addr
	for _, ip := range prev.IPs {
		promised = append(promised, toAddr(ip.Address.IP))
	}
	for _, a := range c.state.Addresses {
		if !slices.Contains(promised, a) {
			c.wrong("prevResult lacks address %s", a)
		}
	}
	for _, want := range []struct{ name, mac, sandbox string }{
		{c.state.HostName, c.state.HostMAC.String(), ""},
		{c.id.IfName, c.state.PodMAC.String(), c.args.Netns},
	} {
		i := slices.IndexFunc(prev.Interfaces, func(i *current.Interface) bool {
			return i != nil && i.Name == want.name && (i.Sandbox == "") == (want.sandbox == "")
		})
		switch {
		case i < 0:
			c.wrong("prevResult lacks interface %s", want.name)
		case prev.Interfaces[i].Mac != "" && !strings.EqualFold(prev.Interfaces[i].Mac, want.mac):
			c.wrong("interface %s has Ethernet address %s, prevResult says %s", want.name, want.mac, prev.Interfaces[i].Mac)
		}
	}
}

func (c *comparison) checkPod(prev *current.Result, netns *device.NetNS) error {
	h, err := device.OpenIn(netns)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(c.id.IfName)
	if errors.Is(err, device.ErrNotFound) {
		c.wrong("the pod has no interface %s", c.id.IfName)
		return nil
	}
	if err != nil {
		return err
	}
	c.checkLink("pod's", l, c.state.PodMAC)
	if l.PeerIndex != c.state.HostIndex {
		c.wrong("the pod's interface %s is not the other end of %s", l.Name, c.state.HostName)
	}
	if err := c.checkPodAddresses(h, l, prev); err != nil {
		return err
	}
	return c.checkPodRoutes(h, l, prev)
}

func (c *comparison) checkLink(whose string, l device.Link, mac wire.MAC) {
	switch {
	case l.Kind != "veth":
		c.wrong("the %s interface %s is a %s", whose, l.Name, l.Kind)
	case !l.Up():
		c.wrong("the %s interface %s is down", whose, l.Name)
	}
	if l.MAC.String() != mac.String() {
		c.wrong("the %s interface %s has Ethernet address %s instead of %s", whose, l.Name, l.MAC, mac)
	}
	if l.MTU != c.state.MTU {
		c.wrong("the %s interface %s has MTU %d instead of %d", whose, l.Name, l.MTU, c.state.MTU)
	}
}

func (c *comparison) checkPodAddresses(h *device.Handle, l device.Link, prev *current.Result) error {
	have, err := h.Addresses()
	if err != nil {
		return err
	}
	want := slices.Clone(c.state.Addresses)
	for _, ip := range prev.IPs {
		if a := toAddr(ip.Address.IP); c.onPodInterface(prev, ip) && !slices.Contains(want, a) {
			want = append(want, a)
		}
	}
	for _, a := range want {
		if !slices.ContainsFunc(have, func(x device.Address) bool { return x.Index == l.Index && x.Prefix.Addr() == a }) {
			c.wrong("the pod's interface %s lacks address %s", l.Name, a)
		}
	}
	return nil
}

func (c *comparison) onPodInterface(prev *current.Result, ip *current.IPConfig) bool {
	if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(prev.Interfaces) {
		return false
	}
	i := prev.Interfaces[*ip.Interface]
	return i != nil && i.Name == c.id.IfName && i.Sandbox != ""
}

func (c *comparison) checkPodRoutes(h *device.Handle, l device.Link, prev *current.Result) error {
	have, err := h.Routes()
	if err != nil {
		return err
	}
	want := map[netip.Prefix]netip.Addr{}
	for _, a := range c.state.Addresses {
		want[whole(gateway(a))] = netip.Addr{}
	}
	for _, r := range prev.Routes {
		// Other tables are not read; a route over another interface is another plugin's.
		gw := toAddr(r.GW)
		if dst := toPrefix(&r.Dst); dst.IsValid() && r.Table == nil && (gw == gatewayIPv4 || gw == gatewayIPv6) {
			want[dst] = gw
		}
	}
	for dst, gw := range want {
		if !slices.ContainsFunc(have, func(r device.Route) bool { return r.Dst == dst && r.Index == l.Index && r.Gateway == gw }) {
			c.wrong("the pod has no route to %s", dst)
		}
	}
	neighbours, err := h.Neighbours(l.Index)
	if err != nil {
		return err
	}
	for _, a := range c.state.Addresses {
		is := func(n device.Neighbour) bool { return n.Is(gateway(a), c.state.HostMAC[:]) }
		if !slices.ContainsFunc(neighbours, is) {
			c.wrong("the pod has no permanent neighbour %s", gateway(a))
		}
	}
	return nil
}

func (c *comparison) checkHost() error {
	h, err := device.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(c.state.HostName)
	if errors.Is(err, device.ErrNotFound) {
		c.wrong("the host has no interface %s", c.state.HostName)
		return nil
	}
	if err != nil {
		return err
	}
	c.checkLink("host's", l, c.state.HostMAC)
	state, err := attach.Attacher{Dir: c.pins}.Attached(l.Index, attach.FromPod)
	if err != nil {
		return err
	}
	if state.Mode == "" {
		c.wrong("no program is attached to %s", l.Name)
	}
	gap, err := c.plane.missing(h, c.state)
	if err != nil {
		return err
	}
	if gap != "" {
		c.wrong("%s", gap)
	}
	return c.checkHostRoutes(h, l)
}

func (c *comparison) checkHostRoutes(h *device.Handle, l device.Link) error {
	routes, err := h.OwnRoutes()
	if err != nil {
		return err
	}
	neighbours, err := h.Neighbours(l.Index)
	if err != nil {
		return err
	}
	for _, a := range c.state.Addresses {
		leads := func(r device.Route) bool { return r.Dst == whole(a) && r.Index == l.Index && !r.Unreachable }
		if !slices.ContainsFunc(routes, leads) {
			c.wrong("the host has no route to %s", a)
		}
		if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(a, c.state.PodMAC[:]) }) {
			c.wrong("the host has no permanent neighbour %s", a)
		}
	}
	return nil
}

func (c *comparison) checkStore() error {
	if !c.by.hostLocal() {
		return nil
	}
	s, err := ipam.Open(c.stateDir, c.state.Network, ipam.Options{})
	if err != nil {
		return err
	}
	entries, err := s.Entries()
	if err != nil {
		return err
	}
	for _, a := range c.state.Addresses {
		owned := func(e ipam.Entry) bool {
			return e.State == ipam.Used && e.Address == a && e.Owner == ipam.Owner(c.id)
		}
		if !slices.ContainsFunc(entries, owned) {
			c.wrong("address %s is not the pod's in the address store", a)
		}
	}
	return nil
}

// missing says what an endpoint lacks of its link and its map entries, "" when they are complete. An error is that it
// could not be found out.
func (d *dataplane) missing(host *device.Handle, e endpoint.Endpoint) (string, error) {
	l, err := host.LinkByName(e.HostName)
	switch {
	case errors.Is(err, device.ErrNotFound):
		return "link " + e.HostName + " is gone", nil
	case err != nil:
		return "", err
	case l.Index != e.HostIndex:
		return fmt.Sprintf("link %s has index %d instead of %d", e.HostName, l.Index, e.HostIndex), nil
	}
	dev, err := d.devices.Get(devices.Key{Ifindex: uint32(e.HostIndex)})
	if err != nil && !errors.Is(err, typed.ErrKeyNotExist) {
		return "", err
	}
	for _, a := range e.Addresses {
		key := wire.AddrFrom(a)
		if dev.IPv4 != key && dev.IPv6 != key {
			return fmt.Sprintf("devices entry of link %s lacks address %s", e.HostName, a), nil
		}
		v, err := d.endpoints.Get(endpoints.Key{Address: key})
		if err != nil && !errors.Is(err, typed.ErrKeyNotExist) {
			return "", err
		}
		if want := (endpoints.Value{Ifindex: uint32(e.HostIndex), PodMAC: e.PodMAC, HostMAC: e.HostMAC}); v != want {
			return fmt.Sprintf("endpoints entry of %s is %+v instead of %+v", a, v, want), nil
		}
	}
	return "", nil
}
