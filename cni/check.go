package cni

import (
	"bytes"
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

// check is CHECK: it reports everything that ADD made or prevResult lists and that is no longer so. An Ethernet address that
// another plugin of the list has given the pod after our ADD is first learned of here: the host follows it at once.
func (c *call) check() error {
	prev, err := c.prevResult()
	if err != nil {
		return err
	}
	if prev == nil {
		return fieldError("prevResult", "is missing: CHECK needs the result of ADD")
	}
	netns, err := openNetNS(c.args.Netns)
	if err != nil {
		return err
	}
	defer netns.Close()
	var src ipamSource
	err = c.shared(func(ctx context.Context) (err error) {
		src, err = c.compare(ctx, prev, netns)
		return err
	})
	if err != nil || src.hostLocal() || src.conf == nil {
		return err
	}
	return c.ask(context.Background(), src, c.delegateArgs("CHECK"))
}

func (c *call) compare(ctx context.Context, prev *current.Result, netns *device.NetNS) (src ipamSource, err error) {
	state, err := endpoint.Read(c.stateDir, c.id)
	if errors.Is(err, fs.ErrNotExist) {
		return src, types.NewError(types.ErrUnknownContainer, fmt.Sprintf("interface %s of container %s is unknown", c.id.IfName, c.id.ContainerID), err.Error())
	}
	if err != nil {
		return src, err
	}
	if src, err = c.sourceOf(state); err != nil {
		return src, err
	}
	state.IPAM = src.ipam
	n, err := c.releaser().Open()
	if err != nil {
		return src, err
	}
	defer n.Close()
	if err := n.Ready(c.attach); err != nil {
		return src, err
	}
	inside, err := device.OpenIn(netns)
	if err != nil {
		return src, err
	}
	defer inside.Close()
	w := &endpoint.Work{Node: n, Endpoint: state, Namespace: netns, Inside: inside}
	if ns, err := inode(netns); err != nil || ns != state.NetNSInode {
		w.Wrong("%s is not the network namespace of ADD", netns.Path())
	}
	checkResult(w, prev)
	if err := followResult(ctx, w); err != nil {
		return src, err
	}
	found, err := w.Faults()
	if len(found) > 0 {
		err = types.NewError(codeCheckFailed, "the endpoint is not as ADD left it: "+strings.Join(found, "; "), "")
	}
	return src, err
}

// checkResult compares prevResult with the endpoint, and adds what it lists of the pod's side to what is checked: there
// other plugins of the list may have changed what ours has made.
func checkResult(w *endpoint.Work, prev *current.Result) {
	var listed []netip.Addr
	for _, ip := range prev.IPs {
		a := toAddr(ip.Address.IP)
		listed = append(listed, a)
		if onPodInterface(w, prev, ip) && !slices.Contains(w.Addresses, a) {
			w.Others = append(w.Others, a)
		}
	}
	for _, a := range w.Addresses {
		if !slices.Contains(listed, a) {
			w.Wrong("prevResult lacks address %s", a)
		}
	}
	for _, r := range prev.Routes {
		// Other tables are not read; a route over another interface is another plugin's.
		if way := toRoute(r); way.Dst.IsValid() && r.Table == nil && way.Gateway == endpoint.Gateway(way.Dst.Addr()) {
			w.Routes = append(w.Routes, way)
		}
	}
	if host := listedInterface(w, prev, w.HostName, false); host != nil && !strings.EqualFold(host.Mac, w.HostMAC.String()) {
		w.Wrong("interface %s has Ethernet address %s, prevResult says %s", w.HostName, w.HostMAC, host.Mac)
	}
	w.InsideMAC = w.PodMAC
	if pod := listedInterface(w, prev, w.IfName, true); pod != nil && w.InsideMAC.UnmarshalText([]byte(pod.Mac)) != nil {
		w.Wrong("prevResult's %q of interface %s is no Ethernet address", pod.Mac, w.IfName)
	}
}

// followResult has the host follow the pod's Ethernet address in prevResult, if that is what the interface has.
func followResult(ctx context.Context, w *endpoint.Work) error {
	if w.InsideMAC == w.PodMAC || w.Releasing {
		return nil
	}
	l, err := w.Inside.LinkByName(w.IfName)
	if err != nil || l.PeerIndex != w.HostIndex || !bytes.Equal(l.MAC, w.InsideMAC[:]) {
		return nil //nolint:nilerr // that is among the faults
	}
	return w.Follow(ctx, w.InsideMAC)
}

// listedInterface is an interface in prevResult with its Ethernet address; nil: prevResult lacks it, or does not say the
// address.
func listedInterface(w *endpoint.Work, prev *current.Result, name string, inside bool) *current.Interface {
	i := slices.IndexFunc(prev.Interfaces, func(i *current.Interface) bool {
		return i != nil && i.Name == name && (i.Sandbox != "") == inside
	})
	if i < 0 {
		w.Wrong("prevResult lacks interface %s", name)
		return nil
	}
	if prev.Interfaces[i].Mac == "" {
		return nil
	}
	return prev.Interfaces[i]
}

func onPodInterface(w *endpoint.Work, prev *current.Result, ip *current.IPConfig) bool {
	if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(prev.Interfaces) {
		return false
	}
	i := prev.Interfaces[*ip.Interface]
	return i != nil && i.Name == w.IfName && i.Sandbox != ""
}
