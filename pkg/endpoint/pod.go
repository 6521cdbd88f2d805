package endpoint

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// Gateway is the only next hop of pods in the address's family. No interface has it: the pod's program answers for it, with the
// Ethernet address of the host's end of the veth.
func Gateway(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1})
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1})
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// fixedGateways are those that the pod gets a route and a permanent neighbour entry for. That of IPv6 needs neither: a
// link-local address is on the link, and the pod's kernel solicits it as it does any router.
func (w *Work) fixedGateways() (all []netip.Addr) {
	for _, a := range w.Addresses {
		if a.Is4() {
			all = append(all, Gateway(a))
		}
	}
	return all
}

// podRoutes are all routes of the pod, over its interface of that index.
func (w *Work) podRoutes(index int) (all []device.Route) {
	for _, g := range w.fixedGateways() {
		all = append(all, device.Route{Dst: hostPrefix(g)})
	}
	all = append(all, w.Routes...)
	for i := range all {
		all[i].Index, all[i].Foreign = index, true
	}
	return all
}

// configurePod configures the pod's addresses and routes. Routes need the pod's end to be up; the pair carries nothing
// while the host's end is down. The index of the pod's end is known from the host's: a lookup in the pod would wait once
// more for the kernel's lock of all links (RTNL), which attaching other pods' programs holds for milliseconds.
func (w *Work) configurePod() error {
	index := w.Link.PeerIndex
	others, err := w.otherRoutes()
	if err != nil {
		return err
	}
	if err := w.setPodSysctls(); err != nil {
		return err
	}
	if err := w.Inside.SetUp(index); err != nil {
		return err
	}
	for _, a := range w.Addresses {
		if err := w.Inside.AddAddress(index, hostPrefix(a)); err != nil {
			return err
		}
	}
	for _, g := range w.fixedGateways() {
		if err := w.Inside.ReplaceNeighbour(index, g, w.HostMAC[:]); err != nil {
			return err
		}
	}
	for _, r := range w.podRoutes(index) {
		if err := w.Inside.ReplaceRoute(behind(r, others)); err != nil {
			return err
		}
	}
	if w.SourceRules = len(others) > 0; !w.SourceRules {
		return nil
	}
	return w.writeSourceRules(index)
}

// podSysctls are those of the interface of a pod that has an IPv6 address. Nobody advertises routers or prefixes to it, and
// nobody else has its link-local address, so that can be used at once. Container engines disable IPv6 in new namespaces.
func (w *Work) podSysctls() []setting {
	if !w.hasIPv6() {
		return nil
	}
	ipv6 := "net/ipv6/conf/" + w.IfName + "/"
	return []setting{{ipv6 + "accept_ra", "0"}, {ipv6 + "autoconf", "0"}, {ipv6 + "accept_dad", "0"}, {ipv6 + "disable_ipv6", "0"}}
}

// inPod calls do for each of the pod's sysctls, in its namespace.
func (w *Work) inPod(do func(setting) error) error {
	all := w.podSysctls()
	if len(all) == 0 {
		return nil
	}
	return w.Namespace.Do(func() error { return forAll(all, do) })
}

// setPodSysctls comes before the pod's end is set up, so that its kernel sends nothing that they forbid.
func (w *Work) setPodSysctls() error {
	err := w.inPod(func(s setting) error {
		_, err := w.Sysctl.Set(s.name, s.value)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the kernel has no IPv6, so interface %s can't have an address of it: allocate none, or boot without ipv6.disable=1: %w", w.IfName, err)
	}
	return err
}

func (w *Work) havePodSysctls() error {
	return w.inPod(func(s setting) error {
		have, err := w.Sysctl.Get(s.name)
		return w.compareSysctl(s, have, err)
	})
}

func (w *Work) havePod() error {
	l, err := w.Inside.LinkByName(w.IfName)
	if errors.Is(err, device.ErrNotFound) {
		w.Wrong("the pod has no interface %s", w.IfName)
		return nil
	}
	if err != nil {
		return err
	}
	w.compareKind("pod's", l)
	w.compareMTU(l)
	w.compareUp("pod's", l)
	w.compareMAC("pod's", l, w.InsideMAC)
	if l.PeerIndex != w.HostIndex {
		w.Wrong("the pod's interface %s is not the other end of %s", l.Name, w.HostName)
	}
	addresses, err := w.Inside.Addresses()
	for _, a := range slices.Concat(w.Addresses, w.Others) {
		if !slices.ContainsFunc(addresses, func(x device.Address) bool { return x.Index == l.Index && x.Prefix.Addr() == a }) {
			w.Wrong("the pod's interface %s lacks address %s", l.Name, a)
		}
	}
	return errors.Join(err, w.havePodSysctls(), w.havePodRoutes(l.Index), w.haveSourceRules())
}

// havePodRoutes checks the pod's routes and neighbours.
func (w *Work) havePodRoutes(index int) error {
	routes, err1 := w.Inside.Routes()
	for _, want := range w.podRoutes(index) {
		if !slices.ContainsFunc(routes, func(r device.Route) bool {
			return r.Dst == want.Dst && r.Index == index && r.Gateway == want.Gateway
		}) {
			w.Wrong("the pod has no route to %s", want.Dst)
		}
	}
	if w.MACChanged { // the kernel has forgotten the neighbours; the program answers ARP
		return err1
	}
	neighbours, err2 := w.Inside.Neighbours(index)
	for _, g := range w.fixedGateways() {
		if !slices.ContainsFunc(neighbours, func(n device.Neighbour) bool { return n.Is(g, w.HostMAC[:]) }) {
			w.Wrong("the pod has no permanent neighbour %s", g)
		}
	}
	return errors.Join(err1, err2)
}

// compareMTU accepts a smaller MTU than ADD's: it is another plugin's, and the specification's results say nothing of it.
func (w *Work) compareMTU(l device.Link) {
	if l.MTU > w.MTU {
		w.Wrong("the pod's interface %s has MTU %d, more than the %d of its other end", l.Name, l.MTU, w.MTU)
	}
	for _, a := range w.Addresses {
		if least := MinMTU(a); l.MTU < least {
			w.Wrong("the pod's interface %s has MTU %d, address %s needs at least %d", l.Name, l.MTU, a, least)
		}
	}
}

func (w *Work) compareKind(whose string, l device.Link) {
	if l.Kind != "veth" {
		w.Wrong("the %s interface %s is a %s", whose, l.Name, l.Kind)
	}
}

func (w *Work) compareUp(whose string, l device.Link) {
	if !l.Up() {
		w.Wrong("the %s interface %s is down", whose, l.Name)
	}
}

func (w *Work) compareMAC(whose string, l device.Link, mac wire.MAC) {
	if !bytes.Equal(l.MAC, mac[:]) {
		w.Wrong("the %s interface %s has Ethernet address %s instead of %s", whose, l.Name, l.MAC, mac)
	}
}
