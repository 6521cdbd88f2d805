package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
)

// check is CHECK: is everything that ADD made and prevResult promises still there? All that is missing is reported at
// once.
func (c *call) check() error {
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

// comparison is one CHECK on its way.
type comparison struct {
	*call
	*endpoint.Work
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
	state.IPAM = by.ipam
	n, err := c.releaser().Open()
	if err != nil {
		return by, err
	}
	defer n.Close()
	if err := n.Ready(c.attach); err != nil {
		return by, err
	}
	inside, err := device.OpenIn(netns)
	if err != nil {
		return by, err
	}
	defer inside.Close()
	cmp := &comparison{call: c, Work: &endpoint.Work{Node: n, Endpoint: state, Namespace: netns, Inside: inside}}
	if ns, err := inode(netns); err != nil || ns != state.NetNSInode {
		cmp.Wrong("%s is another network namespace than that of ADD", netns.Path())
	}
	cmp.checkResult(prev)
	found, err := cmp.Faults()
	if len(found) > 0 {
		err = types.NewError(codeCheckFailed, "not as ADD left it: "+strings.Join(found, "; "), "")
	}
	return by, err
}

// checkResult compares prevResult, which other plugins of the list may have added to, with the endpoint, and takes over
// what it promises of the pod's side.
func (c *comparison) checkResult(prev *current.Result) {
	var promised []netip.Addr
	for _, ip := range prev.IPs {
		a := toAddr(ip.Address.IP)
		promised = append(promised, a)
		if c.onPodInterface(prev, ip) && !slices.Contains(c.Addresses, a) {
			c.Others = append(c.Others, a)
		}
	}
	for _, a := range c.Addresses {
		if !slices.Contains(promised, a) {
			c.Wrong("prevResult lacks address %s", a)
		}
	}
	for _, r := range prev.Routes {
		// Other tables are not read; a route over another interface is another plugin's.
		if way := toRoute(r); way.Dst.IsValid() && r.Table == nil && way.Gateway == endpoint.Gateway(way.Dst.Addr()) {
			c.Routes = append(c.Routes, way)
		}
	}
	for _, want := range []struct{ name, mac, sandbox string }{
		{c.HostName, c.HostMAC.String(), ""},
		{c.id.IfName, c.PodMAC.String(), c.args.Netns},
	} {
		i := slices.IndexFunc(prev.Interfaces, func(i *current.Interface) bool {
			return i != nil && i.Name == want.name && (i.Sandbox == "") == (want.sandbox == "")
		})
		switch {
		case i < 0:
			c.Wrong("prevResult lacks interface %s", want.name)
		case prev.Interfaces[i].Mac != "" && !strings.EqualFold(prev.Interfaces[i].Mac, want.mac):
			c.Wrong("interface %s has Ethernet address %s, prevResult says %s", want.name, want.mac, prev.Interfaces[i].Mac)
		}
	}
}

func (c *comparison) onPodInterface(prev *current.Result, ip *current.IPConfig) bool {
	if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(prev.Interfaces) {
		return false
	}
	i := prev.Interfaces[*ip.Interface]
	return i != nil && i.Name == c.id.IfName && i.Sandbox != ""
}
